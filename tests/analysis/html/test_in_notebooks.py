"""What a notebook shows of a plan, a budget, an audit and a forecast."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from tests.analysis.html.test_page import Page

NAME = "</td><script>alert(1)</script>&[b]"  # of a parameter


@pytest.fixture(scope="module")
def shown():
    params = {"w": jnp.ones((64, 32)), NAME: jnp.ones(32)}
    batch = np.ones((16, 64), np.float32)

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] + params[NAME]) ** 2)

    shard = {"min_shard_size": 0}
    setup = gshard.TrainSetup((params, optax.adam(1e-3)), loss_fn, batch, shard=shard)
    state, plan = gshard.shard_train_state(setup.state, gshard.make_mesh(), "zero3", **shard)
    return {
        "plan": plan,
        "budget": gshard.budget(plan),
        "audit": gshard.audit(gshard.make_train_step(loss_fn, plan), state, batch),
        "forecast": gshard.forecast(setup, devices=8),
    }


@pytest.mark.parametrize("what", ["plan", "budget", "audit", "forecast"])
def test_a_notebook_shows_what_print_shows(shown, what):
    page = Page(shown[what]._repr_html_())
    words = str(shown[what]).replace("─", "").split()
    assert sorted(" ".join(page.text).split()) == sorted(words)
    assert len(words) > 20
    assert page.all("table")


def test_a_notebook_shows_names_as_text(shown):
    page = Page(shown["plan"]._repr_html_())
    assert NAME in page.text
    assert not page.all("script")


def test_a_notebook_keeps_its_own_colors_and_aligns_amounts_on_the_right(shown):
    for value in shown.values():
        html = value._repr_html_()
        assert "color" not in html
        assert "background" not in html
    columns = 6
    styles = [cell["style"] for cell in Page(shown["plan"]._repr_html_()).all("td")]
    sides = ["right" if "text-align:right" in style else "left" for style in styles]
    assert sides == ["left", "left", "left", "left", "left", "right"] * (len(styles) // columns)
