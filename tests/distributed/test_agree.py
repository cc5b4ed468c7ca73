"""Two real processes that do not do the same are told, on both, before anything goes wrong."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest

from gshard import GShardError
from gshard._util.errors import OutsideError
from gshard.checkpoint.step_files import StoreError
from gshard.distributed import agree
from gshard.distributed.agree import (
    FailedError,
    FailedOutsideError,
    _exchange,
    check_same_call,
    run_on_all,
)
from tests.distributed.agree_worker import SLOW
from tests.processes import run_workers_once
from tests.tiers import quick


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """`found("batches/skips")`: what the case gave on each process."""

    @cache
    def of(tier):
        return run_workers_once(tmp_path_factory, f"agree-{tier}", "distributed.agree_worker", tier)

    return lambda case: [str(process[case]) for process in of("slow" if case in SLOW else "quick")]


def by_tier(part, cases):
    """The cases of a part of the worker, without those that the quick tier leaves out."""
    return quick(cases, [case for case in cases if f"{part}/{case}" not in SLOW])


def raised_for(error):
    """What `run_on_all` raises when this process raises an error, or None."""

    def fails():
        if error is not None:
            raise error

    with pytest.raises(GShardError) as raised:
        run_on_all(fails, call="save")
    return raised.value


OUTSIDE = [OSError(errno.ENOSPC, "No space left"), StoreError("no answer"), TimeoutError("x")]


@pytest.mark.parametrize("error", OUTSIDE)
def test_a_failure_of_a_disk_or_of_storage_comes_from_outside(error):
    assert type(raised_for(error)) is FailedOutsideError


def test_a_failure_of_the_program_does_not_come_from_outside():
    assert type(raised_for(KeyError("w"))) is FailedError
    assert type(raised_for(GShardError("no"))) is GShardError


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("is_input", [False, True])
def test_an_error_of_another_process_comes_from_where_it_does_there(monkeypatch, is_input, outside):
    other = {"what": "", "why": "no answer", "input": is_input, "outside": outside}
    gathered = lambda text, mesh, what: {0: text, 1: json.dumps(other)}  # noqa: E731
    monkeypatch.setattr(agree, "all_gather_text", gathered)
    kinds = (GShardError, OutsideError) if is_input else (FailedError, FailedOutsideError)
    assert type(raised_for(None)) is kinds[outside]
    if not is_input:  # one of two reasons is a mistake of the program
        assert type(raised_for(KeyError("w"))) is FailedError
        assert type(raised_for(OSError())) is kinds[outside]


DIFFERENT = {
    "seeds": ("same values in the train state: params/v, params/w on process 1 differ", "seed",
              "broadcast_from=0"),
    "seeds_at_p_g_os": ("params/v, params/w on process 1 differ from process 0",),
    "broadcast_on_one": ("differ in broadcast_from: None on process 0, 0 on process 1",),
    "broadcast_from_nobody": ("broadcast_from=2 is not the rank of a process: there are 2",),
    "mesh": ("differ in the mesh: {'data': 4} on process 0", "Make the same mesh on every"),
    "kept": ("differ in the use of the mesh axes: data axes ('expert', 'data')", "the same keep="),
    "level": ("differ in the level: os on process 0, p_g_os on process 1",),
    "dtype": ("differ in the plan: v float32[8] replicated on process 0, v float16[8]",),
    "optimizer": ("differ in the plan", "Make the same model and optimizer"),
    "rate": ("differ in the optimizer: number -0.01 on process 0, number -0.02 on process 1",
             "such as the learning rate"),
    "b1": ("in the optimizer: number 0.1 on process 0, number 0.2 on process 1",),
    "schedule": ("in the optimizer: number 10.0 on process 0, number 11.0 on process 1",),
    "options": ("min_shard_size=",),
    "init_closure": ("the init function <lambda>", "differs in the traced program"),
    "init_keys": ("same values in init_args=: 0 on process 1 differs",),
}  # fmt: skip


def assert_told(said, begins, words):
    """Every process raised an error that begins so and has all of the words."""
    assert type(words) is tuple  # a text would be compared letter by letter
    for text in said:
        assert text.startswith(begins)
        for x in words:
            assert x in text


@pytest.mark.parametrize("case", DIFFERENT)
def test_processes_that_shard_different_states_are_told(found, case):
    assert_told(found(f"states/{case}"), "error: ", DIFFERENT[case])


def test_the_values_of_one_process_are_taken(found):
    for case in ("equal", "broadcast", "broadcast_from_1", "init_broadcast", "paddle", "pytorch"):
        first, second = found(f"states/{case}")
        assert first == second and not first.startswith("error")
    assert found("states/broadcast_scalar") == ["1.0", "1.0"]
    equal = found("states/equal")
    for case in ("equal_again", "broadcast", "broadcast_equal"):
        assert found(f"states/{case}") == equal
    assert found("states/init_broadcast") == found("states/init")
    assert found("states/broadcast_from_1") != equal


def test_a_message_is_sent_once_for_each_process(found):
    assert found("states/rows") == ["{'process': 2, 'device': 2}"] * 2


def exchanged(texts, full):
    """What each process learns, and the number and bytes of its messages: threads as processes."""
    ranks = range(len(texts))
    barrier, slots, sizes = threading.Barrier(len(texts)), {}, {rank: [] for rank in ranks}

    def all_gather(rank, message):
        sizes[rank].append(len(message))
        slots[rank] = message
        barrier.wait(10)
        found = dict(sorted(slots.items()))
        barrier.wait(10)
        assert len({len(x) for x in found.values()}) == 1
        return found

    with ThreadPoolExecutor(len(texts)) as pool:
        run = lambda rank: _exchange(texts[rank], partial(all_gather, rank), full)  # noqa: E731
        found = list(pool.map(run, ranks))
    assert all(x == found[0] for x in found)
    return list(found[0].values()), sizes[0]


LONG, OTHER = "x" * 5000, "x" * 4999 + "y"


@pytest.mark.parametrize(
    ("texts", "full", "learned", "sizes"),
    [
        (["a", "bc", ""], True, ["a", "bc", ""], [128]),
        ([LONG] * 3, True, [LONG] * 3, [128]),
        ([LONG] * 3, False, [LONG] * 3, [128]),
        ([LONG, OTHER], True, [LONG, OTHER], [128, 20 + 8192]),
        ([LONG, OTHER], False, [LONG[:1024]] * 2, [128, 20 + 1024]),
        (["é" * 60, "a"], True, ["é" * 60, "a"], [128, 20 + 128]),
    ],
)
def test_long_texts_travel_only_where_they_differ(texts, full, learned, sizes):
    assert exchanged(texts, full) == (learned, sizes)


OTHERS = {
    "losses": ("the train step of of_rank (", "the traced program", "dot_general"),
    "constant": ("the traced program", "4.0", "8.0"),
    "array": ("the traced program: constant v", "checksum"),
    "options": ("the options: bucket_size=0 on process 0, bucket_size=100 on process 1",),
    "rng": ("the options: rng=key<fry>[] checksum",),
    "eval": ("the eval step of of_rank", "the traced program"),
    "backward": ("backward of the loss", "the traced program"),
    "backward_local": ("backward of the loss", "the traced program"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_processes_that_compile_different_programs_are_told(found, case):
    begins = "error: the processes do not run the same program"
    assert_told(found(f"programs/{case}"), begins, OTHERS[case])


IN_OWN_LOOPS = {
    "loop_losses": 1, "loop_losses_in_a_loader": 4, "loop_losses_saved": 4,
    "loop_second_losses": 1,
}  # fmt: skip


@pytest.mark.parametrize("case", by_tier("programs", IN_OWN_LOOPS))
def test_different_losses_in_a_loop_of_the_users_are_told_at_the_next_meeting(found, case):
    name = "more" if case == "loop_second_losses" else "of_rank"
    words = f"the processes do not run the same program: the loss {name} ("
    begins = f"after {IN_OWN_LOOPS[case]}: {words}"
    told = ("in a loop of your own", "traced program", "on process 1")
    assert_told(found(f"programs/{case}"), begins, told)


SAME = ["equal", "equal_again", "printed", "eval_equal", "backward_equal", "backward_local_equal"]
SAME += ["loop_equal", "loop_equal_in_a_loader", "loop_equal_traced_alone"]


@pytest.mark.parametrize("case", by_tier("programs", SAME))
def test_processes_that_compile_the_same_program_run_it(found, case):
    first, second = map(float, found(f"programs/{case}"))
    assert first == second


SKIPS = ["skips", "skips_at_p_g_os", "skips_at_dp", "skips_in_global_batches"]


@pytest.mark.parametrize("case", by_tier("batches", SKIPS))
def test_a_skipped_batch_is_found_two_calls_later(found, case):
    for said, (own, other) in zip(found(f"batches/{case}"), [(4, 5), (5, 4)], strict=True):
        words = f"in call 5 of this step this process gave batch {own} of its loader and another "
        assert said.startswith(f"error in call 7: {words}process gave batch {other}:")


def test_a_repeated_batch_is_found(found):
    first, second = found("batches/repeats")
    assert "this process gave batch 2 of its loader and another process gave batch 3" in first
    assert second.startswith("error in call 6: in call 4 of this step")


def test_nothing_is_saved_after_a_skipped_batch_until_a_restore(found):
    for said in found("batches/saves"):  # two were refused; the one after the restore was not
        assert said.startswith("2 [1, 1, 4] in call 2 of this step")


def test_steps_that_do_not_alternate_alike_are_found(found):
    for said in found("batches/alternating"):
        assert "another process ran a different program" in said
    for said in found("batches/evaluated"):
        assert "train steps and eval steps in different orders" in said


def test_a_changed_bit_is_found_on_both_processes(found):
    for said in found("batches/replicas"):
        assert "after call 1 of this step the parameter w on " in said and "(process 1)" in said
        assert "that on 3 other devices" in said


EQUAL = ["equal", "equal_evaluated", "equal_without_a_number", "equal_in_a_jit"]
EQUAL += ["equal_in_global_batches", "equal_skipped_by_all", "equal_alternating", "equal_replicas"]


@pytest.mark.parametrize("case", by_tier("batches", [*EQUAL, "equal_again"]))
def test_the_same_batches_raise_nothing(found, case):
    first, second = map(float, found(f"batches/{case}"))
    assert first == second


def test_of_32_processes_the_one_that_makes_another_call_is_named():
    texts = {rank: "batch\n" if rank != 24 else "loader\n" for rank in range(32)}
    said = (
        "gives a batch on processes 0, 1, 2, 3, 4 and 26 more, starts a `for` loop over a "
        "DataLoader on process 24. All of them"
    )
    with pytest.raises(GShardError, match=said):
        check_same_call(texts, "batch")
