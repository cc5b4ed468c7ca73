"""What an expert axis would give: found in the traced loss, and the amounts of its own forecast."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from examples import training
from gshard.analysis.aot.target import parse_target
from gshard.analysis.config import Config
from gshard.analysis.expert_axes import expert_axes, keepable, patterns
from gshard.analysis.setup import Choices, TrainSetup, load_setup, without_arrays
from gshard.analysis.tune import Option, Verdict
from gshard.analysis.tune_report import advice_text, base_of
from gshard.cli.main import main
from gshard.models import llama, moe
from tests.experts import MODELS, batch, mean_loss, params
from tests.tiers import quick

SMALL = {"layers": 2, "heads": 4, "width": 32, "vocabulary": 96, "sequence": 256, "kv_heads": 2}
SETUP = f"{__name__}:mixture"
TARGET = parse_target("h100:2x8")


def mixture(model: str = "one-hot", words: int = 0, semantics: str = "global") -> TrainSetup:
    """Experts, beside an embedding of so many further words."""
    given = params()
    given["more"] = jnp.zeros((words, 16))
    return TrainSetup(
        lambda: (given, optax.adamw(1e-3)),
        mean_loss(model),
        jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.asarray(x[:1]), batch())),
        shard={"min_shard_size": 0},
        step={"loss_semantics": semantics},
    )


# ---- which arrays can be kept --------------------------------------------------------------------


def dims_of(setup: TrainSetup) -> tuple[bool, dict[str, int]]:
    named, found = keepable(without_arrays(setup))
    return named, {path: dim for path, (dim, _) in found.items()}


@pytest.mark.parametrize("model", MODELS)
def test_experts_are_a_batch_dimension_of_their_products(model):
    """Where every expert computes every token, that is so only on the way back to tokens."""
    wanted = {"experts/up": 0, "experts/down": 0}
    if model == "every token":
        del wanted["experts/up"]
    assert dims_of(mixture(model)) == (False, wanted)


def test_stacked_layers_are_no_experts():
    found = dims_of(moe.setup(**SMALL, mlp=48, experts=4, group=128))
    assert found == (False, {f"layers/experts/{name}": 1 for name in ("gate", "up", "down")})
    assert dims_of(llama.setup(**SMALL, mlp=64)) == (False, {})


def test_metadata_names_experts():
    found = dims_of(training.setup(experts=8, scan=False))
    paths = {f"block_{i}/experts/{name}": 0 for i in range(3) for name in ("up", "down")}
    assert found == (True, paths)


def test_a_dimension_must_be_a_batch_in_every_product():
    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.einsum("ebd,edf->ebf", jnp.stack([x] * 8), p["w"])
        return jnp.einsum("ebf,efd->bd", jnp.sin(h), p["w"]).sum()

    shape = jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)
    other = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    setup = TrainSetup(({"w": shape}, optax.sgd(1.0)), loss, other, shard={"min_shard_size": 0})
    assert dims_of(setup) == (False, {})


def test_few_experts_are_not_worth_a_line():
    assert dims_of(mixture(words=10_000)) == (False, {})


def test_patterns_match_no_other_array():
    found = {"a/experts/up": (0, (8, 2, 2)), "b/experts/up": (0, (8, 2, 2)), "head": (1, (2, 8))}
    others = ("a/up", "a/experts/up/bias", "xhead", "a/b")
    keep = patterns(found, dict.fromkeys([*found, *others]))
    assert list(keep.values()) == [("expert", 0), ("expert", 1)]
    for text, (_, dim) in keep.items():
        matched = {path for path in (*found, *others) if re.search(text, path)}
        assert matched == {path for path, (of, _) in found.items() if of == dim}


# ---- what they give ------------------------------------------------------------------------------


def first_of(level: str = "os", **more: Any) -> tuple[Config, list[Verdict]]:
    """A config, and a verdict that has its first option."""
    config = Config(SETUP, target=TARGET, devices=16, **more)
    option = Option(level, 1, config.choices)
    return config, [Verdict(option, 16, 1, 2, 0, None)]


@pytest.mark.parametrize("level", quick(["os", "p_g_os"], ["os"]))
def test_amounts_are_those_of_the_forecast_with_the_arguments(level):
    choices = Choices(micro_batches=2)
    config, found = first_of(level, choices=choices)
    axes = expert_axes(config, found)
    assert [x.argument.partition(",")[0] for x in axes] == [
        f"make_mesh(expert={n})" for n in (8, 4, 2)
    ]

    def amounts(**more: Any) -> tuple[int, ...]:
        of = gshard.forecast(
            mixture(), 16, levels=level, micro_batches=2, devices_per_node=8, **more
        ).levels[level]
        return of.stored, of.wire, of.network, of.peak

    now = amounts()
    for x in axes:
        asked = eval(f"dict({x.argument.replace('make_mesh(', '').replace(')', '', 1)})")
        assert set(asked) == {"expert", "keep"}
        pairs = zip(now, amounts(**asked), strict=True)
        assert [x.stored, x.sent, x.network, x.peak] == list(pairs)
        assert min(x.seconds) > 0
        assert x.stored[1] < x.stored[0] or level == "p_g_os"


def test_what_is_written_has_the_replicas_that_were_computed_with():
    config, found = first_of()
    option = dataclasses.replace(found[0].option, replica=2)
    axes = expert_axes(config, [dataclasses.replace(found[0], option=option)])
    assert [x.argument.partition("), keep")[0] for x in axes] == [
        f"make_mesh(replica=2, expert={n}" for n in (8, 4, 2)
    ]
    assert base_of([], axes) == axes[0].seconds[0]  # where nothing fits


def test_nothing_is_said_where_nothing_can_be_kept():
    config, found = first_of()
    for other in ({"model": "tests.setups:mlp"}, {"expert": 2}, {"target": None}):
        assert expert_axes(dataclasses.replace(config, **other), found) == []
    alone = {"semantics": "per_device"}  # which an expert axis refuses
    assert expert_axes(dataclasses.replace(config, arguments=alone), found) == []


def test_advice_has_the_axes(capsys):
    words = ["advise", SETUP, "--target", "h100:2x8", "--levels", "os,p_g_os"]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [len(x["sent"]) for x in data["expert_axes"]] == [2, 2, 2]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "With experts kept on an axis, for the first option as traced" in said
    assert "make_mesh(expert=8)" in said
    assert "shard_train_state(keep={'(^|/)(down|up)$': ('expert', 0)})" in said
    setup = load_setup(SETUP)
    keep = {"(^|/)(down|up)$": ("expert", 0)}
    plan = gshard.shard_train_state(
        setup.state, gshard.make_mesh(expert=4), "os", keep=keep, **setup.shard
    )[1]
    assert [x.path for x in jax.tree.leaves(plan.params) if x.kept] == [
        "experts/down",
        "experts/up",
    ]


def test_advice_says_who_shares_the_examples():
    config, found = first_of(choices=Choices(micro_batch_size=3))
    assert "3 examples on each device in a step" in advice_text(config, found)
    shared = advice_text(dataclasses.replace(config, sequence=2), found)
    assert "3 examples on every 2 devices that share sequences in a step" in shared
    planned = gshard.forecast(mixture(), 8, sequence=2, levels="os", activations=False)
    assert "a step of 1 x 1 examples on every 2 devices that share sequences" in str(planned)


def test_a_pattern_matches_no_array_whose_path_ends_alike():
    found = {"up": (0, (8, 2, 2)), "down": (0, (8, 2, 2))}
    ((text, _),) = patterns(found, dict.fromkeys([*found, "mlp/up", "mlp/down"])).items()
    assert [path for path in (*found, "mlp/up", "mlp/down") if re.search(text, path)] == [*found]


def test_a_loss_that_one_example_does_not_suit_has_no_expert_axes():
    def loss(params, x):
        first, second = jnp.split(x @ params["w"], 2)
        return jnp.square(first - second).mean()

    params = {"w": jnp.zeros((64, 64))}
    setup = gshard.TrainSetup((params, optax.adam(1e-3)), loss, jnp.zeros((2, 64)))
    assert keepable(without_arrays(setup)) == (False, {})
