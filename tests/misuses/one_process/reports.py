"""Budgets, audits, explanations, forecasts and rules."""

from __future__ import annotations

import gshard
from tests.misuses.small import BATCH, kept, linen, loss_fn, params, shard
from tests.misuses.table import refused, right


def audited():
    state, _, step = kept()
    return gshard.audit(step, state, BATCH)


ROWS = {
    "a budget of a state": refused(
        lambda _: gshard.budget(kept()[0]), "budget(plan)", "a TrainState"
    ),
    "a mesh as the plan of an audit": refused(
        lambda _: gshard.audit(kept()[2], kept()[0], BATCH, plan=gshard.make_mesh()),
        *("plan=a Mesh", "shard_train_state"),
    ),
    "a plan as the budget of an audit": refused(
        lambda _: gshard.audit(kept()[2], kept()[0], BATCH, budget=kept()[1]),
        *("budget=a Plan", "gshard.budget"),
    ),
    "collectives of an audit by JAX's name": refused(
        lambda _: audited().elements("all_gather"), "'all_gather'", "Did you mean 'all-gather'?"
    ),
    "bytes of an audit by JAX's name": refused(
        lambda _: audited().wire_bytes("all_gather"), "Did you mean 'all-gather'?"
    ),
    "collectives of a budget by JAX's name": refused(
        lambda _: gshard.budget(kept()[1]).elements("all_reduce"), "Did you mean 'all-reduce'?"
    ),
    "a number as report= of a forecast": refused(
        lambda _: gshard.forecast(linen(), 8, report=3), "report=3", "such as print"
    ),
    "whether a level fits that was not forecast": refused(
        lambda _: gshard.forecast(linen(), 8, levels="os").fits("zero3"),
        "level p_g_os was not forecast, only os",
    ),
    "whether a level fits, by another name": right(
        lambda _: (gshard.forecast(linen(), 8).fits("zero3") is None, True)
    ),
    "what a level saves, by another name": right(
        lambda _: (gshard.explain(kept()[0]).saves("zero3"), gshard.explain(kept()[0]).saves(3))
    ),
    "keep= of a forecast that maps to a number": refused(
        lambda _: gshard.forecast(linen(), 8, keep={"w": 0}), "'w' is mapped to 0"
    ),
    "an audit of a loss": refused(lambda _: gshard.audit(loss_fn), "make_train_step"),
    "an audit without arguments": refused(lambda _: gshard.audit(kept()[2]), "step(state, batch)"),
    "an explanation of parameters": refused(lambda _: gshard.explain(params()), "explain"),
    "a forecast without devices": refused(
        lambda _: gshard.forecast(gshard.TrainSetup(linen, loss_fn, BATCH), None), "devices"
    ),
    "a forecast of a state": refused(lambda _: gshard.forecast(3, 8), "state is a int"),
    "a forecast for -1 devices": refused(
        lambda _: gshard.forecast(gshard.TrainSetup(linen, loss_fn, BATCH), -1), "devices=-1"
    ),
    "a forecast of an unknown level": refused(
        lambda _: gshard.forecast(gshard.TrainSetup(linen, loss_fn, BATCH), 8, levels="p_g"),
        *("'p_g'", "p_g_os"),
    ),
    "a forecast of a file that is not there": refused(
        lambda _: gshard.forecast("nowhere.toml", 8), "nowhere.toml"
    ),
    "a forecast of a model with an argument that it does not have": refused(
        lambda _: gshard.forecast("gshard.models.llama:setup", 8, arguments={"layer": 2}),
        *("has no argument 'layer'", "Did you mean 'layers'?"),
    ),
    "a forecast of a file of Python": refused(
        lambda _: gshard.forecast("tests/setups.py:mlp", 8), "Did you mean 'tests.setups:mlp'?"
    ),
    "a rule that is no function": refused(
        lambda _: shard(rules=gshard.by_path("w", "first")), "'first'"
    ),
    "a rule with a pattern that is none": refused(lambda _: gshard.by_path("(", 0), "'('"),
    "by_examples of no function": refused(lambda _: gshard.by_examples(3), "by_examples"),
}
