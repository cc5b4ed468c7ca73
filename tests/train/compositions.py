"""Steps that combine features, each compared with a step of one device from the same state.

A case names a value of each factor of `FACTORS`. The model has layers that are scanned as a stack
or called one by one, one large array that may be frozen, and a small one. Widths are no multiple of
the number of devices, so that arrays are padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from optax import contrib

import gshard
from gshard.sharding.quantized_array import decoded, encoded, quantized_arrays

WIDTH, OUT, LAYERS, EXAMPLES, STEPS = 98, 130, 2, 480, 2

FACTORS: dict[str, tuple[Any, ...]] = {
    "features": ("wire", "state", "muon", "all"),
    "level": ("os", "os_g", "p_g_os", "p_g_os, sub-groups"),
    "mesh": ("torus", "replicas", "model axis", "5"),
    "kind": ("plain", "linen", "nnx"),
    "loop": ("step", "own", "calls"),
    "batches": ("1", "2 local", "2"),
    "layers": ("stack", "several"),
    "dtype": ("float32", "bfloat16"),
    "offload": (False, True),
    "remat": (False, True),
    "frozen": (False, True),
}
MORE = {
    "level": (*FACTORS["level"], "p_g_os, kept"),
    "mesh": (*FACTORS["mesh"], "3", "8", "replicas, model axis"),
}
Case = Mapping[str, Any]


def name_of(case: Case) -> str:
    """Returns a name of a case, for pytest."""
    flags = [name for name, x in case.items() if x is True]
    return ", ".join([str(x) for x in case.values() if not isinstance(x, bool)] + flags)


# ---- the model -----------------------------------------------------------------------------------


def params_of(stacked: bool = True, width: int = WIDTH) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"base": (width, width), "out": (width, OUT), "bias": (OUT,)}
    found: dict[str, Any] = {k: _normal(rng, s) / width**0.5 for k, s in shapes.items()}
    stack = _normal(rng, (LAYERS, width, width)) / width**0.5
    return found | ({"layers": stack} if stacked else {f"layer{i}": x for i, x in enumerate(stack)})


def batch_of(step: int, width: int = WIDTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((7, step))
    return {"x": _normal(rng, (EXAMPLES, width)), "y": _normal(rng, (EXAMPLES, OUT))}


def _normal(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def loss_of(p: Mapping[str, Any], b: Any, remat: bool = False) -> jax.Array:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ w), None

    layer = jax.checkpoint(layer) if remat else layer
    x = b["x"] @ p["base"]
    if "layers" in p:
        x, _ = jax.lax.scan(layer, x, p["layers"])
    else:
        for i in range(LAYERS):
            x, _ = layer(x, p[f"layer{i}"])
    return jnp.mean((x @ p["out"] + p["bias"] - b["y"]) ** 2)


class Net(nnx.Module):
    """The same as an NNX module."""

    def __init__(self, params: Mapping[str, Any]):
        for name, x in params.items():
            setattr(self, name, nnx.Param(jnp.asarray(x) if isinstance(x, np.ndarray) else x))

    @property
    def params(self) -> dict[str, Any]:
        return {name: x[...] for name, x in vars(self).items() if isinstance(x, nnx.Param)}


def nnx_loss(model: Net, b: Any, remat: bool = False) -> jax.Array:
    return loss_of(model.params, b, remat)


# ---- optimizers and tolerances -------------------------------------------------------------------


def muon_numbers(params: Any) -> Any:
    """Says which dimensions of arrays are those of matrices: the last two."""
    return jax.tree.map(
        lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if x.ndim > 1 else None,
        params,
    )


def muon() -> optax.GradientTransformation:
    """Without Nesterov's step, which would add the gradient to the moment of the state."""
    return contrib.muon(1e-2, muon_weight_dimension_numbers=muon_numbers, nesterov=False)


OPTIMIZERS = {
    "wire": lambda: optax.sgd(0.1, momentum=0.9),
    "state": lambda: optax.adam(1e-2),
    "muon": muon,
    "muon, wire": muon,
    "muon, state": muon,
    "all": muon,
}
WIRE = {"gather_dtype": "int8", "scatter_dtype": "int8"}
PRECISIONS = {
    "wire": WIRE,
    "state": {"state_dtype": "int8"},
    "muon": {},
    "muon, wire": WIRE,
    "muon, state": {"state_dtype": "int8"},
    "all": {**WIRE, "state_dtype": "int8"},
}
# The error of an array's change, and of the moments, relative to their norms. The last bits of a
# moment decide to which of two codes it is rounded, and codes are at least 1.6 % apart.
TOLERANCES = {
    ("wire", "float32"): (0.03, 0.03),
    ("state", "float32"): (1e-4, 0.02),
    ("muon", "float32"): (3e-5, 3e-5),
    ("muon, wire", "float32"): (0.25, 0.03),
    ("muon, state", "float32"): (1e-4, 0.02),
    ("all", "float32"): (0.25, 0.12),
    ("wire", "bfloat16"): (0.03, 0.03),
    ("state", "bfloat16"): (0.1, 0.03),
    ("muon", "bfloat16"): (0.1, 0.03),
    ("muon, wire", "bfloat16"): (0.25, 0.03),
    ("muon, state", "bfloat16"): (0.1, 0.03),
    ("all", "bfloat16"): (0.25, 0.12),
}


@lru_cache
def optimizer(features: str = "muon") -> optax.GradientTransformation:
    return OPTIMIZERS[features]()


def mesh_of(name: str) -> Any:
    """Returns a mesh by the words of its name, or of a number of devices."""
    devices = jax.devices()
    if name == "torus":
        return gshard.make_mesh({"a": 2, "b": 2}, devices=devices[:4])
    if name.isdigit():
        return gshard.make_mesh(devices=devices[: int(name)])
    extra = {"model": 2} if "model axis" in name else {}
    return gshard.make_mesh(replica=2 if "replicas" in name else 1, extra=extra)


# ---- a case --------------------------------------------------------------------------------------


def state_of(case: Case, tx: Any, mesh: Any, params: Any) -> Any:
    """Returns the user's state: a pair, a `TrainState` or an NNX model and its optimizer."""
    if "model" in mesh.axis_names:
        params = {
            k: jax.device_put(x, NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "model")))
            if k.startswith("layer")
            else x
            for k, x in params.items()
        }
    if case["kind"] == "plain":
        return params, tx
    if case["kind"] == "linen":
        return TrainState.create(apply_fn=None, params=params, tx=tx)
    model = Net(params)
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("base"))) if case["frozen"] else nnx.Param
    return model, nnx.Optimizer(model, tx, wrt=wrt)


def sharded(case: Case, as_function: bool = False, **more: Any) -> tuple[Any, gshard.Plan]:
    """Shards the state of a case, also from a function that makes it, with `more` options."""
    mesh = mesh_of(case["mesh"])
    params, tx = params_of(case["layers"] == "stack"), optimizer(case["features"])
    precision = gshard.Precision(case["dtype"], **PRECISIONS[case["features"]])
    options: dict[str, Any] = {"precision": precision, "offload": case["offload"]}
    options |= {"min_shard_size": 200}
    if case["layers"] == "stack":
        options["scan_axes"] = {"layers": 0}
    if case["frozen"] and case["kind"] != "nnx":
        options["frozen"] = "^base$"
    level = case["level"].partition(",")[0]

    def make() -> Any:
        return state_of(case, tx, mesh, params)

    given = make if as_function else make()
    return gshard.shard_train_state(given, mesh, level, **{**options, **more})


def arrays_of(state: Any) -> Any:
    """Returns the arrays of a state as they are stored."""
    return nnx.state(state) if isinstance(state, tuple) else state


def loss_and_options(case: Case, plan: gshard.Plan) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of `make_train_step`, which `value_and_grad` takes too."""
    loss: Any = partial(nnx_loss if case["kind"] == "nnx" else loss_of, remat=case["remat"])
    options: dict[str, Any] = {"micro_batches": int(case["batches"][0])}
    if "local" in case["batches"]:
        options["accumulate"] = "local"
    if "sub-groups" in case["level"]:
        options["reshard_after_forward"] = next(n for n in (2, 3, 5) if plan.group.size % n == 0)
    if "kept" in case["level"]:
        options["reshard_after_forward"] = False
    return loss, options


def step_of(case: Case, plan: gshard.Plan) -> Any:
    """Returns a function of state and batch that returns the new state and the loss."""
    loss, options = loss_and_options(case, plan)
    if case["loop"] != "step":
        return own_loop(loss, plan, case["loop"] == "calls", options)
    step = gshard.make_train_step(loss, plan, donate=False, **options)

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        if isinstance(state, tuple):
            return state, step(*state, batch)["loss"]
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return run


def own_loop(loss: Any, plan: gshard.Plan, in_calls: bool, options: dict[str, Any]) -> Any:
    """Returns a step of the user's own, whose gradients may come from two separate calls."""
    grad = gshard.value_and_grad(loss, plan, sync=not in_calls, **options)

    def gradients(target: Any, batch: Any) -> tuple[Any, Any]:
        if not in_calls:
            return grad(target, batch)
        halves = [{k: x[i::2] for k, x in batch.items()} for i in range(2)]
        first, second = (grad(target, gshard.shard_batch(x, plan))[1] for x in halves)
        return gshard.reduce_gradients(first + second, plan)

    @nnx.jit
    def of_nnx(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = gradients(model, batch)
        optimizer.update(model, grads)
        return value

    @jax.jit
    def of_linen(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = gradients(state.params, batch)
        return state.apply_gradients(grads=grads), value

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        batch = batch if in_calls else gshard.shard_batch(batch, plan)
        if isinstance(state, tuple):
            return state, of_nnx(*state, batch)
        return of_linen(state, batch)

    return run


def values_of(state: Any, plan: gshard.Plan) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Returns the parameters of a state, and the arrays of its optimizer state, unsharded."""
    plain = plan.unwrap(state)
    if isinstance(plain, tuple):
        params, opt_state = plain[0].params, nnx.as_pure(nnx.state(plain[1]))["opt_state"]
    else:
        params, opt_state = plain.params, plain.opt_state
    leaves = list(map(np.asarray, jax.tree.leaves(opt_state)))
    return {k: np.asarray(x) for k, x in params.items()}, leaves


def first_leaves(features: str, params: Any) -> list[Any]:
    """Returns the arrays of an optimizer state that no step has changed."""
    return jax.tree.leaves(optimizer(features).init(params))


@lru_cache
def one_device(features: str, frozen: bool) -> Any:
    """Returns a step of one device: of parameters, arrays of the optimizer state, and a batch."""
    tx = optimizer(features)

    @jax.jit
    def step(params: Any, leaves: Any, batch: Any) -> Any:
        fixed = {"base": params["base"]} if frozen else {}
        trained = {k: x for k, x in params.items() if k not in fixed}
        structure = jax.tree.structure(jax.eval_shape(tx.init, trained))
        value, grads = jax.value_and_grad(lambda p: loss_of({**p, **fixed}, batch))(trained)
        updates, after = tx.update(grads, structure.unflatten(leaves), trained)
        return value, {**optax.apply_updates(trained, updates), **fixed}, jax.tree.leaves(after)

    return step


def compare(case: Case, state: Any, plan: gshard.Plan, steps: Sequence[int] = range(STEPS)) -> Any:
    """Compares steps of a case with one device's; returns the last state."""
    step = step_of(case, plan)
    assert_effective(case, plan)
    for i in steps:
        before = values_of(state, plan)  # NNX changes its objects
        state, loss = step(state, batch_of(i))
        assert_one_step(case, plan, before, state, loss, batch_of(i))
    return state


def assert_effective(case: Case, plan: gshard.Plan) -> None:
    """The features of a case apply to its large arrays: no combination turns one off."""
    large = {x.path for x in jax.tree.leaves(plan.params)} - {"bias"}
    wire, eight_bits = (name in PRECISIONS[case["features"]] for name in (*WIRE, "state_dtype")[1:])
    assert {x.path for x in jax.tree.leaves(plan.grads) if x.scattered_as} == (
        large if wire else set()
    )
    assert {x.path for x in jax.tree.leaves(plan.params) if x.gathered_as} == (
        large if wire and "p_g_os" in case["level"] else set()
    )
    moments = {x.codes.path.removesuffix("/codes") for x in quantized_arrays(plan.opt_state)}
    ends = {path for path in large if any(x.endswith(f"/{path}") for x in moments)}
    assert ends == (large if eight_bits else set())
    if OPTIMIZERS[case["features"]] is muon:
        products = plan.update_products
        assert products.sent > 0 and {name for name, _ in products.unshared} <= {"base", "out"}


def assert_one_step(
    case: Case, plan: gshard.Plan, before: tuple[Any, Any], after: Any, loss: Any, batch: Any
) -> None:
    """Compares a step with one device's from the same state."""
    of_change, of_state = TOLERANCES[case["features"], case["dtype"]]
    params, leaves = before
    value, wanted, opt_state = one_device(case["features"], case["frozen"])(params, leaves, batch)
    np.testing.assert_allclose(loss, value, rtol=1e-5 if of_change < 0.01 else 0.03)
    found, found_state = values_of(after, plan)
    for name, x in wanted.items():
        if case["frozen"] and name == "base":
            np.testing.assert_array_equal(found[name], x)
            continue
        error = relative(found[name] - x, x - params[name])
        assert error <= of_change, (name, error)
    for x, y in zip(found_state, as_stored(opt_state, plan), strict=True):
        error = relative(x - y, y)
        assert error <= of_state, (x.shape, error)


def as_stored(opt_state: Any, plan: gshard.Plan) -> list[np.ndarray]:
    """Returns the arrays of an optimizer state with the values that the plan's state can store."""
    return list(map(np.asarray, _as_stored(plan)(opt_state)))


@lru_cache
def _as_stored(plan: gshard.Plan) -> Any:
    return jax.jit(lambda x: jax.tree.leaves(decoded(encoded(x, plan.opt_state))))


def relative(error: Any, whole: Any) -> float:
    return float(np.linalg.norm(np.ravel(error)) / max(np.linalg.norm(np.ravel(whole)), 1e-30))
