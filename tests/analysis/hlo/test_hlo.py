"""Reading compiled programs: known programs, counted by hand."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gshard._util.errors import GShardError
from gshard.analysis.hlo import KINDS, Collective, CompiledProgram, read_program
from gshard.analysis.hlo.parser import read_arrays, read_groups, read_module

DUMPS = Path(__file__).parents[2] / "dumps"
AG, RS, AR, CP = "all-gather", "reduce-scatter", "all-reduce", "collective-permute"
FLAT_2x4 = tuple(range(8))


def dump_text(name: str) -> str:
    return (DUMPS / f"{name}.hlo.txt").read_text()


def dump(name: str) -> CompiledProgram:
    return read_program(dump_text(name))


def scalar(collective: Collective) -> bool:
    return all(x.elements == 1 for x in collective.operands)


def moved(program: CompiledProgram) -> dict[tuple[str, str, int], int]:
    """(kind, dtype, group size) -> elements over the run."""
    totals: dict[tuple[str, str, int], int] = defaultdict(int)
    for c in program.collectives:
        if not scalar(c):
            assert c.times is not None
            totals[c.kind, c.dtype, c.group_size] += c.times * c.elements
    return dict(totals)


WHOLE = P()


def compiled(f, *args, in_specs=WHOLE, out_specs=WHOLE, **jit_options) -> CompiledProgram:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return read_program(jax.jit(mapped, **jit_options).lower(*args).compile().as_text())


def x(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


# Stored programs: (what they must move, asynchronous collectives).
THEORY = {
    "cpu-jax0.10.2-step": (
        {
            (AG, "f32", 4): 2 * 15 * 64 * 64 // 2,
            (AG, "f32", 2): 2 * 15 * 64 * 64,
            (RS, "f32", 2): 15 * 64 * 64,
            (RS, "f32", 4): 15 * 64 * 64 // 2,
        },
        0,
    ),
    "cpu-jax0.10.2-compiler": ({(AG, "f32", 2): 64 * 64, (AG, "f32", 8): 64 * 64}, 0),
    "gpu-h100-1x8x1-step": (
        {(AG, "bf16", 8): 2 * 4 * 256**2, (RS, "bf16", 8): 4 * 256**2},
        4,
    ),
    "tpu-v5e-4x4-scatter-flat": ({(AR, "f32", 16): 1024 * 256}, 0),
    "tpu-v5e-4x4-scatter-axes": ({(RS, "f32", 4): 1024 * 256 + 256 * 256}, 0),
    "tpu-v5e-2x4-step-padded": (
        {
            (AG, "bf16", 4): 2 * 4 * 2048 * 4096,
            (AG, "bf16", 2): 2 * 4 * 4096 * 4096,
            (RS, "bf16", 2): 4 * 4256 * 4096,
            (RS, "bf16", 4): 4 * 2080 * 4096,
            (CP, "bf16", 2): 4 * 80 * 4096,
            (CP, "bf16", 4): 4 * 24 * 4096,
        },
        2,
    ),
    "tpu-v5e-2x4-step-async": (
        {(AG, "bf16", 8): 2 * 2 * 2 * 2048**2, (RS, "bf16", 8): 2 * 2 * 2048**2},
        2,
    ),
    "tpu-v5e-2x2-two-slices": (
        {
            (RS, "f32", 4): 1024 * 256,
            ("send", "f32", 2): 256 * 256,
            (AG, "f32", 4): 1024 * 256,
        },
        1,
    ),
    "tpu7x-2x2x2-step-sparsecore": (
        {(AG, "bf16", 16): 2 * 4 * 1024**2, (RS, "bf16", 16): 4 * 1024**2},
        3,
    ),
}
THEORY["cpu-jax0.12.0.1-step"] = THEORY["cpu-jax0.10.2-step"]
THEORY["cpu-jax0.12.0.1-compiler"] = THEORY["cpu-jax0.10.2-compiler"]
ODD = ("cpu-jax0.10.2-odd", "cpu-jax0.12.0.1-odd")


def test_every_dump_has_its_theory():
    stored = {path.name.removesuffix(".hlo.txt") for path in DUMPS.glob("*.hlo.txt")}
    assert stored == {*THEORY, *ODD}


@pytest.mark.parametrize("name", THEORY)
def test_dump_moves_what_theory_says(name):
    program = dump(name)
    elements, asynchronous = THEORY[name]
    assert moved(program) == elements
    assert sum(c.asynchronous for c in program.collectives) == asynchronous


@pytest.mark.parametrize("name", [name for name in THEORY if name.endswith("step")])
def test_a_step_has_one_loss(name):
    scalars = [c for c in dump(name).collectives if scalar(c)]
    assert [(c.kind, c.elements, c.times) for c in scalars] == [(AR, 1, 1)]
    assert "gshard/scalar" in scalars[0].op_name


@pytest.mark.parametrize("name", [*THEORY, *ODD])
def test_declared_outputs_agree(name):
    """A second way to the payload: the shape that HLO declares for the result."""
    computations = read_module(dump_text(name)).computations.values()
    declared = {i.name: i for computation in computations for i in computation.instructions}
    for c in dump(name).collectives:
        instruction = declared[c.name]
        arrays = read_arrays(instruction.shape)
        if c.kind == AG and not instruction.opcode.endswith("-start"):
            assert sum(array.elements for array in arrays) == c.elements
        elif c.kind == AG:
            inputs = c.elements // c.group_size
            assert sum(array.elements for array in arrays) - inputs == c.elements
        elif c.kind == RS and instruction.opcode == "reduce-scatter":
            assert sum(array.elements for array in arrays) * c.group_size == c.elements


@pytest.mark.parametrize("name", [n for n in THEORY if not n.endswith(("compiler", "slices"))])
def test_scopes_survive_to_the_last_collective(name):
    """Also where XLA rewrote the collective and its own metadata is lost."""
    for c in dump(name).collectives:
        if c.kind != CP:
            assert "gshard/" in c.op_name, c.name


# Rule 1: loops.


def test_scans_inside_scans():
    def f(w):
        def inner(h, _):
            return h + lax.psum_scatter(h * 2, "b", tiled=True).sum(), None

        def outer(h, _):
            return lax.scan(inner, jnp.tanh(h), length=5)[0], None

        return lax.scan(outer, w, length=3)[0]

    (scatter,) = compiled(f, x(16, 4)).collectives
    assert (scatter.kind, scatter.elements, scatter.times) == (RS, 64, 15)


def test_a_loop_of_unknown_length_has_no_count():
    def f(w):
        return lax.while_loop(lambda v: v.sum() < 1e3, lambda v: lax.psum(v, "b") * 1.5, w)

    (total,) = compiled(f, x(16)).collectives
    assert total.times is None
    assert total.wire_bytes is None
    assert total.elements == 16


@pytest.mark.parametrize("name", ODD)
def test_unknown_counts_do_not_spread(name):
    times = [c.times for c in dump(name).collectives]
    assert sorted(times, key=str) == [1, 1, None, None]


def test_collectives_of_a_condition_run_once_more_than_the_body():
    text = tpu_loop(start=0).replace(
        "  ROOT %less", "  %all-reduce.9 = s32[] all-reduce(%i), to_apply=%add\n  ROOT %less"
    )
    assert {c.name: c.times for c in read_program(text).collectives} == {
        "all-reduce.9": 11,
        "all-reduce.1": 10,
    }


def tpu_loop(
    start=2, step=1, limit=10, direction="LT", changes=False, carried=False, given=False
) -> str:
    """The loop of tpu-v5e-2x4-step-padded, cut to what counts it."""
    kept = "%grown" if changes else "%kept"
    bound = "%kept.1" if carried else "%limit"
    first = "parameter(1)" if given else f"constant({start})"
    return f"""HloModule loop, num_partitions=4

%add (p: f32[], q: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[] add(%p, %q)
}}

%body (wide: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %one = s32[]{{:T(128)}} constant({step})
  %wide = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}, s32[]{{:T(128)}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%wide), index=0
  %copy.1 = s32[]{{:T(128)S(6)}} copy(%i.1)
  %grown = s32[]{{:T(128)}} add(%copy.1, %one)
  %kept = s32[]{{:T(128)}} get-tuple-element(%wide), index=2
  %v = f32[8]{{0:T(128)}} get-tuple-element(%wide), index=1
  %all-reduce.1 = f32[8]{{0:T(128)}} all-reduce(%v), replica_groups={{}}, to_apply=%add
  ROOT %tuple.1 = (s32[], f32[8], s32[]) tuple(%grown, %all-reduce.1, {kept})
}}

%condition (wide.1: (s32[], f32[8], s32[])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant({limit})
  %wide.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%wide.1), index=0
  %kept.1 = s32[]{{:T(128)}} get-tuple-element(%wide.1), index=2
  ROOT %less = pred[]{{:T(512)}} compare(%i, {bound}), direction={direction}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0:T(128)}} parameter(0)
  %start = s32[] {first}
  %most = s32[] constant({limit})
  %copy.2 = s32[] copy(%start)
  %tuple = (s32[], f32[8], s32[]) tuple(%copy.2, %x, /*index=2*/%most)
  %while = (s32[], f32[8], s32[]) while(%tuple), condition=%condition, body=%body
  ROOT %out = f32[8] get-tuple-element(%while), index=1
}}
"""


@pytest.mark.parametrize(
    ("loop", "times"),
    [
        ({}, 8),
        ({"start": 0, "limit": 10}, 10),
        ({"direction": "LE"}, 9),
        ({"step": 3}, 3),
        ({"direction": "NE", "step": 2}, 4),
        ({"start": 10, "limit": 2, "step": -1, "direction": "GT"}, 8),
        ({"start": 10, "limit": 2, "step": -3, "direction": "GE"}, 3),
        ({"start": 12}, 0),
        ({"carried": True}, 8),
        ({"carried": True, "changes": True}, None),
        ({"direction": "NE", "step": 3}, None),
        ({"direction": "EQ"}, None),
        ({"step": 0}, None),
        ({"given": True}, None),
    ],
)
def test_counts_follow_from_the_loop_itself(loop, times):
    """TPU text has no known_trip_count; a loop may start anywhere and carry its own limit."""
    (total,) = read_program(tpu_loop(**loop)).collectives
    assert total.times == times


# Rule 2: computations inside computations, conditionals.


def test_conditionals_count_the_branch_that_moves_most():
    def f(w):
        return lax.cond(
            w.sum() > 3,
            lambda v: lax.psum(v, "b"),
            lambda v: lax.all_gather(v, ("a", "b"), tiled=True)[:4] + lax.psum(v, "b"),
            w,
        )

    program = compiled(f, x(8, 8), in_specs=P("a"))
    assert moved(program) == {(AG, "f32", 8): 8 * 32, (AR, "f32", 4): 32}
    assert all(c.conditional for c in program.collectives)


@pytest.mark.parametrize("name", ODD)
def test_only_branches_are_conditional(name):
    assert [c.kind for c in dump(name).collectives if c.conditional] == [AG]


def test_sparsecore_calls_are_entered_once():
    program = dump("tpu7x-2x2x2-step-sparsecore")
    assert [c.kind for c in program.collectives if c.times == 4] == [AG, AG, RS]


# Rules 3 and 4: what overlaps with computation is written several times.


def test_start_and_done_count_once():
    text = dump_text("gpu-h100-1x8x1-step")
    assert text.count(" reduce-scatter-done(") == 2
    scatters = [c for c in dump("gpu-h100-1x8x1-step").collectives if c.kind == RS]
    assert [(c.times, c.asynchronous) for c in scatters] == [(3, True), (1, True)]


def test_a_wrapped_collective_that_its_done_names_again_counts_once():
    text = """HloModule wrapped, num_partitions=4

%wrapped (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-to-all = f32[8]{0} all-to-all(%p), channel_id=1, replica_groups={{0,1},{2,3}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%x), calls=%wrapped
  %update = ((f32[8]{0}), f32[8]{0}, u32[]) async-update(%start), calls=%wrapped
  ROOT %done = f32[8]{0} async-done(%update), calls=%wrapped
}
"""
    (c,) = read_program(text).collectives
    assert (c.kind, c.elements, c.times, c.asynchronous) == ("all-to-all", 8, 1, True)


def test_a_start_that_the_gpu_runs_at_once_is_not_asynchronous():
    text = dump_text("gpu-h100-1x8x1-step").replace('"is_sync":false', '"is_sync":true')
    assert not any(c.asynchronous for c in read_program(text).collectives)


def test_clones_in_asynchronous_fusions_count_once():
    text = dump_text("tpu-v5e-2x4-step-async")
    assert text.count(" all-gather(") == 2 * 3 + 2
    gathers = [c for c in dump("tpu-v5e-2x4-step-async").collectives if c.kind == AG]
    assert [(c.times, c.asynchronous) for c in gathers] == [(2, False), (2, True)] * 2


# Rule 5: reduce-scatters in disguise, and all-reduces that should have been one.


def test_all_reduce_scatter_fusions_are_reduce_scatters():
    assert " all-reduce(" in dump_text("tpu-v5e-2x4-step-padded")
    scatters = [c for c in dump("tpu-v5e-2x4-step-padded").collectives if c.kind == RS]
    assert [(c.group_size, c.elements) for c in scatters] == [(2, 4256 * 4096), (4, 2080 * 4096)]
    assert all("gshard/scatter" in c.op_name for c in scatters)


def test_a_flat_scatter_on_a_torus_is_reported_as_the_all_reduce_it_became():
    (flat,) = dump("tpu-v5e-4x4-scatter-flat").collectives
    assert (flat.kind, flat.wire_bytes) == (AR, 2 * 4 * 1024 * 256 * 15 // 16)
    axes = dump("tpu-v5e-4x4-scatter-axes").collectives
    assert sum(c.wire_bytes or 0 for c in axes) == 4 * 1024 * 256 * 15 // 16


def test_what_goes_to_the_host_is_not_communication():
    text = dump_text("tpu-v5e-2x2-two-slices").replace("_xla_megascale_", "_xla_callback_")
    assert not any(c.kind == "send" for c in read_program(text).collectives)


# Rule 6: groups and shapes.


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups={}", None),
        ("channel_id=1", None),
        ("replica_groups=[1,8]<=[8]", (FLAT_2x4,)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (FLAT_2x4,)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}, dimensions={0}",
            ((0, 2), (1, 3)),
        ),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
    ],
)
def test_notations_of_replica_groups(attributes, groups):
    assert read_groups(gather_with(attributes)) == groups


def gather_with(attributes: str):
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (p: f32[4]) -> f32[8] {\n"
        "  %p = f32[4]{0} parameter(0)\n"
        f'  ROOT %g = f32[8]{{0}} all-gather(%p), {attributes}, metadata={{op_name="a, {{b"}}\n}}\n'
    )
    return read_module(text).computations["main"].root


def test_one_rank_notations_agree_between_versions():
    old, new = dump("cpu-jax0.10.2-step"), dump("cpu-jax0.12.0.1-step")
    assert "replica_groups={{" in dump_text("cpu-jax0.10.2-step")
    assert "replica_groups=mesh[" in dump_text("cpu-jax0.12.0.1-step")
    assert [c.groups for c in old.collectives] == [c.groups for c in new.collectives]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[1,2048,4096]{2,1,0:T(8,128)(2,1)S(1)}", [("bf16", 2048 * 4096, 16)]),
        ("f32[]{:T(128)}", [("f32", 1, 32)]),
        ("f32[0,4]{1,0}", [("f32", 0, 32)]),
        ("pred[64]{0}", [("pred", 64, 8)]),
        ("s4[8,3]{1,0}", [("s4", 24, 8)]),
        ("s4[8,3]{1,0:E(4)}", [("s4", 24, 4)]),
        ("f8e4m3fn[16]{0}", [("f8e4m3fn", 16, 8)]),
        ("c64[<=5,2]{1,0}", [("c64", 10, 64)]),
        ("(f32[4]{0}, (bf16[2,3]{1,0}), /*index=2*/u32[]{:S(2)}, token[])",
         [("f32", 4, 32), ("bf16", 6, 16), ("u32", 1, 32)]),
    ],
)  # fmt: skip
def test_shapes(shape, expected):
    assert [dataclasses.astuple(array) for array in read_arrays(shape)] == expected


def test_packed_bytes():
    assert read_arrays("s4[8,3]{1,0:E(4)}")[0].bytes == 12
    assert read_arrays("s4[3]{0:E(4)}")[0].bytes == 2


@pytest.mark.parametrize("name", ODD)
def test_combined_collectives(name):
    combined = dump(name).collectives[0]
    assert (combined.kind, combined.dtype, combined.group_size) == (AR, "f32", 2)
    assert [array.elements for array in combined.operands] == [1, 64 * 64, 64]
    assert combined.payload_bytes == 4 * (64 * 64 + 64 + 1)
    assert not scalar(combined)


def test_a_combined_all_reduce():
    (total,) = compiled(lambda v: lax.psum((v, v[0] * 2), "a"), x(8, 4)).collectives
    assert (total.kind, total.elements, total.groups) == (AR, 36, ((0, 4), (1, 5), (2, 6), (3, 7)))


@pytest.mark.parametrize(
    ("op_name", "operands", "names"),
    [
        ("jit(f)/gshard/(a/psum:b/psum)", 2, ("jit(f)/gshard/a/psum", "jit(f)/gshard/b/psum")),
        ("jit(f)/(jvp()/psum:jvp(s/t)/psum)", 2, ("jit(f)/jvp()/psum", "jit(f)/jvp(s/t)/psum")),
        ("jit(f)/(jvp(a: b)/psum:psum)", 2, ("jit(f)/jvp(a: b)/psum", "jit(f)/psum")),
        ("jit(f)/gshard/reduce/psum", 2, ("jit(f)/gshard/reduce/psum",) * 2),
        ("jit(f)/transpose(jvp(a:b))", 2, ("jit(f)/transpose(jvp(a:b))",) * 2),
        ("jit(f)/(a:b)", 3, ("jit(f)/(a:b)",) * 3),
        ("jit(f)/(a:b)", 1, ("jit(f)/(a:b)",)),
        ("", 2, ("", "")),
    ],
)
def test_names_of_combined_collectives(op_name, operands, names):
    (one,) = dump("tpu-v5e-4x4-scatter-flat").collectives
    combined = dataclasses.replace(one, operands=one.operands * operands, op_name=op_name)
    assert combined.op_names == names


# Rule 7: the wire.


@pytest.mark.parametrize(
    ("f", "kind", "elements", "group", "wire"),
    [
        (lambda v: lax.all_gather(v, ("a", "b"), tiled=True), AG, 8 * 64, 8, 4 * 512 * 7 // 8),
        (lambda v: lax.all_gather(v, "b", tiled=True), AG, 4 * 64, 4, 4 * 256 * 3 // 4),
        (lambda v: lax.psum_scatter(v, "b", tiled=True), RS, 64, 4, 4 * 64 * 3 // 4),
        (lambda v: lax.psum(v, "a"), AR, 64, 2, 2 * 4 * 64 // 2),
        (lambda v: lax.psum(v, ("a", "b")), AR, 64, 8, 2 * 4 * 64 * 7 // 8),
        (lambda v: lax.all_to_all(v, "b", 0, 0, tiled=True), "all-to-all", 64, 4, 4 * 64 * 3 // 4),
        (lambda v: lax.ppermute(v, "b", [(i, (i + 1) % 4) for i in range(4)]), CP, 64, 4, 4 * 64),
    ],
)
def test_wire_bytes(f, kind, elements, group, wire):
    (c,) = compiled(f, x(8, 8), out_specs=P(("a", "b"))).collectives
    assert (c.kind, c.elements, c.group_size, c.wire_bytes) == (kind, elements, group, wire)
    assert c.kind in KINDS


def test_groups_of_a_permute_are_what_its_pairs_link():
    c = compiled(lambda v: lax.ppermute(v, "a", [(0, 1)]), x(8), out_specs=P("a")).collectives[0]
    assert c.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_devices_may_be_in_any_order():
    """HLO counts places in the mesh, not device ids."""
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "b"))
    mapped = jax.shard_map(
        lambda v: lax.psum(v, "b"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    (c,) = read_program(jax.jit(mapped).lower(x(8)).compile().as_text()).collectives
    assert c.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


# The rest.


def test_a_program_without_collectives():
    program = read_program(jax.jit(lambda v: v * 2).lower(x(8)).compile().as_text())
    assert program.collectives == ()


def test_long_constants_and_strings_do_not_confuse():
    noise = np.arange(48, dtype=np.float32).reshape(6, 8)

    def f(v):
        with jax.named_scope('odd "name", {with} (brackets'):
            return lax.psum(v + noise, "b")

    (c,) = compiled(f, x(6, 8)).collectives
    assert (c.kind, c.elements) == (AR, 48)


@pytest.mark.parametrize("text", ["", "not a program", "HloModule empty, num_partitions=2\n"])
def test_text_that_is_no_program(text):
    with pytest.raises(GShardError, match="not an HLO module"):
        read_program(text)


LABELS = 'window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv'
CONVOLUTIONS = """HloModule m
ENTRY main {
  %x = f32[8,32,32,16]{3,2,1,0} parameter(0)
  %kernel = f32[32,3,3,16]{3,2,1,0} parameter(1)
  %grad = f32[8,16,16,32]{3,2,1,0} parameter(2)
  %out = (f32[8,16,16,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %kernel), LABELSForward"
  %dx = (f32[8,32,32,16]{3,2,1,0}, u8[0]{0}) custom-call(%grad, %kernel), LABELSBackwardInput"
  ROOT %dk = (f32[32,3,3,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %grad), LABELSBackwardFilter"
}
""".replace("LABELS", LABELS)


def test_flops_of_the_convolutions_of_cudnn():
    """Each multiplies as often as the first, whose results are those that the stride leaves."""
    assert read_program(CONVOLUTIONS).flops == 3 * 2 * (8 * 16 * 16 * 32) * (3 * 3 * 16)
