"""Calls that are found by name in a traced function: also in what JAX makes of them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard._util.jaxpr import inner_jaxprs
from gshard._util.named_calls import behind_call, call_by_name, name_of


@dataclass(frozen=True)
class Behind:
    fun: Any


def called(x):
    def fun(x):
        return jnp.sin(x) * x

    return call_by_name("a test", fun, [x], lambda *_: Behind(fun)).sum()


def found(jaxpr, **options):
    """What is behind the calls of a traced function, and their names."""
    for eqn in jaxpr.eqns:
        if (behind := behind_call(eqn, Behind, **options)) is not None:
            yield behind, name_of(eqn)
        for inner in inner_jaxprs(eqn):
            yield from found(inner, **options)


def test_a_derivative_is_found_by_the_name_of_its_call():
    transformed = jax.vmap(jax.grad(jax.checkpoint(called)))
    traced = jax.make_jaxpr(transformed)(jnp.ones((2, 3)))
    assert not list(found(traced))
    assert {name for _, name in found(traced, transformed=True)} == {"a test"}


def by_examples(fun, x):
    return gshard.by_examples(fun)(x)


def dropless(fun, x):
    routing = gshard.expert.route(x[None], 1, capacity_factor=None)
    return gshard.expert.dropless(lambda p, rows, sizes: fun(rows), x, x[None], routing)


@pytest.mark.parametrize("call", [by_examples, dropless])
def test_a_function_is_forgotten_with_the_program_that_calls_it(call):
    def trace():
        def fun(x):
            return x * 2

        jaxpr = jax.make_jaxpr(jax.grad(lambda x: call(fun, x).sum()))(jnp.ones((4, 4)))
        return jaxpr, weakref.ref(fun)

    traced, seen = trace()
    gc.collect()
    assert seen() is not None  # the program may be evaluated yet
    del traced
    gc.collect()
    assert seen() is None
