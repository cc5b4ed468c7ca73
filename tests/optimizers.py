"""Every optimizer and transformation that optax ships, as factories by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from optax import contrib

Factory = Callable[[], optax.GradientTransformation]

RATE = 1e-2
WARM = optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10)


def then_descend(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation as an optimizer."""
    return optax.chain(tx, optax.scale_by_learning_rate(RATE))


def bare(make: Factory) -> optax.GradientTransformation:
    return then_descend(make())


def fast_alone(lookahead: optax.GradientTransformation) -> optax.GradientTransformation:
    """As `docs/train-step.md` has it: the slow parameters are optimizer state."""

    def init(params):
        return lookahead.init(optax.LookaheadParams.init_synced(params)), params

    def update(grads, state, params):
        state, slow = state
        pair = optax.LookaheadParams(fast=params, slow=slow)
        updates, state = lookahead.update(grads, state, pair)
        return updates.fast, (state, optax.apply_updates(slow, updates.slow))

    return optax.GradientTransformation(init, update)


def soap(every: int = 1) -> optax.GradientTransformation:
    """Adam in the eigenbases of Shampoo's factors, found by one QR of the last (SOAP, 2024).

    The bases change in every step, or under a `cond` in each `every`-th.
    """

    def sides(x):
        return (-1, -2) if jnp.ndim(x) > 1 else ()

    def init(params):
        def basis(x, d):
            return jnp.broadcast_to(jnp.eye(x.shape[d]), (*x.shape[:-2], x.shape[d], x.shape[d]))

        def of(x):
            return {"factors": [basis(x, d) for d in sides(x)], "second": jnp.zeros_like(x),
                    "bases": [basis(x, d) for d in sides(x)]}  # fmt: skip

        return jnp.int32(0), jax.tree.map(of, params)

    def rotate(x, bases, back=False):
        for d, q in zip(sides(x), bases, strict=True):
            x = jnp.swapaxes(jnp.swapaxes(x, d, -1) @ (q.mT if back else q), d, -1)
        return x

    def one(count, g, s):
        factors = [
            0.9 * f + 0.1 * (m := jnp.swapaxes(g, d, -1)).mT @ m
            for d, f in zip(sides(g), s["factors"], strict=True)
        ]

        def turn(bases):
            return [jnp.linalg.qr(f @ q)[0] for f, q in zip(factors, bases, strict=True)]

        bases = s["bases"]
        if every == 1:
            bases = turn(bases)
        elif bases:
            bases = jax.lax.cond(count % every == 0, turn, lambda bases: bases, bases)
        rotated = rotate(g, bases)
        second = 0.9 * s["second"] + 0.1 * jnp.square(rotated)
        update = rotate(-RATE * rotated / (jnp.sqrt(second) + 1e-2), bases, back=True)
        return update, {"factors": factors, "second": second, "bases": bases}

    def update(grads, state, params=None):
        del params
        count, states = state
        leaves, structure = jax.tree.flatten(grads)
        pairs = [
            one(count, g, s) for g, s in zip(leaves, structure.flatten_up_to(states), strict=True)
        ]
        updates, states = (structure.unflatten(x) for x in zip(*pairs, strict=True))
        return updates, (count + 1, states)

    return optax.GradientTransformation(init, update)


def matrices(params):
    """Whether a leaf is a matrix."""
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def labels(params):
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) > 1 else "vector", params)


# Optimizers that take a learning rate and no more.
BY_RATE = (
    "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan",
    "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd",
    "optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop",
    "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi",
)  # fmt: skip
CONTRIB_BY_RATE = (
    "acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "galore", "madgrad", "momo",
    "momo_adam", "muon", "prodigy", "schedule_free_adamw", "schedule_free_sgd",
    "simplified_ademamix",
)  # fmt: skip
# Transformations that need no argument.
BARE = (
    "apply_every", "centralize", "identity", "scale_by_adadelta", "scale_by_adam",
    "scale_by_adamax", "scale_by_adan", "scale_by_amsgrad", "scale_by_belief",
    "scale_by_distance_over_gradients", "scale_by_lbfgs", "scale_by_lion", "scale_by_novograd",
    "scale_by_optimistic_gradient", "scale_by_param_block_norm", "scale_by_param_block_rms",
    "scale_by_factored_rms", "scale_by_radam", "scale_by_rms", "scale_by_rss", "scale_by_sign",
    "scale_by_sm3", "scale_by_stddev", "scale_by_trust_ratio", "scale_by_yogi",
    "normalize_by_update_norm", "set_to_zero", "zero_nans",
)  # fmt: skip
CONTRIB_BARE = (
    "normalize", "reduce_on_plateau", "scale_by_acprop", "scale_by_ademamix", "scale_by_adopt",
    "scale_by_cocob", "scale_by_galore", "scale_by_simplified_ademamix",
)  # fmt: skip

OPTIMIZERS: dict[str, Factory] = {
    **{name: partial(getattr(optax, name), RATE) for name in BY_RATE},
    **{name: partial(getattr(contrib, name), RATE) for name in CONTRIB_BY_RATE},
    **{name: partial(bare, getattr(optax, name)) for name in BARE},
    **{name: partial(bare, getattr(contrib, name)) for name in CONTRIB_BARE},
    "polyak_sgd": lambda: optax.polyak_sgd(RATE),
    "dog": lambda: contrib.dog(1.0, init_step=("heuristic", 1e-2)),
    "dowg": lambda: contrib.dowg(1.0, init_estim_sq_dist=1e-2),
    "scale_by_polyak": lambda: then_descend(optax.scale_by_polyak()),
    "scale_by_madgrad": lambda: contrib.scale_by_madgrad(RATE, 0.9, 1e-6),
    "scale_by_rprop": lambda: optax.chain(optax.scale_by_rprop(RATE), optax.scale(-1.0)),
    "mechanize": lambda: contrib.mechanize(optax.adam(1.0)),
    "schedule_free": lambda: contrib.schedule_free(optax.adam(RATE), RATE),
    "sam": lambda: contrib.sam(optax.sgd(RATE), optax.sgd(1e-3), sync_period=2),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(RATE)),
    "adaptive_grad_clip": lambda: then_descend(optax.adaptive_grad_clip(1e-2)),
    "add_decayed_weights": lambda: then_descend(optax.add_decayed_weights(1e-2)),
    "add_noise": lambda: then_descend(optax.add_noise(1e-3, 0.5, key=jax.random.key(7))),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(7)),
    "clip": lambda: then_descend(optax.clip(1e-2)),
    "clip_by_block_rms": lambda: then_descend(optax.clip_by_block_rms(1e-2)),
    "clip_by_global_norm": lambda: then_descend(optax.clip_by_global_norm(1e-2)),
    "ema": lambda: then_descend(optax.ema(0.9)),
    "trace": lambda: then_descend(optax.trace(0.9, nesterov=True)),
    "scale": lambda: then_descend(optax.scale(0.5)),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(RATE),
    "scale_by_schedule": lambda: then_descend(optax.scale_by_schedule(lambda n: 1 / (1 + n))),
    "keep_params_nonnegative": lambda: optax.chain(
        optax.sgd(RATE), optax.keep_params_nonnegative()
    ),
    "stateless": lambda: then_descend(
        optax.stateless(lambda g, p: jax.tree.map(lambda g, p: g + 0.1 * p, g, p))
    ),
    "stateless_with_tree_map": lambda: then_descend(
        optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p)
    ),
    "flatten": lambda: optax.flatten(optax.adam(RATE)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(RATE), 3),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.adam(RATE), lambda step, **_: step % 2 == 0
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(RATE), lambda step, **_: step % 2 == 0
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.adam(RATE), matrices),
        optax.masked(optax.sgd(RATE), lambda p: jax.tree.map(lambda m: not m, matrices(p))),
    ),
    "freeze": lambda: optax.chain(
        optax.adam(RATE),
        optax.freeze({"w1": True, "w2": False, "odd": True, "bias": False, "stack": False}),
    ),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(RATE), freeze_mask=lambda p: jax.tree.map(lambda x: jnp.ndim(x) == 1, p)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adafactor(RATE, min_dim_size_to_factor=4), "vector": optax.adam(RATE)},
        labels,
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.lamb(RATE), "vector": optax.set_to_zero()}, labels
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(WARM, weight_decay=1e-2),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip_by_global_norm(1e-2)), ("adam", optax.adam(RATE))
    ),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(RATE)),
    "soap": soap,
    "soap, every second step": lambda: soap(every=2),
    # Combinations that people train with.
    "clip, adamw, warm-up, mask": lambda: optax.chain(
        optax.clip_by_global_norm(1e-2), optax.adamw(WARM, weight_decay=0.1, mask=matrices)
    ),
    "factored adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
    "lamb, masked decay": lambda: optax.lamb(RATE, weight_decay=0.1, mask=matrices),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), optax.adam(RATE)),
    "lookahead": lambda: fast_alone(
        optax.lookahead(optax.adam(RATE), sync_period=2, slow_step_size=0.5)
    ),
    "apply_if_finite(MultiSteps(lamb))": lambda: optax.apply_if_finite(
        optax.MultiSteps(optax.lamb(RATE), 2).gradient_transformation(), 3
    ),
}

# They ask for more than a train step has: name -> (factory, what the refusal says).
UNSUPPORTED: dict[str, tuple[Factory, tuple[str, ...]]] = {
    "lbfgs": (optax.lbfgs, ("value_fn", "your own loop")),
    "scale_by_backtracking_linesearch": (
        partial(optax.scale_by_backtracking_linesearch, 4),
        ("value_fn", "your own loop"),
    ),
    "scale_by_zoom_linesearch": (
        partial(optax.scale_by_zoom_linesearch, 4),
        ("value_fn", "your own loop"),
    ),
    "sophia": (partial(contrib.sophia, RATE), ("obj_fn", "your own loop")),
    "differentially_private_aggregate": (
        lambda: contrib.differentially_private_aggregate(1.0, 1.0, key=jax.random.key(0)),
        ("one gradient per example",),
    ),
    "monitor": (
        lambda: optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.adam(RATE)),
        ("adds to its state", "0/measurements/norm"),
    ),
}

# Parts of others, which take what an optimizer does not: they run inside those named.
NOT_OPTIMIZERS = {
    "dpsgd": "differentially_private_aggregate",
    "optimistic_adam": "optimistic_adam_v2, whose old form it is",
    "inject_stateful_hyperparams": "inject_hyperparams, whose old name it is",
    "chain": "every combination above",
    "scale_by_muon": "muon",
    "hutchinson_estimator_diag_hessian": "sophia",
    "measure_with_ema": "no update: it watches",
}

# One of each kind, in two groups, each with its level: moments factored, by dimension or by leaf;
# norms of a unit, a leaf or all; signs, products, projections; numbers of the whole tree; the loss;
# copies of the parameters; keys; wrappers that mask, label, flatten, count or choose.
KINDS = [
    (
        (
            "sm3", "factored adafactor", "galore", "polyak_sgd", "sam", "schedule_free_adamw",
            "add_noise", "multi_transform", "apply_if_finite(MultiSteps(lamb))",
        ),
        "os",
    ),
    (
        (
            "lion", "clip, adamw, warm-up, mask", "novograd", "adaptive_grad_clip", "muon",
            "prodigy", "momo", "dog", "lookahead", "mechanize", "flatten", "freeze", "centralize",
        ),
        "p_g_os",
    ),
]  # fmt: skip
