"""Quantized collectives, 8-bit optimizer state and matrix optimizers together, and with all else.

`compositions.py` has the factors, and what a case is compared with.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import numpy as np
import pytest

import gshard
from tests.covering import covering, parts_of
from tests.program_text import named_by_content
from tests.tiers import quick
from tests.train import compositions
from tests.train.compositions import FACTORS, MORE, batch_of, compare, sharded

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

PAIRS = covering(2, FACTORS)
MANY = [*covering(2, {**FACTORS, **MORE}), *covering(3, FACTORS)]
MANY = [x for x in MANY if x not in PAIRS]
PLAIN: dict[str, Any] = {name: values[0] for name, values in FACTORS.items()}


def case_of(**values: Any) -> dict[str, Any]:
    return {**PLAIN, **values}


def cases(table: list[dict[str, Any]], slow: bool = True) -> list[Any]:
    marks = [pytest.mark.slow] if slow else []
    return [pytest.param(x, id=compositions.name_of(x), marks=marks) for x in table]


# The first dozen covers 87 % of the pairs.
@pytest.mark.parametrize("case", cases(PAIRS[:12], slow=False) + cases(PAIRS[12:] + MANY))
def test_each_step_is_one_devices(case):
    compare(case, *sharded(case))


def test_all_pairs_of_features_and_options_are_tested():
    tested = {part for case in PAIRS for part in parts_of(case, 2)}
    assert len(PAIRS) < 25
    for a in FACTORS:
        for b in FACTORS:
            wanted = {((a, x), (b, y)) for x in FACTORS[a] for y in FACTORS[b]}
            assert a == b or wanted <= tested | {(y, x) for x, y in tested}


ON_DATA_AXES = [x for x in MANY if x["loop"] == "step" and "model" not in x["mesh"]]
AUDITED = case_of(features="all", level="p_g_os, sub-groups")


@pytest.mark.parametrize("case", cases([AUDITED], slow=False) + cases(ON_DATA_AXES))
def test_the_budget_is_that_of_the_program(case):
    state, plan = sharded(case)
    loss, options = compositions.loss_and_options(case, plan)
    step = gshard.make_train_step(loss, plan, **options)
    states = state if isinstance(state, tuple) else (state,)
    audit = gshard.audit(step, *states, batch_of(0))
    assert audit.exceeded == ()
    found = {(x.kind, x.purpose): x.dtype for x in audit.collectives if not x.scalar}
    wire = case["features"] in ("wire", "all")
    assert (found["reduce-scatter", "scatter"] == "u8") == wire
    assert (("all-to-all", "optimizer") in found) == (case["features"] in ("muon", "all"))


@pytest.mark.parametrize("kind", quick(FACTORS["kind"], ["nnx"]))
@pytest.mark.parametrize("level", quick(FACTORS["level"], ["p_g_os"]))
def test_evaluation_computes_with_what_the_step_computes_with(level, kind):
    case = case_of(features="all", level=level, kind=kind, mesh="5")
    state, plan = sharded(case)
    loss, _ = compositions.loss_and_options(case, plan)
    given = state[0] if kind == "nnx" else state
    evaluated = gshard.make_eval_step(loss, plan)(given, batch_of(0))
    _, trained = compositions.step_of(case, plan)(state, batch_of(0))
    np.testing.assert_allclose(evaluated, trained, rtol=1e-6)


@pytest.mark.parametrize("level", quick(FACTORS["level"], ["os_g"]))
def test_a_skipped_step_changes_nothing(level):
    state, plan = sharded(case_of(features="all", level=level, mesh="replicas"))
    step = gshard.make_train_step(compositions.loss_of, plan, donate=False)
    bad = batch_of(0)
    bad["y"][7, 3] = np.inf
    after, metrics = step(state, bad)
    assert metrics["skipped_steps"] == 1
    pair = ((x.params, x.opt_state.inner) for x in (after, state))
    jax.tree.map(np.testing.assert_array_equal, *pair)


STARTS = covering(2, {name: FACTORS[name] for name in ("level", "features", "kind")})


@pytest.mark.slow
@pytest.mark.parametrize(("level", "features", "kind"), [tuple(x.values()) for x in STARTS])
def test_an_init_function_starts_with_the_same_state(level, features, kind):
    case = case_of(features=features, level=level, kind=kind, dtype="bfloat16")
    pair = (compositions.arrays_of(sharded(case, as_function=x)[0]) for x in (True, False))
    for x, y in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_array_equal(x, y)


# ---- those who use none of them ------------------------------------------------------------------

NARROW = re.compile(r"x(ui8|i8|ui4|i4|f8E\w+)>|all_to_all")  # types and operations that they add
EXCEPTED = gshard.Precision(
    "float32", **compositions.PRECISIONS["all"],
    wire_exceptions={"": None}, state_exceptions={"": None},
)  # fmt: skip


def lowered(case: dict[str, Any], precision: Any) -> str:
    """Returns the program of a step with Adam, before XLA compiles it."""
    jax.clear_caches()  # else what was traced before is not traced again
    state, plan = sharded(case, precision=precision)
    loss, options = compositions.loss_and_options(case, plan)
    if case["loop"] == "step":
        step: Any = gshard.make_train_step(loss, plan, **options)
        states = state if isinstance(state, tuple) else (state,)
        return named_by_content(step.lower(*states, batch_of(0)).as_text())
    grad = gshard.value_and_grad(loss, plan, **options)

    def own(state: Any, batch: Any) -> Any:
        return state.apply_gradients(grads=grad(state.params, batch)[1])

    program = jax.jit(own).lower(state, gshard.shard_batch(batch_of(0), plan))
    return named_by_content(program.as_text())


OWN = [
    case_of(features="state", level="os", mesh="replicas", batches="2", kind="linen"),
    case_of(features="state", level="os_g", mesh="model axis", remat=True, kind="nnx"),
    case_of(features="state", level="p_g_os", mesh="torus", batches="2 local", offload=True),
    case_of(features="state", level="p_g_os, sub-groups", mesh="torus", loop="own", frozen=True),
]


@pytest.mark.parametrize("case", cases(OWN, slow=False))
def test_programs_without_them_stay_as_they_are(case):
    """Also of a plan in which every array is excepted, which passes all that looks for them."""
    plain = lowered(case, None)
    assert not NARROW.search(plain)
    for precision in (gshard.Precision("float32"), EXCEPTED):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gshard.GShardWarning)
            assert lowered(case, precision) == plain
    every = gshard.Precision("float32", **compositions.PRECISIONS["all"])
    assert NARROW.search(lowered(case, every))


# ---- checkpoints ---------------------------------------------------------------------------------

SETTINGS = {
    "features": ("muon", "muon, wire", "muon, state", "all"),
    "level": FACTORS["level"],
    "mesh": (*FACTORS["mesh"], "3", "8"),
}
SAVED = [
    (
        case_of(features="muon, state", level="os_g", mesh="5", kind="plain"),
        case_of(features="muon, state", level="p_g_os", mesh="model axis", kind="plain"),
    ),
    (
        case_of(features="all", level="p_g_os", mesh="torus", kind="plain"),
        case_of(features="muon", level="os", mesh="5", kind="plain"),
    ),
    (
        case_of(features="muon", level="os_g", mesh="3", kind="nnx"),
        case_of(features="all", level="p_g_os", mesh="replicas", kind="nnx"),
    ),
]
OTHERS = [
    (
        case_of(kind=x["kind"], dtype=x["dtype"], layers=x["layers"], frozen=x["frozen"],
                **{k: x[k] for k in SETTINGS}),
        case_of(kind=x["kind"], dtype=x["dtype"], layers=x["layers"], frozen=x["frozen"],
                **{k: x[f"then {k}"] for k in SETTINGS}, offload=x["offload"]),
    )
    for x in covering(2, SETTINGS | {f"then {k}": x for k, x in SETTINGS.items()} | {
        k: FACTORS[k] for k in ("kind", "dtype", "layers", "frozen", "offload")
    })
]  # fmt: skip


@pytest.mark.parametrize(
    "first, then",
    [
        pytest.param(
            *pair,
            id=" -> ".join(map(compositions.name_of, pair)),
            marks=() if pair in SAVED[::2] else pytest.mark.slow,
        )
        for pair in SAVED + OTHERS
    ],
)
def test_a_checkpoint_is_restored_under_other_settings(first, then, tmp_path):
    state, plan = sharded(first)
    state, _ = compositions.step_of(first, plan)(state, batch_of(0))
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    other, other_plan = sharded(then)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(like=other).state
    params, moments = compositions.values_of(state, plan)
    found, found_moments = compositions.values_of(restored, other_plan)
    for name, x in params.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    for x, y in zip(found_moments, compositions.as_stored(moments, other_plan), strict=True):
        # Some are rounded to the neighboring code, which is at least 1.6 % away.
        assert compositions.relative(x - y, y) <= 0.02
    compare(then, restored, other_plan, [1])
