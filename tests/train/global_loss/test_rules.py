"""Every rule, for every way to hold the operands: the numbers are those of the function itself."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.train.global_loss import index_rules, partial_rules, product_rules, shape_rules
from gshard.train.global_loss.registry import PARTIAL_RULES, RULES
from tests.train.global_loss import (
    entry_cases,
    index_cases,
    product_cases,
    shape_cases,
    test_positions,
)
from tests.train.global_loss.placed import Placed, check, check_free, placements

CASES = [*entry_cases.CASES, *shape_cases.CASES, *product_cases.CASES, *index_cases.CASES]
EVERY = [*CASES, *test_positions.CASES]
OF_TWO = [case for case in CASES if case.name in ("keys", "reshape: regroup", "stack", "lookup")]
FREE = [case for case in CASES if case.free]
BODIES = """cond custom_jvp_call custom_vjp_call jit remat2 scan shard_map
while""".split()  # test_bodies.py, test_by_examples.py for jit, test_shard_map.py
OVER_MODEL_AXES = """all_gather all_to_all pmax pmin ppermute psum psum_invariant pvary
reduce_scatter""".split()  # test_shard_map.py, tests/train/sequence/ for all_to_all
ATTENTION = [f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd")]  # test_attention.py
OF_DERIVATIVES = ["select_and_gather_add"]  # that only a derivative of JAX has
OF_NEWER_JAX = [x for x in ("log2", "one_minus_square", "polynomial") if not hasattr(lax, x)]
DEFENSIVE = (  # conditions that no equation of this JAX meets, of lines that return None or raise
    "elif len(shape) != len(given.result):",
    "if len(given.placements) > 1 or given.result[place.dim] != _size(given):",
    'if len(given.placements) > 1 or given.params.get("axis_index_groups"):',
    "if any(len(shape) <= place.dim or shape[place.dim] != size for shape in results):",
    "if evaluator.micro_batches > 1:",
    "if not acts_by_entry(given.eqn):",  # test_numbers_are_folded_into_keys_of_unsafe_rbg_together
    "if given.partition.zigzag and first % 2:  # the order of the devices would be reversed",
    "if given.partition.parts == 1:  # nothing to compare with",  # test_one_batch_shard.py
    "if named and not axes:",  # in a `shard_map`: tests/train/fsdp/test_shard_map.py
    "if over_positions is not None:",  # tests/train/sequence/test_operations.py
)
OF_SEQUENCES = "_few_positions"  # the same file
MODULES = (shape_rules, product_rules, index_rules, partial_rules)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_of_the_function(case):
    """Held in a few ways: those that need no collective first, then those of one operand."""
    check(case.f, case.args, case.ways(3, most=4), 3, case.like, case.grads)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_however_the_operands_are_held(case):
    check(case.f, case.args, case.ways(3), 3, case.like, case.grads)


@pytest.mark.parametrize("case", FREE, ids=str)
def test_no_collective_is_needed(case):
    check_free(case)


@pytest.mark.parametrize("case", OF_TWO, ids=str)
def test_numbers_of_two_parts(case):
    check(case.f, case.args, case.ways(2), 2, case.like, case.grads)


def test_two_parts_of_two_blocks_are_not_confused():
    """Two parts, one block of 4 each: no size tells parts and blocks from each other."""
    x = np.arange(8.0, dtype=np.float32).reshape(8, 1)
    f = lambda x: jnp.sin(x.reshape(4, 2) + x.reshape(2, 4).T) * jnp.arange(8).reshape(4, 2)  # noqa: E731
    check(f, [x], [placements("0"), placements("0.2"), placements("0.4")], 2)


def test_keys_of_other_generators_are_drawn_together():
    """They draw for an array of keys from its first one."""

    def draw(data):
        keys = jax.random.wrap_key_data(data, impl="rbg")
        return jax.vmap(lambda key: jax.random.bits(key, (5,)))(keys)

    data = np.zeros((12, 4), np.uint32)
    placed = Placed(draw, [data], 3)
    placed.held([data], placements("0"))
    assert [x.operation for x in placed.transfers] == ["random_bits"]


def test_numbers_are_folded_into_keys_of_unsafe_rbg_together():
    """`fold_in` of an array of numbers draws from the first key that it makes."""

    def draw(numbers):
        fold = lambda n: jax.random.fold_in(jax.random.key(3, impl="unsafe_rbg"), n)  # noqa: E731
        return jax.random.key_data(jax.vmap(fold)(numbers))

    data = np.arange(12, dtype=np.uint32)
    placed = Placed(draw, [data], 3)  # `check` maps over the parts, which draws for all of them
    placed.held([data], placements("0"))
    assert [x.operation for x in placed.transfers] == ["random_fold_in"]


# ---- nothing is left out ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reached():
    """The lines that the cases reach, and the primitives for which a rule decided."""
    lines, decided, files = set(), set(), {m.__file__ for m in MODULES}

    def on_line(frame, event, _):
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame, event, _):
        return on_line(frame, event, _) if frame.f_code.co_filename in files else None

    with pytest.MonkeyPatch.context() as patch:
        for table in (RULES, PARTIAL_RULES):
            for name, rule in table.items():

                def counted(given, name=name, rule=rule, table=table):
                    found = rule(given)
                    if found is not None:
                        decided.add((table is RULES, name))
                    return found

                patch.setitem(table, name, counted)
        before = sys.gettrace()
        for case, parts in [(case, 3) for case in EVERY] + [(case, 2) for case in OF_TWO]:
            placed = Placed(case.f, case.args, parts)
            sys.settrace(on_call)
            try:
                for places in case.ways(parts):
                    placed.held(case.args, places)
            finally:
                sys.settrace(before)
    return lines, decided


def test_every_rule_has_a_case(reached):
    missing = {name for name in RULES if (True, name) not in reached[1]}
    elsewhere = {*BODIES, *OVER_MODEL_AXES, *ATTENTION, *OF_DERIVATIVES, *OF_NEWER_JAX}
    assert missing <= elsewhere, sorted(missing - elsewhere)
    missing = {name for name in PARTIAL_RULES if (False, name) not in reached[1]}
    assert missing <= elsewhere, sorted(missing - elsewhere)


def test_every_line_of_every_rule_is_reached(reached):
    missing = []
    for module in MODULES:
        source = Path(module.__file__).read_text()
        text = ["", *map(str.strip, source.splitlines())]
        for code in _functions(compile(source, module.__file__, "exec")):
            body = {line for _, line in dis.findlinestarts(code) if line} - {code.co_firstlineno}
            missing += [
                f"{module.__name__}:{line} {code.co_name}"
                for line in sorted(body)
                if (module.__file__, line) not in reached[0]
                and text[line - 1] not in DEFENSIVE
                and not code.co_qualname.startswith(OF_SEQUENCES)
            ]
    assert not missing, "\n".join(missing)


def _functions(code):
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x2 and not inner.co_name.startswith("<"):  # optimized: a function
                yield inner
            yield from _functions(inner)
