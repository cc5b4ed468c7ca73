"""`ZeroRedundancyOptimizer` with an optimizer that multiplies matrices: each computed once."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from optax import contrib

import gshard
from tests.tiers import quick
from tests.train import compositions
from tests.train.compositions import batch_of, loss_of, params_of, relative

TORCH = gshard.pytorch


def muon(learning_rate: float) -> Any:
    """Muon of every matrix, with the hyperparameters of `compositions.muon`."""
    numbers = compositions.muon_numbers
    return contrib.muon(learning_rate, muon_weight_dimension_numbers=numbers, nesterov=False)


def wanted(steps: int) -> tuple[dict[str, Any], list[Any]]:
    """Parameters of one device after some steps, and the gradient of each step."""
    params, grads = params_of(stacked=False), []
    leaves = compositions.first_leaves("muon", params)
    for i in range(steps):
        grads.append(jax.jit(jax.grad(loss_of))(params, batch_of(i)))
        _, params, leaves = compositions.one_device("muon", False)(params, leaves, batch_of(i))
    return params, grads


def assert_right(found: Any, right: Any) -> None:
    start = params_of(stacked=False)
    for name, x in right.items():
        assert relative(found[name] - x, x - start[name]) <= 3e-5, name


@pytest.mark.parametrize("partition", ["even", "greedy"])
@pytest.mark.parametrize("groups", quick([1, 2], [2]))
def test_every_matrix_is_computed_once(partition, groups):
    right, grads = wanted(2)
    params: Any = params_of(stacked=False)
    names = [[x for x in params if x.startswith("layer") == late] for late in (False, True)]

    def grouped(tree: Any) -> Any:
        return tree if groups == 1 else [{k: tree[k] for k in some} for some in names]

    given = grouped(params) if groups == 1 else [{"params": x} for x in grouped(params)]
    opt = TORCH.ZeroRedundancyOptimizer(given, muon, partition=partition, lr=1e-2)
    for g in grads:
        found = opt.step(grouped(g))
    assert_right(found if groups == 1 else {**found[0], **found[1]}, right)
    if partition == "even":
        products: Any = opt.plan.update_products
        ((name, alone),) = products.unshared  # the only one of its shape
        assert name.endswith("out")
        assert 3 * (products.flops - alone) == products.one_device - alone
        assert re.search("all_to_all", opt.step.lower(grouped(grads[0])).as_text())


@pytest.mark.parametrize("overlap", quick([False, True], [True]))
def test_gradients_of_backward_are_updated_alike(overlap):
    right, _ = wanted(2)
    model = TORCH.DistributedDataParallel(compositions.Net(params_of(stacked=False)))
    opt = TORCH.ZeroRedundancyOptimizer(model.parameters(), muon, lr=1e-2, overlap_with_ddp=overlap)
    for i in range(2):
        model.backward(compositions.nnx_loss, batch_of(i))
        opt.step()
        opt.zero_grad()
    assert_right({k: np.asarray(x) for k, x in model.state_dict().items()}, right)
    products: Any = opt.plan.update_products
    assert products.sent > 0 and {name for name, _ in products.unshared} == {"out"}
