"""Plans of experts that are kept on an axis: configs, options, and the compiled program."""

from __future__ import annotations

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.analysis.aot.compiled import compile_for
from gshard.analysis.aot.target import parse_target
from gshard.analysis.config import read_config
from gshard.analysis.forecast import forecast_config
from gshard.analysis.setup import TrainSetup, batch_of
from gshard.cli.main import main
from gshard.models import moe
from tests.ahead_of_time import printed_for
from tests.experts import KEEP, batch, clipped_adamw, mean_loss, params
from tests.tiers import quick

LEVELS = ("dp", "os", "os_g", "p_g_os")
MODEL = f"{__name__}:mixture"
FILE = f"""
model = "{MODEL}"
devices = 8
expert = 4
micro_batches = 2

[keep]
"experts/" = ["expert", 0]
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What was compiled before does not answer, and nothing is left in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def mixture(experts: int = 8) -> TrainSetup:
    """Experts that are chosen by one-hot products."""
    return TrainSetup(
        lambda: (params(experts=experts), clipped_adamw()),
        mean_loss("one-hot"),
        jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.asarray(x[:1]), batch())),
        shard={"min_shard_size": 0},
    )


class Named(nn.Module):
    """Experts whose dimension the model's metadata names."""

    boxed: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        named = nn.with_partitioning(init, ("expert", None, None)) if self.boxed else init
        to = nn.softmax(nn.Dense(8, name="router")(x))
        h = jnp.einsum("be,bd->ebd", to, x)
        for name in ("up", "down"):
            h = nn.tanh(jnp.einsum("ebd,edf->ebf", h, self.param(name, named, (8, 16, 16))))
        return x + h.sum(0)


def named(boxed: bool = True) -> TrainSetup:
    model, example = Named(boxed), jax.ShapeDtypeStruct((1, 16), jnp.float32)
    return TrainSetup(
        lambda: (model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"], optax.adamw(1e-3)),
        lambda p, x: jnp.square(model.apply({"params": p}, x) - x).mean(),
        example,
        shard={"min_shard_size": 0},
    )


# ---- amounts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
@pytest.mark.parametrize(
    ("devices", "axes", "experts"),
    quick(
        [
            (8, {"expert": 4}, 8),
            (6, {"expert": 3}, 9),
            (5, {"expert": 5}, 5),
            (8, {"expert": 2, "replica": 2}, 4),
            (8, {"expert": 2, "sequence": 2}, 4),
            (8, {"expert": 2, "sequence": 2, "replica": 2}, 4),
        ],
        [(6, {"expert": 3}, 9)],
    ),
)
def test_a_forecast_has_the_bytes_of_the_compiled_step(level, devices, axes, experts):
    setup = mixture(experts)
    found = gshard.forecast(
        setup, devices, levels=[level], keep=KEEP, micro_batches=2, platform="cpu", **axes
    )
    assert found.experts == axes["expert"]
    mesh = gshard.make_mesh(devices=jax.devices()[:devices], **axes)
    state, plan = gshard.shard_train_state(setup.state, mesh, level, keep=KEEP, **setup.shard)
    step = gshard.make_train_step(setup.loss_fn, plan, micro_batches=2)
    audit = gshard.audit(step, state, batch_of(setup, plan, found.choices))
    of = found.levels[level]
    assert of.wire == sum(row.wire_bytes for row in audit.collectives if not row.scalar)
    assert any(row.kind == "all-to-all" for row in audit.collectives)
    for name in ("params", "gradients"):
        assert getattr(of, name) == audit.budget.resident[name]
    live = sum(
        x.data.nbytes
        for leaf in jax.tree.leaves(plan.kind.split(state))
        for x in leaf.addressable_shards
        if x.device == mesh.devices.flat[0]
    )
    assert of.stored == live


def test_a_peak_is_near_the_compiler_s():
    arguments = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "mlp": 257}
    arguments |= {"vocabulary": 999, "sequence": 256, "group": 128}
    arguments |= {"remat": "exchange", "dtype": "float32"}
    options = {
        "expert": 4,
        "micro_batch_size": 2,
        "keep": {"experts/(gate|up|down)": ("expert", 1)},
    }
    request = {"model": "gshard.models.moe:setup", "arguments": arguments, "target": "cpu:8"}
    compiled = compile_for(request | {"level": "p_g_os"} | options)
    assert compiled["mesh"] == {"shard": 2, "expert": 4}
    found = gshard.forecast(
        moe.setup(**arguments), 8, levels="p_g_os", platform="cpu", **options
    ).levels["p_g_os"]
    assert found.peak == pytest.approx(compiled["needs"], rel=0.2)
    assert found.wire == pytest.approx(sum(compiled["wire_bytes"].values()), rel=1e-3)


def test_metadata_of_a_model_keeps_experts_without_a_config_s_help():
    keep = {"^(up|down)$": ("expert", 0)}
    by_name, by_pattern, neither = (
        gshard.forecast(f"{__name__}:named", 8, arguments={"boxed": boxed}, levels="p_g_os", **more)
        for boxed, more in (
            (True, {"expert": 4}),
            (False, {"expert": 4, "keep": keep}),
            (False, {}),
        )
    )
    assert by_name.experts == by_pattern.experts == 4
    assert by_name.levels["p_g_os"].wire == by_pattern.levels["p_g_os"].wire
    assert by_name.levels["p_g_os"].wire != neither.levels["p_g_os"].wire


# ---- configs and commands ------------------------------------------------------------------------


def test_a_config_and_options_say_what_is_kept(tmp_path, capsys):
    path = tmp_path / "kept.toml"
    path.write_text(FILE)
    config = read_config(str(path), allow_import=[__name__])
    assert (config.expert, config.choices.keep) == (4, {"experts/": ["expert", 0]})
    found = forecast_config(config)
    assert "experts kept on an axis of 4; a step of 2 x 1 examples on each device" in str(found)
    words = ["--expert", "4", "--keep", "{'experts/' = ['expert', 0]}", "--micro_batches", "2"]
    assert main(["plan", MODEL, "--devices", "8", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["levels"] == json.loads(
        json.dumps(found.as_dict()["levels"])
    )
    untraced = str(gshard.forecast(mixture(), 8, expert=4, keep=KEEP, activations=False))
    assert "at most, without activations" in untraced


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE.replace("expert = 4", "expert = 1"), "there is none with expert=1. Give"),
        (FILE.replace("expert = 4", "expert = 0"), "expert=0 must be a whole number"),
        (FILE.replace('["expert", 0]', '"expert"'), "is mapped to 'expert'. Give the axis and"),
        (FILE.replace('["expert", 0]', '["exprt", 0]'), "Did you mean 'expert'?"),
        (FILE.replace('["expert", 0]', '["expert", 4]'), "does not exist: the array has 3"),
        (FILE.replace("experts/", "expertz/"), "matches no parameter"),
        (FILE.replace("[keep]", "[kept]"), "Did you mean 'keep'?"),
        (f"keep = 3\nmodel = '{MODEL}'", "table, such as {'experts/' = ['expert', 0]}, with ="),
        (FILE.replace("expert = 4", "expert = 3"), "expert=3 does not divide 8 devices"),
        (
            FILE.replace("expert = 4", "expert = 4\nreplica = 4"),
            "replica=4 times expert=4 does not",
        ),
        (f"{FILE}\n[arguments]\nexperts = 6", "cannot share equally. Use an axis of a size that"),
    ],
)
def test_a_wrong_config_is_one_readable_sentence(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(gshard.GShardError, match="(?s)^[^\n]*$") as caught:
        forecast_config(read_config(str(path), allow_import=[__name__]))
    assert said in str(caught.value)


def test_an_expert_axis_that_keeps_nothing_is_said(capsys):
    words = ["plan", MODEL, "--devices", "8", "--expert", "4", "--levels", "os"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert said.count("warning: the mesh has an expert axis of 4 devices") == 1
    assert "no parameter is kept on it" in said


def test_a_mesh_has_its_own_axes():
    with pytest.raises(gshard.GShardError, match="expert= goes with a number of devices"):
        gshard.forecast(mixture(), gshard.make_mesh(expert=4), expert=4, keep=KEEP)
    with pytest.raises(gshard.GShardError, match="expert=1. Give the number of devices"):
        gshard.forecast(mixture(), 8, keep=KEEP)


# ---- Mixtral -------------------------------------------------------------------------------------


def test_mixtral_sends_a_fifth_of_what_gathered_experts_take():
    kept = forecast_config(read_config("mixtral-8x7b")).levels["p_g_os"]
    gathered = read_config("mixtral-8x7b", {"expert": 1, "keep": {}})
    assert forecast_config(gathered).levels["p_g_os"].wire > 275e9
    again = read_config("mixtral-8x7b", {"arguments.remat": "full"})
    assert kept.wire < 0.95 * forecast_config(again).levels["p_g_os"].wire < 60e9


@pytest.mark.slow
def test_gradients_of_experts_are_reduce_scattered_on_tpu():
    """Those of batched products come transposed, of which XLA would make all-reduces."""
    words = ("gshard", "plan", "mixtral-8x7b", "--arguments.layers", "2", "--compile", "--json")
    target = "tpu-v5e:16x16"
    found = json.loads(printed_for(parse_target(target), *words, "--target", target))
    sent = found["compiled"]["p_g_os"]["wire_bytes"]
    assert sum(sent.values()) < 1.02 * found["levels"]["p_g_os"]["wire"]
    assert sent["all-reduce"] < 1e-4 * sent["reduce-scatter"]


@pytest.mark.parametrize("target", ["h100:32x8"])
def test_mixtral_as_compiled(target):
    """All 32 layers; experts are not gathered over their axis."""
    words = ("gshard", "plan", "mixtral-8x7b", "--compile", "--json", "--target", target)
    found = json.loads(printed_for(parse_target(target), *words))
    compiled = found["compiled"]["p_g_os"]
    assert compiled["fits"] and compiled["mesh"] == {"shard": 32, "expert": 8}
    sent = sum(compiled["wire_bytes"].values())
    assert sent == pytest.approx(found["levels"]["p_g_os"]["wire"], rel=1e-3)
    assert sent < 60e9
    assert sum(compiled["asynchronous_bytes"].values()) > 0.9 * sent
    others = 46_702_792_704 - 32 * 3 * 8 * 4096 * 14336  # parameters that are no experts
    over = [row for row in compiled["collectives"] if "expert" in row["axes"]]
    gathered = sum(row["elements"] for row in over if row["kind"] == "all-gather")
    assert 0 < gathered < 2.1 * others  # in both passes
