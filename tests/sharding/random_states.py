"""Train states as hypothesis draws them: trees of any shape, and every way to divide them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from hypothesis import strategies as st

import gshard
from tests.reference import path_name

DTYPES = [np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16)]
SIZES = [1, 7, 13, 16, 24, 1, 7, 13, 16, 24, 0]  # one in eleven: most leaves are not empty
PRIMES = [1, 2, 3, 5, 7, 11, 13]
LEVELS = ["p_g_os", "os_g", "os", "dp"]  # hypothesis prefers what comes first: what divides most
ONE_AXIS = [({"shard": n}, 1) for n in (2, 3, 4, 5, 6, 7, 8, 1)]  # shard axes, and replicas
SEVERAL_AXES = [
    ({"a": 2, "b": 2}, 2),
    ({"a": 3}, 2),
    ({"a": 2, "b": 3}, 1),
    ({"a": 3, "b": 2}, 1),
    ({"a": 4, "b": 2}, 1),
]
MESHES = st.sampled_from(ONE_AXIS) | st.sampled_from(SEVERAL_AXES)
# An optimizer's own name is among them: the moment `mu/w` of a leaf `w` is not that of `mu/w`.
NAMES = ["kernel", "bias", "a.b", "0", "mu", "w", "v", "u"]
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3, mu_dtype=jnp.float32),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.adam(1e-3)),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=7, momentum=0.9),
}


class Case(NamedTuple):
    """A train state, and how it is to be sharded; `tree` holds abstract leaves."""

    tree: Any
    scan_axes: Mapping[str, int]
    mesh: tuple[dict[str, int], int]
    level: str
    min_shard_size: int
    indivisible: str
    tx: optax.GradientTransformation
    as_pair: bool
    on_host: bool
    seed: int

    @property
    def parts(self) -> int:
        """Devices in one shard group (N)."""
        return math.prod(self.mesh[0].values())

    @property
    def divides(self) -> bool:
        return self.level != "dp" and self.parts > 1

    def abstract(self) -> TrainState:
        opt_state = jax.eval_shape(self.tx.init, self.tree)
        return TrainState(step=0, apply_fn=None, params=self.tree, tx=self.tx, opt_state=opt_state)

    def concrete(self) -> TrainState:
        """Arrays of random bits, NaNs of every kind among them; a pair's optimizer is fresh."""
        rng, state = np.random.default_rng(self.seed), self.abstract()

        def bits(like: Any) -> Any:
            count = math.prod(like.shape) * like.dtype.itemsize
            x = rng.integers(0, 256, count, np.uint8).view(like.dtype).reshape(like.shape)
            return x if self.on_host else jnp.asarray(x)

        params, opt_state = jax.tree.map(bits, (state.params, state.opt_state))
        if self.as_pair:
            opt_state = self.tx.init(params)
        return state.replace(params=params, opt_state=opt_state)

    def divide(self, state: TrainState) -> tuple[Any, gshard.Plan]:
        """`shard_train_state`, which warns exactly when more than 5 % are replicated."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", gshard.GShardWarning)  # others stay errors
            divided, plan = gshard.shard_train_state(
                (state.params, state.tx) if self.as_pair else state,
                mesh_of(*self.mesh),
                self.level,
                min_shard_size=self.min_shard_size,
                indivisible=self.indivisible,
                scan_axes=self.scan_axes,
            )
        leaves = jax.tree.leaves(plan.grads)
        total = sum(math.prod(x.shape) for x in leaves)
        whole = sum(math.prod(x.shape) for x in leaves if x.dim is None)
        expected = self.divides and 20 * whole > total
        assert ["parameters are replicated" in str(w.message) for w in seen] == [True] * expected
        return divided, plan


def pattern_of(path: str) -> str:
    """Matches this path alone."""
    return f"^{re.escape(path)}$"


def mesh_of(sizes: dict[str, int], replica: int) -> jax.sharding.Mesh:
    return _mesh(tuple(sizes.items()), replica)


@cache
def _mesh(sizes: tuple[tuple[str, int], ...], replica: int) -> jax.sharding.Mesh:
    count = math.prod(size for _, size in sizes) * replica
    return gshard.make_mesh(dict(sizes), replica=replica, devices=jax.devices()[:count])


def shapes(sizes: list[int], most: int, max_rank: int = 5) -> st.SearchStrategy:
    """Shapes of at most `most` elements: a size that would exceed it becomes 1, the rank stays."""

    def bounded(drawn: list[int]) -> tuple[int, ...]:
        shape: list[int] = []
        for size in drawn:
            shape.append(size if math.prod(shape) * size <= most else 1)
        return tuple(shape)

    ranks = st.integers(0, max_rank)
    sized = ranks.flatmap(lambda n: st.lists(st.sampled_from(sizes), min_size=n, max_size=n))
    return sized.map(bounded)


def named(items: list[Any]) -> dict[str, Any]:
    return dict(zip(NAMES, items, strict=False))


@st.composite
def trees(draw: st.DrawFn, leaf_shapes: st.SearchStrategy, most: int) -> Any:
    """One to `most` abstract leaves in dicts, lists and tuples, some of which are empty.

    Few shapes, so that leaves of equal shape and name meet, as they do in the layers of a model.
    """
    few = st.sampled_from(draw(st.lists(leaf_shapes, min_size=1, max_size=3)))
    leaves = st.builds(jax.ShapeDtypeStruct, few, st.sampled_from(DTYPES))
    items = draw(st.lists(leaves, min_size=1, max_size=most))
    while len(items) > 1:
        count = draw(st.integers(2, len(items)))
        group = items[:count] + draw(st.sampled_from([[], [], [()], [{}]]))
        container = draw(st.sampled_from([named, list, tuple]))
        items = [*items[count:], container(group)]
    return items[0]


@st.composite
def states(draw: st.DrawFn) -> Case:
    """Some leaves have a dimension that counts as scanned."""
    sizes = draw(st.sampled_from([SIZES, SIZES, PRIMES]))
    tree = draw(trees(shapes(sizes, most=2**12), most=6))
    scan_axes = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        rank = len(leaf.shape)
        if rank and draw(st.integers(0, 2)) == 0:
            scan_axes[pattern_of(path_name(keys))] = draw(st.integers(-rank, rank - 1))
    return draw(cases(tree, scan_axes, st.sampled_from(sorted(OPTIMIZERS)).map(OPTIMIZERS.get)))


@st.composite
def cases(draw: st.DrawFn, tree: Any, scan_axes: Mapping[str, int], txs: Any) -> Case:
    """Every way to divide a tree."""
    return Case(
        tree,
        scan_axes,
        draw(MESHES),
        draw(st.sampled_from(LEVELS)),
        draw(st.sampled_from([0, 0, 0, 20]) | st.integers(0, 64)),
        draw(st.sampled_from(["pad", "replicate"])),
        draw(txs),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**32)),
    )
