"""What goes over the network between nodes: counted link by link, and read off compiled steps."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard.analysis.forecast import abstract_mesh
from gshard.analysis.hlo import read_program
from gshard.analysis.memory.footprint import exchanges_of
from gshard.analysis.memory.opening import program_of
from gshard.cli.main import main
from gshard.sharding.nodes import Nodes, nodes_of
from gshard.sharding.topology import node_of
from tests.tiers import quick

WIDTH = 32


def ring_links(group, nodes):
    """The links of a ring that visits the devices of a node one after another."""
    order = sorted(group, key=lambda i: (nodes[i], i))
    return zip(order, order[1:] + order[:1], strict=True)


def counted(kind, groups, nodes):
    """Bytes between nodes for each byte of payload: of the busiest node, a device's mean."""
    sent = dict.fromkeys(nodes, Fraction(0))
    for group in groups:
        n = len(group)
        links = (
            itertools.permutations(group, 2) if kind == "all-to-all" else ring_links(group, nodes)
        )
        each = Fraction(1, n) if kind == "all-to-all" else Fraction(n - 1, n)
        for a, b in links:
            if nodes[a] != nodes[b]:
                sent[nodes[a]] += each * (2 if kind == "all-reduce" else 1)
    return max(sent[node] / nodes.count(node) for node in sent)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_bytes_between_nodes_link_by_link(kind):
    rng = np.random.default_rng(0)
    for _ in range(40):
        size = int(rng.integers(2, 13))
        nodes = rng.integers(0, rng.integers(1, 5), size).tolist()
        order = rng.permutation(size)
        parts = [n for n in range(1, size + 1) if size % n == 0]
        groups = order.reshape(-1, int(rng.choice(parts))).tolist()
        found = Nodes((("a", size),), tuple(nodes)).network_share(kind, groups)
        assert found == counted(kind, groups, nodes), (groups, nodes)


def test_a_permute_sends_its_payload_over_each_link():
    nodes = Nodes((("a", 8),), (0, 0, 0, 0, 1, 1, 1, 1))
    neighbours = [(i, (i + 1) % 8) for i in range(8)]
    assert nodes.network_share("collective-permute", neighbours) == Fraction(1, 4)
    opposite = [(i, (i + 4) % 8) for i in range(8)]
    assert nodes.network_share("collective-permute", opposite) == 1
    assert nodes.network_share("send", None) == 1


def test_a_flat_all_to_all_sends_almost_eight_times_what_a_ring_does():
    """ZeRO++, section 4.3: over 32 nodes of 8, the devices of a node share a ring's bytes."""
    nodes = Nodes((("shard", 256),), tuple(i // 8 for i in range(256)))
    ring = nodes.network_share_over("reduce-scatter", ("shard",))
    assert ring == Fraction(255, 256) / 8
    assert nodes.network_share_over("all-to-all", ("shard",)) == Fraction(248, 256)


@pytest.mark.parametrize("near", [2, 8])
def test_a_permute_may_send_nothing(near):
    nodes = Nodes((("a", 8),), tuple(i // near for i in range(8)))
    assert nodes.network_share_over("collective-permute", ("a",), ()) == 0


def test_what_is_known_of_nodes_goes_with_them():
    """A cache of the program would keep the nodes of every budget of a large machine."""
    nodes = nodes_of(gshard.make_mesh(), 4)
    nodes.network_share_over("all-gather", ("shard",))
    gone = weakref.ref(nodes)
    del nodes
    gc.collect()
    assert gone() is None


def test_jax_says_which_devices_share_links():
    mesh = gshard.make_mesh()
    assert nodes_of(mesh).count == 1
    assert node_of(SimpleNamespace(slice_index=3)) == 3
    assert node_of(SimpleNamespace()) == node_of(None) == 0
    assert nodes_of(mesh, 4).of_device == (0, 0, 0, 0, 1, 1, 1, 1)
    assert nodes_of(mesh, 64).count == 1


@pytest.mark.parametrize("given", [0, 3, 5, 2.5, True, "8"])
def test_numbers_of_devices_that_no_node_has(given):
    state, plan = sharded("os", gshard.make_mesh())
    with pytest.raises(gshard.GShardError, match="devices_per_node"):
        gshard.budget(plan, devices_per_node=given)


# ---- budget and compiled program ----------------------------------------------------------------


def loss_fn(params, x):
    h = jnp.tanh(x @ params["in"])
    h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])[0]
    return jnp.square(h @ params["out"] + params["b"] - x).mean()


def sharded(level, mesh, **options):
    rng = np.random.default_rng(0)
    shapes = {"in": (WIDTH, 64), "layers": (3, 64, 64), "out": (64, WIDTH), "b": (WIDTH,)}
    params = {k: (0.1 * rng.normal(size=s)).astype(np.float32) for k, s in shapes.items()}
    options = {"min_shard_size": 100, "scan_axes": {"layers": 0}, **options}
    return gshard.shard_train_state((params, optax.adam(1e-2)), mesh, level, **options)


MESHES = {
    "8": {},
    "2x4": {"shape": {"a": 2, "b": 4}},
    "4x2": {"shape": {"a": 4, "b": 2}},
    "2 replicas": {"replica": 2},
    "4 replicas": {"replica": 4},
    "model": {"extra": {"model": 2}},
}
CASES = list(itertools.product(["dp", "os", "os_g", "p_g_os"], MESHES, [2, 4]))
QUICK = [
    ("dp", "8", 4), ("os", "2x4", 2), ("os_g", "4 replicas", 4), ("p_g_os", "2 replicas", 2),
    ("p_g_os", "model", 4),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:no parameter is sharded over mesh axes model")
@pytest.mark.parametrize("level, mesh, near", quick(CASES, QUICK))
def test_the_compiled_step_sends_the_budget_between_nodes(level, mesh, near):
    state, plan = sharded(level, gshard.make_mesh(**MESHES[mesh]))
    step = gshard.make_train_step(loss_fn, plan, micro_batches=2)
    x = np.random.default_rng(1).normal(size=(32, WIDTH)).astype(np.float32)
    budget = gshard.budget(plan, micro_batches=2, devices_per_node=near)
    found = gshard.audit(step, state, x, devices_per_node=near)
    assert budget.nodes == found.nodes == 8 // near
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        bound = sum(m.network_bytes for m in budget.communicated if m.kind == kind)
        sent = sum(r.network_bytes for r in found.collectives if r.kind == kind and not r.scalar)
        gathers = kind == "all-gather" and level == "p_g_os"
        assert bound / 2 - 50 <= sent <= bound + 50 if gathers else abs(sent - bound) <= 50, found
    assert 0 < found.network_bytes() <= found.wire_bytes()
    for text in (str(found), str(budget)):
        assert "between nodes" in text and f"{8 // near} nodes" in text
    one = gshard.audit(step, state, x)
    assert one.network_bytes() == 0 and "nodes" not in str(one)
    assert one.wire_bytes() == found.wire_bytes()


def test_sub_groups_of_a_node_gather_over_the_network_once():
    """ZeRO++'s secondary shards: the backward pass gathers within the node."""
    state, plan = sharded("p_g_os", gshard.make_mesh())
    network = {}
    for reshard in (True, 4, 2):
        budget = gshard.budget(plan, reshard_after_forward=reshard, devices_per_node=4)
        (gathers,) = (m for m in budget.communicated if m.purpose == "gather")
        network[reshard] = gathers.network_bytes
        step = gshard.make_train_step(loss_fn, plan, reshard_after_forward=reshard)
        x = np.ones((8, WIDTH), np.float32)
        found = gshard.audit(step, state, x, devices_per_node=4)
        assert found.network_bytes("all-gather") <= gathers.network_bytes
    # Of each array b: twice 7/8 b over a link of four cards; b/8 a device; twice 3/8 b over four.
    assert network[4] == network[True] * 2 // 7 < network[2] == network[True] * 3 // 7


def test_a_scalar_between_nodes_is_sent():
    """Less than a byte is not nothing: the model of time counts a round of messages."""
    mesh = abstract_mesh(256)

    def total(x):
        return jax.lax.psum(x.sum(), "shard")

    mapped = jax.shard_map(total, mesh=mesh, in_specs=jax.P("shard"), out_specs=jax.P())
    closed = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((256,), np.float32))
    traced = program_of(closed, [None], True, "gpu")
    for near, sent in ((8, 1), (256, 0)):
        (row,) = exchanges_of(traced, nodes_of(mesh, near), wide=False)
        assert row.scalar and row.network_bytes == sent


def test_a_plan_of_several_nodes_says_what_they_exchange(capsys):
    words = ["plan", "tests.setups:mlp", "--estimate", "--levels", "dp,p_g_os"]
    assert main([*words, "--target", "h100:4x8"]) == 0
    assert "between 4 nodes" in capsys.readouterr().out
    assert main([*words, "--target", "h100:4x8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] == 4
    for level in found["levels"].values():
        assert 0 < level["network"] < level["wire"] / 4
    assert main([*words, "--target", "h100:1x8"]) == 0
    assert "between" not in capsys.readouterr().out


def test_a_step_between_slices_is_read(request):
    """A TPU program of two slices: gathered and scattered within, summed between them."""
    text = (request.config.rootpath / "tests/dumps/tpu-v5e-2x2-two-slices.hlo.txt").read_text()
    nodes = Nodes((("slice", 2), ("shard", 4)), (0, 0, 0, 0, 1, 1, 1, 1))
    found = {x.kind: x.network_bytes(nodes) for x in read_program(text).collectives}
    assert found["send"] > 0
    assert found["all-gather"] == found["reduce-scatter"] == 0
