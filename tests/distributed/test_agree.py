"""Two real processes that do not do the same are told, on both, before anything goes wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from gshard.distributed.agree import _exchange
from tests.processes import run_workers


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    return run_workers(tmp_path_factory.mktemp("states"), "distributed.agree_worker", "states")


DIFFERENT = {
    "seeds": ("same values in the train state: params/v, params/w on process 1 differ", "seed",
              "broadcast_from=0"),
    "seeds_at_p_g_os": ("params/v, params/w on process 1 differ from process 0",),
    "broadcast_on_one": ("differ in broadcast_from: None on process 0, 0 on process 1",),
    "broadcast_from_nobody": ("broadcast_from=2 is no process: there are 2",),
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


def assert_told(processes, case, begins, words):
    """Every process raised an error that begins so and has all of the words."""
    assert type(words) is tuple  # a text would be compared letter by letter
    for process in processes:
        assert str(process[case]).startswith(begins)
        for x in words:
            assert x in str(process[case])


@pytest.mark.parametrize("case", DIFFERENT)
def test_processes_that_shard_different_states_are_told(states, case):
    assert_told(states, case, "error: ", DIFFERENT[case])


def test_the_values_of_one_process_are_taken(states):
    first, second = ({k: str(x) for k, x in process.items()} for process in states)
    for case in ("equal", "broadcast", "broadcast_from_1", "init_broadcast", "paddle", "pytorch"):
        assert first[case] == second[case] and not first[case].startswith("error")
    assert first["equal"] == first["equal_again"] == first["broadcast"] == first["broadcast_equal"]
    assert first["init_broadcast"] == first["init"]
    assert first["broadcast_from_1"] != first["equal"]


def test_a_message_is_sent_once_for_each_process(states):
    for process in states:
        assert str(process["rows"]) == "{'process': 2, 'device': 2}"


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


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    return run_workers(folder, "distributed.agree_worker", "programs")


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
def test_processes_that_compile_different_programs_are_told(programs, case):
    begins = "error: the processes do not run the same program"
    assert_told(programs, case, begins, OTHERS[case])


IN_OWN_LOOPS = {
    "loop_losses": 1, "loop_losses_in_a_loader": 4, "loop_losses_saved": 4,
    "loop_second_losses": 1,
}  # fmt: skip


@pytest.mark.parametrize("case", IN_OWN_LOOPS)
def test_different_losses_in_a_loop_of_the_users_are_told_at_the_next_meeting(programs, case):
    name = "more" if case == "loop_second_losses" else "of_rank"
    words = f"the processes do not run the same program: the loss {name} ("
    begins = f"after {IN_OWN_LOOPS[case]}: {words}"
    assert_told(programs, case, begins, ("in a loop of your own", "traced program", "on process 1"))


SAME = ["equal", "equal_again", "printed", "eval_equal", "backward_equal", "backward_local_equal"]
SAME += ["loop_equal", "loop_equal_in_a_loader", "loop_equal_traced_alone"]


@pytest.mark.parametrize("case", SAME)
def test_processes_that_compile_the_same_program_run_it(programs, case):
    first, second = (float(str(process[case])) for process in programs)
    assert first == second


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    return run_workers(tmp_path_factory.mktemp("batches"), "distributed.agree_worker", "batches")


@pytest.mark.parametrize(
    "case", ["skips", "skips_at_p_g_os", "skips_at_dp", "skips_in_global_batches"]
)
def test_a_skipped_batch_is_found_two_calls_later(batches, case):
    for process, (own, other) in zip(batches, [(4, 5), (5, 4)], strict=True):
        words = f"in call 5 of this step this process gave batch {own} of its loader and another "
        assert str(process[case]).startswith(f"error in call 7: {words}process gave batch {other}:")


def test_a_repeated_batch_is_found(batches):
    words = "this process gave batch 2 of its loader and another process gave batch 3"
    assert words in str(batches[0]["repeats"])
    assert str(batches[1]["repeats"]).startswith("error in call 6: in call 4 of this step")


def test_nothing_is_saved_after_a_skipped_batch_until_a_restore(batches):
    for process in batches:  # two saves were refused, and the step after the restore was saved
        assert str(process["saves"]).startswith("2 [1, 1, 4] in call 2 of this step")


def test_steps_that_do_not_alternate_alike_are_found(batches):
    for process in batches:
        assert "ran against another program of another process" in str(process["alternating"])
        assert "train steps and eval steps in different orders" in str(process["evaluated"])


def test_a_changed_bit_is_found_on_both_processes(batches):
    for process in batches:
        words = "after call 1 of this step the parameter w on "
        assert words in str(process["replicas"]) and "(process 1)" in str(process["replicas"])
        assert "that on 3 other devices" in str(process["replicas"])


EQUAL = [
    "",
    "_evaluated",
    "_without_a_number",
    "_in_a_jit",
    "_in_global_batches",
    "_skipped_by_all",
]


@pytest.mark.parametrize("case", [*EQUAL, "_alternating", "_replicas", "_again"])
def test_the_same_batches_raise_nothing(batches, case):
    first, second = (float(str(process[f"equal{case}"])) for process in batches)
    assert first == second
