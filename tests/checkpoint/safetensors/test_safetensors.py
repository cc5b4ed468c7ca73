"""Weights as safetensors files: what is in them is bit for bit the state's, and comes back so."""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from gshard._util.durable import NewFile
from gshard.checkpoint.safetensors import load
from gshard.checkpoint.safetensors.format import BLOCK, row_major
from tests.checkpoint.safetensors.export_models import (
    LEVELS,
    NAMES,
    SHARD_BYTES,
    divided,
    linen_state,
    named,
    trained,
)
from tests.processes import assert_all_well, run_together, run_workers
from tests.reference import flat
from tests.tiers import quick
from tests.zoo import ZOO

safe_open = pytest.importorskip("safetensors").safe_open
safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

OPTIONS = {
    "plain": {},
    "frozen": {"frozen": ["^Dense_0/", "scale"]},
    "bfloat16": {"precision": "bfloat16"},
    "offload": {"offload": True},
    "all": {"frozen": "^Dense_0/", "precision": "bfloat16", "offload": True},
}


def bits(x):
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert bits(found[name]) == bits(x), name


def weights(state, plan):
    """What a sharded state holds, by name, fetched without the code under test."""
    return named(plan.unwrap(state))


def raw(tensors, **metadata):
    """A file of (name, format's dtype, array), made by hand."""
    said, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, dtype, x in tensors:
        offsets = [len(data), len(data) + x.nbytes]
        said[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": offsets}
        data += x.tobytes()
    text = json.dumps(said).encode()
    return struct.pack("<Q", len(text)) + text + data


def simple(params, devices=3, level="p_g_os", **options):
    """`(params, tx)`, sharded."""
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    return gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, level, min_shard_size=1, **options
    )


# ---- what is in a file --------------------------------------------------------------------------

TABLE = [
    (kind, level, devices, option)
    for kind in ("linen", "nnx")
    for level in LEVELS
    for devices in (1, 3, 8)
    for option in OPTIONS
    if not (kind == "nnx" and option in ("frozen", "all"))
]


@pytest.mark.filterwarnings("ignore:offload=True puts nothing")
@pytest.mark.parametrize(("kind", "level", "devices", "option"), TABLE)
def test_a_file_holds_the_full_values_by_name(tmp_path, kind, level, devices, option):
    options = OPTIONS[option]
    if options.get("offload") and level == "dp":
        options = options | {"offload": False}
    state, plan, given = divided(kind, level, devices, **options)
    file = tmp_path / "x.safetensors"
    assert gshard.save_safetensors(state, file) is None
    found = safetensors.load_file(file)
    assert_same(found, given)
    params = {path.replace("/", "."): x for path, x in flat(gshard.full_params(state)).items()}
    assert_same({name: found[name] for name in params}, params)
    assert_same(weights(gshard.load_safetensors(state, file), plan), given)
    assert os.listdir(tmp_path) == [file.name]


def test_padding_is_cut_and_a_state_that_trained_is_written(tmp_path):
    state, plan, given = divided("linen", "p_g_os", 8, precision="bfloat16")
    assert any(layout.padding for layout in jax.tree.leaves(plan.params))
    state = trained(state, plan, "linen", 2)
    gshard.save_safetensors(state, tmp_path / "x")
    found = safetensors.load_file(tmp_path / "x")
    assert_same(found, weights(state, plan))
    assert bits(found["head.kernel"]) != bits(given["head.kernel"])


@pytest.mark.parametrize("axes", [{"replica": 2}, {"extra": {"model": 2}}], ids=str)
def test_meshes_with_replicas_and_axes_of_the_users_own(tmp_path, axes):
    mesh = gshard.make_mesh(devices=jax.devices()[:4], **axes)
    params = {"w": np.arange(42, dtype=np.float32).reshape(6, 7), "b": np.ones(9, np.float32)}
    given = dict(params)
    if "extra" in axes:
        specs = {"w": jax.P("model"), "b": jax.P()}
        places = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
        params = jax.device_put(params, places)
    state, plan = gshard.shard_train_state((params, optax.adam(0.1)), mesh, 3, min_shard_size=1)
    gshard.save_safetensors(state, tmp_path / "x")
    assert_same(safetensors.load_file(tmp_path / "x"), given)
    other, _ = gshard.shard_train_state(
        (jax.tree.map(lambda x: x * 0, params), optax.adam(0.1)), mesh, 3, min_shard_size=1
    )
    back = gshard.load_safetensors(other, tmp_path / "x")
    assert_same(gshard.full_params(back), given)
    for x, y in zip(jax.tree.leaves(back.params), jax.tree.leaves(state.params), strict=True):
        assert x.sharding == y.sharding


def test_boxes_of_flax_are_not_named(tmp_path):
    model = ZOO["linen_gpt_scan_boxed"]
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, _ = gshard.shard_train_state(
        model.state(optax.sgd(0.1)), mesh, "p_g_os", **model.options()
    )
    gshard.save_safetensors(state, tmp_path / "x")
    expected = {p.replace("/", "."): x for p, x in flat(model.init(0)).items()}
    assert_same(safetensors.load_file(tmp_path / "x"), expected)
    back = gshard.load_safetensors(state, tmp_path / "x")
    assert jax.tree.structure(back) == jax.tree.structure(state)


def test_parameters_that_their_gradient_replaces_are_a_collection(tmp_path):
    params = {
        "params": {"w": np.arange(7, dtype=np.float32)},
        "_overwrite_with_gradient": {"layer": {"scale": np.ones(3, np.float32)}},
    }
    state, _ = simple(params)
    gshard.save_safetensors(state, tmp_path / "x")
    found = safetensors.load_file(tmp_path / "x")
    assert sorted(found) == ["_overwrite_with_gradient.layer.scale", "w"]
    back = gshard.load_safetensors(state, tmp_path / "x")
    assert_same(flat(gshard.full_params(back)), flat(params))


def test_keys_and_counts_of_random_numbers_are_no_weights(tmp_path):
    for kind in ("linen", "nnx"):
        state, plan, _ = divided(kind, "p_g_os", 3)
        other, _, _ = divided(kind, "p_g_os", 3, seed=9)
        gshard.save_safetensors(other, tmp_path / "x")
        with safe_open(tmp_path / "x", "numpy") as file:
            assert not [name for name in file.keys() if "key" in name or "rngs" in name]
        back = gshard.load_safetensors(state, tmp_path / "x")
        if kind == "linen":
            assert back.key == state.key != other.key
        else:
            keys = [nnx.state(pair[0], nnx.RngKey) for pair in (back, state, other)]
            found = [jax.tree.leaves(key)[0] for key in keys]
            assert found[0] == found[1] != found[2]


FORMS = {
    "F32": jnp.float32,
    "F16": jnp.float16,
    "BF16": jnp.bfloat16,
    "I32": jnp.int32,
    "I16": jnp.int16,
    "I8": jnp.int8,
    "U32": jnp.uint32,
    "U16": jnp.uint16,
    "U8": jnp.uint8,
    "BOOL": jnp.bool_,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
}
WIDE = {"F64": jnp.float64, "I64": jnp.int64, "U64": jnp.uint64}


def every_form(forms, lowest=0):
    """Arrays of all dtypes: padded, scalar, empty, with a leading 1."""
    numbers = np.arange(lowest, lowest + 14)
    shapes = {"a": (2, 7), "s": (), "e": (0, 3), "l": (1, 13)}
    return {
        f"{name}_{dtype}": np.resize(numbers, shape).astype(forms[dtype])
        for dtype in forms
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("wide", [False, True])
def test_every_dtype_there_and_back(tmp_path, wide):
    forms = WIDE if wide else FORMS
    with jax.enable_x64(wide):
        params = every_form(forms) | {"trained": np.ones(7, np.float32)}
        others = every_form(forms, 3) | {"trained": np.zeros(7, np.float32)}
        state, _ = simple(params, frozen="_")
        gshard.save_safetensors(state, tmp_path / "x")
        back = gshard.load_safetensors(simple(others, 8, "os", frozen="_")[0], tmp_path / "x")
        assert_same(gshard.full_params(back), params)
    with safe_open(tmp_path / "x", "numpy") as file:
        for name in params.keys() - {"trained"}:
            assert file.get_slice(name).get_dtype() == name.partition("_")[2]
            assert tuple(file.get_slice(name).get_shape()) == params[name].shape


def test_a_file_has_the_layout_of_the_librarys_own(tmp_path):
    """The same header but for the metadata, and the same bytes after it."""
    known = {name: dtype for name, dtype in FORMS.items() if "F8" not in name}  # as it takes them
    params = every_form(known) | {"trained": np.ones(7, np.float32)}
    gshard.save_safetensors(simple(params, frozen="_")[0], tmp_path / "x")
    text = (tmp_path / "x").read_bytes()
    (head, data), (their_head, their_data) = parts(text), parts(safetensors.save(params))
    assert (len(text) - len(data)) % 8 == 0
    del head["__metadata__"]
    assert list(head.items()) == list(their_head.items())
    assert data == their_data


def parts(text):
    end = 8 + struct.unpack("<Q", text[:8])[0]
    return json.loads(text[8:end]), text[end:]


@pytest.mark.parametrize("shape", [(3, 5, 700), (1, 2, 40, 9), (60, 11)])
def test_arrays_in_another_memory_order_are_written_in_blocks(monkeypatch, shape):
    monkeypatch.setattr("gshard.checkpoint.safetensors.format.BLOCK", 1000)
    whole = np.arange(np.prod(shape) * 2).reshape(*shape[:-1], -1)
    for x in (
        whole,
        whole[..., : shape[-1]],
        whole.T,
        whole[::2],
        whole.astype(jnp.bfloat16)[..., 1:],
    ):
        rounded = list(row_major(x, jnp.dtype(jnp.float16)))
        assert b"".join(rounded) == x.astype(np.float16).tobytes()
        assert max(map(len, rounded)) <= 1000
        blocks = list(row_major(x, x.dtype))
        assert b"".join(blocks) == x.tobytes()
        copied = [b for b in blocks if not np.shares_memory(np.frombuffer(b, np.uint8), x)]
        assert max(map(len, copied), default=0) <= 1000


@pytest.mark.parametrize("option", ["plain", "bfloat16"])
def test_floating_weights_are_rounded_to_the_dtype_that_is_asked_for(tmp_path, option):
    """The bits of `astype`, of the master copies too; other weights are as they are."""
    rng = np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(5, 7)).astype(np.float32),
        "half": np.full(3, 1 / 3, np.float16),
        "one": np.float32(1 / 3),
        "none": np.ones((0, 4), np.float32),
        "index": np.arange(4, dtype=np.int32),
    }
    state, _ = simple(params, frozen="index", **OPTIONS[option])
    file = tmp_path / "x.safetensors"
    gshard.save_safetensors(state, file, dtype="bfloat16")
    to = {name: x if name == "index" else x.astype(jnp.bfloat16) for name, x in params.items()}
    assert_same(safetensors.load_file(file), to)
    # Two weights of two dtypes in one tensor, in a shard of at most so many bytes.
    state, _ = simple({"a": params["half"], "b": params["w"][0, :3]})
    names = gshard.NameMap({"{x:a,b}": ("t", "i -> (x i)")})
    file.unlink()
    gshard.save_safetensors(state, tmp_path, name_map=names, dtype=jnp.bfloat16, max_shard_bytes=12)
    both = np.concatenate([params["half"].astype(jnp.bfloat16), to["w"][0, :3]])
    assert_same(safetensors.load_file(tmp_path / "model.safetensors"), {"t": both})


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_beyond_the_range_of_the_dtype_are_named(tmp_path, dtype):
    w = np.array([[1, 7e4, np.inf], [2, 3, -np.inf]], np.float32)
    state, _ = simple({"w": w})
    with pytest.warns(gshard.GShardWarning, match=f"{dtype} cannot hold, 70000. Pass"):
        gshard.save_safetensors(state, tmp_path / "x", dtype=dtype)
    gshard.save_safetensors(state, tmp_path / "y", dtype="bfloat16")  # no warning
    state, _ = simple({"a": w, "b": w})
    names = gshard.NameMap({"{x:a,b}": ("t", "i j -> (x i) j")})
    with pytest.warns(gshard.GShardWarning, match=f"{dtype} cannot hold, 70000. Pass"):
        gshard.save_safetensors(state, tmp_path / "z", name_map=names, dtype=dtype)


def test_metadata(tmp_path):
    state, plan, _ = divided("linen", "os_g", 3)
    state = trained(state, plan, "linen", 2)
    gshard.save_safetensors(state, tmp_path / "x", metadata={"model": "net", "größe": "klein"})
    with safe_open(tmp_path / "x", "numpy") as file:
        assert file.metadata() == {
            "gshard_format": "1",
            "gshard_version": gshard.__version__,
            "step": "2",
            "model": "net",
            "größe": "klein",
        }


# ---- and back -----------------------------------------------------------------------------------

TRIPS = [
    ("linen", ("p_g_os", 8, "plain"), ("os", 3, "plain")),
    ("linen", ("os_g", 3, "all"), ("p_g_os", 8, "bfloat16")),
    ("nnx", ("os", 1, "bfloat16"), ("p_g_os", 8, "offload")),
    ("nnx", ("p_g_os", 3, "offload"), ("dp", 8, "bfloat16")),
    ("linen", ("dp", 8, "bfloat16"), ("p_g_os", 3, "frozen")),
    ("linen", ("os", 3, "frozen"), ("os_g", 1, "all")),
]


@pytest.mark.parametrize(("kind", "there", "back"), quick(TRIPS, [TRIPS[1], TRIPS[2]]))
def test_a_round_trip_and_the_step_that_follows(tmp_path, kind, there, back):
    """On another level and mesh: the same bits, and the next step that of a state sharded so."""
    state, plan, _ = divided(kind, there[0], there[1], **OPTIONS[there[2]])
    state = trained(state, plan, kind)
    gshard.save_safetensors(state, tmp_path / "x")
    moved = weights(state, plan)

    other, its_plan, _ = divided(kind, back[0], back[1], seed=5, **OPTIONS[back[2]])
    before = weights(other, its_plan)
    new = gshard.load_safetensors(other, tmp_path / "x")
    assert type(new) is type(other)
    assert_same(weights(new, its_plan), moved)
    assert_same(weights(other, its_plan), before)  # untouched
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(other), strict=True):
        assert x.sharding == y.sharding and x.dtype == y.dtype

    plain = its_plan.unwrap(other)  # the same values set without a file, then sharded
    plain = with_weights(plain, moved)
    direct, _ = gshard.shard_train_state(
        plain, its_plan.mesh, back[0], min_shard_size=4, **OPTIONS[back[2]]
    )
    new, direct = trained(new, its_plan, kind), trained(direct, its_plan, kind)
    assert_same(weights(new, its_plan), weights(direct, its_plan))
    assert_same(flat(parts_of(new)), flat(parts_of(direct)))


def with_weights(state, values):
    """A plain state with other weights, by name."""

    def other(prefix, tree):
        return jax.tree_util.tree_map_with_path(
            lambda keys, x: jnp.asarray(
                values[prefix + jax.tree_util.keystr(keys, simple=True, separator=".")]
            ),
            tree,
        )

    if isinstance(state, tuple):
        model, optimizer = state
        pure = nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))
        nnx.update(model, other("", pure))
        return model, optimizer
    return state.replace(
        params=other("", state.params), batch_stats=other("batch_stats.", state.batch_stats)
    )


def parts_of(state):
    """The optimizer's full state."""
    return nnx.state(state[1]) if isinstance(state, tuple) else (state.opt_state, state.step)


def test_moments_and_the_step_stay(tmp_path):
    state, plan, _ = divided("linen", "os", 3)
    gshard.save_safetensors(state, tmp_path / "x")
    state = trained(state, plan, "linen", 2)
    back = gshard.load_safetensors(state, tmp_path / "x")
    assert int(back.step) == 2
    for x, y in zip(
        jax.tree.leaves(back.opt_state.inner), jax.tree.leaves(state.opt_state.inner), strict=True
    ):
        assert x is y


def test_a_file_of_another_program(tmp_path):
    """Its order, its offsets; with `cast` other dtypes of the same kind, as NumPy rounds them."""
    random = np.random.default_rng(0)
    given = {
        "b": random.normal(size=(5, 3)),
        "a": random.normal(size=(4,)).astype(np.float32),
        "n": np.arange(5),
    }
    given["b"][0, 0] = 1 + 2**-11 + 2**-30  # to float16 by way of float32 it is 1, else more
    safetensors.save_file(given, tmp_path / "x")
    params = {
        "a": np.zeros(4, np.float32),
        "b": np.zeros((5, 3), np.float32),
        "n": np.zeros(5, np.int32),
    }
    state, _ = simple(params, precision=gshard.Precision("float16", exceptions={"a": "float32"}))
    back = gshard.load_safetensors(state, tmp_path / "x", cast=True)
    expected = {name: x.astype(params[name].dtype) for name, x in given.items()}
    assert_same(gshard.full_params(back), expected)
    own = np.asarray(back.params["b"])[:5]
    assert bits(own) == bits(expected["b"].astype(np.float16))


def test_too_large_for_the_dtype(tmp_path):
    safetensors.save_file({"w": np.array([1e6, 1], np.float32)}, tmp_path / "x")
    state, _ = simple({"w": np.zeros(2, np.float16)})
    with pytest.warns(gshard.GShardWarning, match="load_safetensors: w has numbers .* infinite"):
        back = gshard.load_safetensors(state, tmp_path / "x", cast=True)
    assert gshard.full_params(back)["w"].tolist() == [np.inf, 1]
    safetensors.save_file({"w": np.ones(2, np.float32), "n": np.array([2**40])}, tmp_path / "x")
    state, _ = simple({"w": np.zeros(2, np.float32), "n": np.zeros(1, np.int32)})
    with pytest.raises(gshard.GShardError, match="n holds integers that do not fit int32"):
        gshard.load_safetensors(state, tmp_path / "x", cast=True)


# ---- refusals -----------------------------------------------------------------------------------

ONES = np.ones(2, np.float32)
BAD_EXPORTS = {
    "plain": (lambda: named, {}, "no plan"),
    "metadata": (None, {"metadata": "x"}, "must be a mapping from names to strings"),
    "number": (None, {"metadata": {"loss": 1.5}}, "metadata has 1.5 by the name 'loss'"),
    "own": (None, {"metadata": {"step": "1"}}, r"metadata\['step'\] is gshard's own"),
    "surrogate": (None, {"metadata": {"a": "\ud800"}}, "cannot be written as UTF-8"),
    "no path": (None, {"path": 3}, "path=3 must be the path of a file"),
    "empty path": (None, {"path": ""}, "must be the path of a file"),
    "nul": (None, {"path": "a\0b"}, "leads nowhere|cannot be written"),
    "missing folder": (None, {"path": "no/such/x"}, "cannot be written: No such file"),
    "dtype": (None, {"dtype": "bfloat15"}, "dtype='bfloat15' is not a dtype. Did you mean"),
    "whole numbers": (None, {"dtype": "int8"}, "dtype=int8 is not floating"),
    "unknown dtype": (None, {"dtype": jnp.float8_e3m4}, r"not have the dtype of w \(float8_e3m4"),
    "complex": ({"w": ONES, "c": np.ones(2, np.complex64)}, {}, r"dtype of c \(complex64\)"),
    "int4": ({"w": ONES, "c": jnp.ones(2, jnp.int4)}, {}, r"dtype of c \(int4\)"),
    "twice": ({"a": {"b": ONES}, "a.b": ONES}, {}, "a/b and a.b would both be called"),
    "metadata's": ({"__metadata__": ONES}, {}, "'__metadata__' is reserved"),
}


@pytest.mark.parametrize("case", BAD_EXPORTS)
def test_what_cannot_be_exported(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    params, arguments, said = BAD_EXPORTS[case]
    if case == "plain":
        state = linen_state(0, optax.sgd(0.1))
    else:
        state, _ = simple(params or {"w": ONES})
    Path("old").write_text("old")
    with pytest.raises(gshard.GShardError, match=said):
        gshard.save_safetensors(state, **({"path": "old"} | arguments))
    assert os.listdir() == ["old"] and Path("old").read_text() == "old"


def test_a_state_without_values(tmp_path):
    state, plan, _ = divided("linen", "p_g_os", 3)
    gshard.save_safetensors(state, tmp_path / "x")
    mesh = jax.sharding.AbstractMesh((3,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    planned, _, _ = divided("linen", 3, mesh)
    cases = [(plan.abstract_state(), "abstract"), (planned, "abstract mesh")]
    gone, _, _ = divided("linen", "p_g_os", 3)
    gone.params["head"]["kernel"].delete()
    cases.append((gone, "reused its memory"))
    cases.append((state.replace(params={"head": state.params["head"]}), "missing .*Dense_0/kernel"))
    other = jax.tree.map(lambda x: x[None], state.params)
    cases.append((state.replace(params=other), "stored as"))
    for bad, said in cases:
        for call in (gshard.save_safetensors, gshard.load_safetensors):
            with pytest.raises(gshard.GShardError, match=said):
                call(bad, tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


def test_weights_that_the_state_lacks_are_left_out_by_only(tmp_path):
    """As of a backbone, from a file that has another head."""
    file, mesh = tmp_path / "x", gshard.make_mesh()

    def sharded(**params):
        return gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os", min_shard_size=0)[0]

    ones, zeros = np.ones((8, 3), np.float32), np.zeros((8, 3), np.float32)
    gshard.save_safetensors(sharded(body={"w": ones}, head={"w": ones}), file)
    with pytest.raises(gshard.GShardError, match=r"Not in the state: head.w.* with only="):
        gshard.load_safetensors(sharded(body={"w": zeros}), file)
    with pytest.raises(gshard.GShardError, match=r"Not in the state: head.w"):
        gshard.load_safetensors(sharded(body={"w": zeros}), file, only="w")
    found = gshard.load_safetensors(sharded(body={"w": zeros}), file, only="^body/")
    np.testing.assert_array_equal(gshard.full_params(found)["body"]["w"], ones)
    with pytest.raises(gshard.GShardError, match=r"left out by ignored= of the NameMap"):
        names = gshard.NameMap({"body/w": "body.w"})
        gshard.load_safetensors(sharded(body={"w": zeros}), file, name_map=names)


F4 = np.ones((2, 3), np.float32)
GOOD = raw([("w.kernel", "F32", F4)])
BAD_FILES = {
    "names": (
        [("w.kernl", "F32", F4), ("u", "F32", F4)],
        "Missing in the file: w.kernel (did you mean w.kernl?). Not in the state: u.",
    ),
    "missing": ([], "Missing in the file: w.kernel. Not in the state: none."),
    "added": ([("w.kernel", "F32", F4), ("u", "F32", F4)], "file: none. Not in the state: u."),
    "shape": (
        [("w.kernel", "F32", F4.T)],
        "w.kernel is [3, 2] in the file and [2, 3] in the state",
    ),
    "dtype": (
        [("w.kernel", "F16", F4.astype(np.float16))],
        "w.kernel is F16 in the file and float32 in the state. Pass cast=True",
    ),
    "unknown dtype": ([("w.kernel", "C64", F4.astype(np.complex64))], ""),  # of newer libraries
    "text": (b"hello, these are no tensors at all", "is not a safetensors file"),
    "empty": (b"", "is not a safetensors file"),
    "cut": (GOOD[:-1], "cut short or damaged"),
    "cut header": (GOOD[:20], "cut short or damaged"),
    "longer": (GOOD + b"x", "cut short or damaged"),
    "overlap": (
        GOOD.replace(b"[0, 24]", b"[8, 32]"),
        "cut short or damaged",
    ),
    "two at one place": (
        raw([("u", "F32", F4), ("w.kernel", "F32", F4)])[:-16].replace(b"[24, 48]", b"[8, 32] "),
        "cut short or damaged",
    ),
    "json": (GOOD.replace(b'"dtype"', b'"dtype{'), "cut short or damaged"),
    "shape and bytes": (GOOD.replace(b"[2, 3]", b"[2, 4]"), "cut short or damaged"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_are_refused(tmp_path, case):
    content, said = BAD_FILES[case]
    file = tmp_path / "x"
    file.write_bytes(content if isinstance(content, bytes) else raw(content))
    state, _ = simple({"w": {"kernel": np.zeros((2, 3), np.float32)}})
    with pytest.raises(gshard.GShardError) as caught:
        gshard.load_safetensors(state, file)
    assert said in str(caught.value) and str(file) in str(caught.value)


def test_all_that_differs_is_listed(tmp_path):
    names = [f"layer_{i}" for i in range(12)]
    state, _ = simple({name: np.ones(3, np.float32) for name in names})
    file = tmp_path / "x"
    for tensors, of_each in (
        ([(f"{name}x", np.ones(3, np.float32)) for name in names], "{}x"),
        ([(name, np.ones(4, np.float32)) for name in names], "{} is [4]"),
        ([(name, np.ones(3, np.float16)) for name in names], "{} is F16"),
    ):
        safetensors.save_file(dict(tensors), file)
        with pytest.raises(gshard.GShardError) as caught:
            gshard.load_safetensors(state, file)
        assert all(of_each.format(name) in str(caught.value) for name in names)


def test_other_kinds_are_not_cast(tmp_path):
    state, _ = simple({"w": np.ones(3, np.float32), "n": np.ones(3, np.int32)})
    for tensors in (
        {"w": np.ones(3, np.int32), "n": np.ones(3, np.int32)},
        {"w": np.ones(3, np.float32), "n": np.ones(3, np.float32)},
        {"w": np.ones(3, np.float32), "n": np.ones(3, np.bool_)},
    ):
        safetensors.save_file(tensors, tmp_path / "x")
        with pytest.raises(gshard.GShardError, match="cast=True converts floating dtypes"):
            gshard.load_safetensors(state, tmp_path / "x", cast=True)


def replaced_meanwhile(monkeypatch, replace):
    """Makes the next load call `replace` after its first weight."""
    done, original = [], load._weight

    def weight(*args):
        if len(done) == 1:
            replace()
        done.append(args)
        return original(*args)

    monkeypatch.setattr(load, "_weight", weight)


@pytest.mark.parametrize("how", ["renamed", "written over"])
def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, how):
    file, params = tmp_path / "x", {name: np.zeros(3, np.float32) for name in "abc"}
    state, _ = simple(params)
    gshard.save_safetensors(state, file)
    new, _ = simple({name: x + 1 for name, x in params.items()})
    content = file.read_bytes()
    gshard.save_safetensors(new, tmp_path / "y")

    def replace():
        if how == "renamed":
            os.replace(tmp_path / "y", file)
        else:
            file.write_bytes((tmp_path / "y").read_bytes())

    replaced_meanwhile(monkeypatch, replace)
    with pytest.raises(gshard.GShardError, match="x changed during the load"):
        gshard.load_safetensors(state, file)
    assert len(content) == file.stat().st_size and content != file.read_bytes()
    assert_same(gshard.full_params(state), params)
    assert_same(gshard.full_params(gshard.load_safetensors(state, file)), gshard.full_params(new))


def test_paths_and_arguments_of_import(tmp_path, monkeypatch):
    state, _ = simple({"w": np.ones(3, np.float32)})
    gshard.save_safetensors(state, tmp_path / "x")
    for path, cast, said in (
        (tmp_path / "y", False, "y does not exist"),
        (tmp_path, False, "has no safetensors file"),
        (7, False, "path=7 must be the path"),
        (tmp_path / "x", "yes", "cast='yes' must be True or False"),
    ):
        with pytest.raises(gshard.GShardError, match=said):
            gshard.load_safetensors(state, path, cast=cast)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    gshard.save_safetensors(state, tmp_path / "x")  # the library is not needed
    gshard.load_safetensors(state, tmp_path / "x")


# ---- the file system ----------------------------------------------------------------------------


def test_a_file_is_replaced_and_links_are_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    state, _ = simple({"w": np.ones(3, np.float32)})
    gshard.save_safetensors(state, "~/link")
    assert (tmp_path / "link").is_symlink()
    assert list(safetensors.load_file(tmp_path / "old")) == ["w"]
    assert sorted(os.listdir(tmp_path)) == ["link", "old"]


def test_what_is_no_file_is_left_alone(tmp_path):
    state, _ = simple({"w": np.ones(3, np.float32)})
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("folder", "folder"), ("pipe", "device")):
        with pytest.raises(gshard.GShardError, match=f"{name} is a {what}"):
            gshard.save_safetensors(state, tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


@pytest.mark.parametrize("room", [4, 100_000, 399_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, room):
    """In the header, between weights, and in what a buffer holds until the end."""
    state, _ = simple({name: np.ones(10_000, np.float32) for name in "abcdefghij"})
    file = tmp_path / "x"
    gshard.save_safetensors(state, file)
    old = file.read_bytes()
    assert len(old) > 400_000
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(
            gshard.GShardError, match="File too large. What was there is unchanged."
        ):
            gshard.save_safetensors(state, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == old
    assert os.listdir(tmp_path) == ["x"]


def test_an_interrupt_leaves_the_old_file(tmp_path, monkeypatch):
    state, _ = simple({"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)})
    (tmp_path / "x").write_text("old")

    def stop(self, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(NewFile, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        gshard.save_safetensors(state, tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "old"


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    state, _ = simple({"a": np.ones(3, np.float32)})
    (tmp_path / ".x.0123abcd.new").write_text("left by a killed process")
    others = [".x.0123abcd.new.txt", ".y.0123abcd.new", ".x.new", ".x.0123abcdef.new"]
    for name in others:
        (tmp_path / name).write_text("of somebody else")
    with NewFile(tmp_path / "x", "another export") as living:  # in another process
        living.write(b"half")
        gshard.save_safetensors(state, tmp_path / "x")
        living.commit()
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "x"])
    assert (tmp_path / "x").read_bytes() == b"half"


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("axes", [[], ["a b -> b a"]], ids=["own layout", "transposed"])
def test_one_leaf_is_on_the_host_at_a_time(tmp_path, axes):
    """Sharded on either dimension, padded: the rest of the state never shows in memory."""
    (ended,) = run_together(
        tmp_path, [["-m", "tests.checkpoint.safetensors.export_memory", str(tmp_path), *axes]]
    )
    assert_all_well([ended])
    leaf, state, export, back, left = json.loads(ended.said.splitlines()[-1])
    some = leaf / 10  # what a sample may have next to it
    # At least a part: what is freed meanwhile, of before, does not show.
    assert leaf / 4 < export < leaf + BLOCK + some
    assert left < some  # JAX would keep what the host has seen
    assert back < state + leaf + some


# ---- several processes --------------------------------------------------------------------------


RUNS = {  # of export_worker.py: the level and options of what is exported
    "p_g_os": ("p_g_os", {}),
    "bfloat16": ("os", {"precision": "bfloat16"}),
    "replica": ("os", {}),
}
FAULTS = {  # in its order: the rank at fault, and what it says
    0: (0, "cannot be written: No such file"),
    1: (1, "metadata has 1 by the name 'a'"),
    2: (0, "cannot be written: File too large"),
    3: (1, "none does not exist"),
    4: (0, "has weights already"),
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Where two processes worked together, and what each of them saw."""
    folder = tmp_path_factory.mktemp("processes")
    return folder, run_workers(
        folder, "checkpoint.safetensors.export_worker", str(folder), limit=120
    )


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_write_the_file_of_one_and_read_it(processes, tmp_path, run):
    folder, seen = processes
    level, options = RUNS[run]
    state, _, given = divided("linen", level, 4, **options)
    gshard.save_safetensors(state, tmp_path / "x")
    assert (folder / run).read_bytes() == (tmp_path / "x").read_bytes()
    params = {name: x for name, x in given.items() if not name.startswith("batch_stats.")}
    for process in seen:
        read = {k.removeprefix(f"{run}/"): x for k, x in process.items() if k.startswith(f"{run}/")}
        assert_same(read, params)


def test_two_processes_write_the_shards_of_one_and_read_them(processes, tmp_path):
    folder, seen = processes
    state, _, given = divided("linen", "p_g_os", 4)
    gshard.save_safetensors(state, tmp_path, name_map=NAMES, max_shard_bytes=SHARD_BYTES)
    files = sorted(os.listdir(tmp_path))
    assert len(files) > 3 and sorted(os.listdir(folder / "shards")) == files
    for name in files:
        assert (folder / "shards" / name).read_bytes() == (tmp_path / name).read_bytes()
    params = {name: x for name, x in given.items() if not name.startswith("batch_stats.")}
    for process in seen:
        read = {k[7:]: x for k, x in process.items() if k.startswith("shards/")}
        assert_same(read, params)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_on_one_process_is_raised_on_both(processes, fault):
    folder, seen = processes
    at_fault, said = FAULTS[fault]
    for rank, process in enumerate(seen):
        words = str(process["said"]).splitlines()[fault]
        assert said in words
        assert words.startswith(f"process {at_fault}: ") == (rank != at_fault)
    assert (folder / "full").read_text() == "old"
    assert not [name for name in os.listdir(folder) if "new" in name or name == "bad"]


COPYING = {
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "dog in MultiSteps": lambda: optax.MultiSteps(optax.contrib.dog(1.0), 2),
}


@pytest.mark.parametrize("options", [{}, {"precision": "bfloat16"}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("level", "tx"), [*zip(["p_g_os", "os", "dp"], COPYING, strict=True)])
def test_copies_that_the_optimizer_makes_of_the_parameters(tmp_path, level, tx, options):
    """Loaded before the first step, they are those of a state that was made of the weights."""

    def new(seed):
        rng = np.random.default_rng(seed)
        params = {k: rng.normal(size=n).astype(np.float32) for k, n in (("w", (13, 7)), ("b", 7))}
        mesh = gshard.make_mesh(devices=jax.devices()[:3])
        state = (params, COPYING[tx]())
        return gshard.shard_train_state(state, mesh, level, min_shard_size=1, **options)

    expected, _ = new(0)
    gshard.save_safetensors(expected, tmp_path / "x")
    state, plan = new(1)
    state = gshard.load_safetensors(state, tmp_path / "x")
    for x, y in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        assert x.sharding == y.sharding and x.dtype == y.dtype
        wide = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(*wide, rtol=2e-7)  # DoG's norm is a sum over devices
    step = gshard.make_train_step(lambda p, b: ((b @ p["w"] + p["b"]) ** 2).mean(), plan)
    state, _ = step(state, np.ones((6, 13), np.float32))
    with pytest.warns(gshard.GShardWarning, match=r"of the earlier parameters: .*/b, .*\(step 1\)"):
        gshard.load_safetensors(state, tmp_path / "x")


def test_an_optimizer_that_copies_nothing_is_kept(tmp_path, recwarn):
    params = {"w": np.ones((12, 6), np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state, _ = gshard.shard_train_state((params, tx), mesh, "p_g_os", min_shard_size=1)
    state = state.replace(step=state.step + 1)
    gshard.save_safetensors(state, tmp_path / "x")
    other = gshard.load_safetensors(state, tmp_path / "x")
    pairs = zip(*(jax.tree.leaves(x.opt_state.inner) for x in (state, other)), strict=True)
    assert all(x is y for x, y in pairs)
    assert not [x for x in recwarn if issubclass(x.category, gshard.GShardWarning)]


def test_a_state_without_an_optimizers_state_and_frozen_weights_alone(tmp_path, recwarn):
    params = {"a": np.ones((12, 6), np.float32), "b": np.ones(6, np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    bare = TrainState(step=0, apply_fn=None, params=params, tx=optax.adamw(1e-2), opt_state=())
    state, _ = gshard.shard_train_state(bare, mesh, "p_g_os", min_shard_size=1)
    gshard.save_safetensors(state, tmp_path / "x")
    gshard.load_safetensors(state, tmp_path / "x")
    tx = optax.contrib.prodigy(1.0)  # it copies the trained parameters
    state, _ = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=1, frozen="^b")
    gshard.load_safetensors(state.replace(step=state.step + 1), tmp_path / "x", only="^b")
    assert not [x for x in recwarn if "earlier parameters" in str(x.message)]
