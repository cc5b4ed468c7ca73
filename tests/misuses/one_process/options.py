"""Options of `shard_train_state`, of a step and of a precision."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from tests.misuses.small import ADAM, BATCH, kept, linen, loss_fn, params, shard, train
from tests.misuses.table import Row, assert_words, raw, refused, right, warned


def of_a_step(*words: str, **options) -> Row:
    """Refused by `make_train_step` and, where it has the option, by `value_and_grad`."""

    def misuse(_):
        plan = kept()[1]
        if options.keys() <= inspect.signature(gshard.value_and_grad).parameters.keys():
            with pytest.raises(gshard.GShardError) as caught:
                gshard.value_and_grad(loss_fn, plan, **options)
            assert_words(words, str(caught.value))
        gshard.make_train_step(loss_fn, plan, **options)

    return refused(misuse, *words)


def of_shard(*words: str, **options) -> Row:
    return refused(lambda _: shard(**options), *words)


def same_levels(given, name: str) -> Row:
    return right(lambda _: (int(shard(level=given)[1].level.name == name), 1))


ROWS = {
    "level='p_g'": of_shard("level='p_g'", "Did you mean 'p_g_os'?", level="p_g"),
    "level='os-g'": of_shard("level='os-g'", "Did you mean 'os_g'?", level="os-g"),
    "level='zero4'": of_shard("level='zero4'", "'os'", "'os_g'", "'p_g_os'", level="zero4"),
    "level=4": of_shard("level=4", "'os'", "'os_g'", "'p_g_os'", "'zero1'", level=4),
    "level=None": of_shard("level=None", "'os_g'", level=None),
    "level=True": of_shard("level=True", "'os_g'", level=True),
    "level=['os']": of_shard("level=['os']", "'os_g'", level=["os"]),
    "level='FULL_SHARD', as in PyTorch's FSDP": of_shard(
        "level='FULL_SHARD'", "'p_g_os'", level="FULL_SHARD"
    ),
    "level=3, as in DeepSpeed": same_levels(3, "p_g_os"),
    "level='ZeRO-3'": same_levels("ZeRO-3", "p_g_os"),
    "level='automatic'": of_shard("level='automatic'", "'os_g'", level="automatic"),
    "reshard_after_forward= for the state": of_shard(
        *("no argument reshard_after_forward=", "an argument of make_train_step"),
        reshard_after_forward=2,
    ),
    "sequence= for the state": of_shard("an argument of make_mesh", sequence=2),
    "precision= for a step": refused(
        lambda _: gshard.make_train_step(loss_fn, kept()[1], precision="bfloat16"),
        "an argument of shard_train_state",
    ),
    "state_dtype= for a step": refused(
        lambda _: gshard.make_train_step(loss_fn, kept()[1], state_dtype="int8"),
        "an argument of Precision",
    ),
    "keep= without an expert axis": warned(
        lambda _: shard(keep={"w": ("expert", 1)}), "changes nothing", "make_mesh(expert=4)"
    ),
    "keep={}": right(lambda _: (shard(keep={})[1].group.kept == "", True)),
    "level and mesh are swapped": refused(
        lambda _: gshard.shard_train_state(linen(), "os", gshard.make_mesh()),
        "level=a Mesh is unknown",
    ),
    "an unknown shard axis": of_shard(
        *("shard_axes", "'fsdp'", "shard=8", "make_mesh({'fsdp': 8})"), shard_axes="fsdp"
    ),
    "one of two axes is unknown": of_shard(
        *("shard_axes", "'shrad'", "shard=8", "Did you mean 'shard'?"),
        shard_axes=("shard", "shrad"),
    ),
    "an unknown replica axis": of_shard("replica_axes", "'dcn'", "shard=8", replica_axes="dcn"),
    "an axis shards and replicates": of_shard(
        *("shard_axes", "replica_axes", "'shard'"), shard_axes="shard", replica_axes="shard"
    ),
    "shard_axes=0": of_shard("shard_axes=0", shard_axes=0),
    "min_shard_size=-1": of_shard("min_shard_size=-1", "0 or more", min_shard_size=-1),
    "min_shard_size='64'": of_shard("min_shard_size='64'", min_shard_size="64"),
    "min_shard_size=1e6": of_shard("min_shard_size=1000000.0", min_shard_size=1e6),
    "indivisible='drop'": of_shard(
        "indivisible='drop'", "'pad'", "'replicate'", indivisible="drop"
    ),
    "offload='cpu'": of_shard("offload='cpu'", "True or False", offload="cpu"),
    "rules=3": of_shard("rules=3", "mapping", rules=3),
    "a rule without a pattern": of_shard("None", "regular expression", rules={None: 0}),
    "a rule with a pattern that is none": of_shard("'('", "regular expression", rules={"(": 0}),
    "a rule with a dimension that is not there": of_shard(
        "'w'", "2", "(16, 8)", "0 to 1", rules={"w": 2}
    ),
    "a rule with a PartitionSpec, as of GSPMD": of_shard(
        *("rule 'w'", "a dimension from 0 to 1"), rules={"w": jax.P("shard")}
    ),
    "a rule that matches nothing": warned(
        lambda _: shard(rules={"wieght": 0}), "rules", "'wieght'"
    ),
    "scan_axes=0": of_shard("scan_axes=0", "{'^layers/': 0}", scan_axes=0),
    "scan_axes with a pattern that is none": of_shard(
        "'('", "regular expression", scan_axes={"(": 0}
    ),
    "scan_axes with a dimension that is not there": of_shard(
        "scan_axes['w']=5", "(16, 8)", scan_axes={"w": 5}
    ),
    "frozen= matches all": of_shard("frozen", "no parameter to train", frozen="."),
    "frozen= matches nothing": warned(lambda _: shard(frozen="^base/"), "frozen", "^base/"),
    "frozen= is a function of a path": of_shard(
        *("'LeafInfo' object has no attribute", "leaf.path"),
        frozen=lambda path: path.startswith("b"),
    ),
    "frozen= looks for a text in its argument": of_shard(
        *("'LeafInfo' is not", "leaf.path"), frozen=lambda path: "b" in path
    ),
    "frozen= is a function of path and array": of_shard(
        *("frozen=", "one gshard.LeafInfo"), frozen=lambda path, x: "b" in path
    ),
    "rules= is a function of path and array": of_shard(
        *("rules=", "one gshard.LeafInfo"), rules=lambda path, x: 0
    ),
    "frozen=3": of_shard("frozen=3", frozen=3),
    "broadcast_from=0 in one process": right(
        lambda _: (gshard.full_params(shard(broadcast_from=0)[0]), params())
    ),
    "broadcast_from=1 in one process": of_shard("broadcast_from=1", broadcast_from=1),
    "broadcast_from=True": of_shard("broadcast_from=True", broadcast_from=True),
    "precision='float33'": of_shard("'float33'", precision="float33"),
    "precision=16, as in Lightning": of_shard("precision=16", precision=16),
    "an integer dtype as precision": refused(
        lambda _: gshard.Precision(compute_dtype="int8"), "int8"
    ),
    "a dtype that is none": refused(
        lambda _: gshard.Precision(param_dtype="bfloat61"), "'bfloat61'", "param_dtype", "bfloat16"
    ),
    "exceptions of a precision that are no mapping": refused(
        lambda _: gshard.Precision(exceptions="norm"), "exceptions='norm'"
    ),
    "micro_batches=0": of_a_step("micro_batches=0", "1 or more", micro_batches=0),
    "micro_batches=-1": of_a_step("micro_batches=-1", "1 or more", micro_batches=-1),
    "micro_batches=1.5": of_a_step("micro_batches=1.5", "1 or more", micro_batches=1.5),
    "micro_batches='2'": of_a_step("micro_batches='2'", "1 or more", micro_batches="2"),
    "micro_batches=True": of_a_step("micro_batches=True", "1 or more", micro_batches=True),
    "mutable=3": of_a_step("mutable=3", mutable=3),
    "accumulate='never'": of_a_step(
        "accumulate='never'", "'local'", "'scatter'", "'sync'", accumulate="never"
    ),
    "bucket_size=-1": of_a_step("bucket_size=-1", "0 or more", bucket_size=-1),
    "bucket_size=0.5": of_a_step("bucket_size=0.5", bucket_size=0.5),
    "has_aux=1": of_a_step("has_aux=1", "True or False", has_aux=1),
    "donate='yes'": of_a_step("donate='yes'", "True or False", donate="yes"),
    "donate=None": of_a_step("donate=None", "True or False", donate=None),
    "loss_semantics='mean'": of_a_step("loss_semantics='mean'", "'global'", loss_semantics="mean"),
    "max_bad_steps=0": of_a_step("max_bad_steps=0", "1 or more", max_bad_steps=0),
    "check_replicas=True": of_a_step("check_replicas=True", check_replicas=True),
    "gather_limit='1GB'": of_a_step("gather_limit='1GB'", "bytes", gather_limit="1GB"),
    "a scaler that is a number": of_a_step("scaler=65536.0", "GradScaler()", scaler=65536.0),
    "the class of a scaler": of_a_step("GradScaler()", scaler=gshard.GradScaler),
    "a seed as rng=": of_a_step("rng=0", "jax.random.key(0)", rng=0),
    "a NumPy generator as rng=": of_a_step("rng=", "jax.random.key(0)", rng="generator"),
    "several keys as rng=": of_a_step("rng=", rng=jnp.zeros((4, 2), jnp.uint32)),
    "rng= that the loss does not take": refused(
        lambda _: train(rng=jax.random.key(0)), "rng=", "does not take it"
    ),
    "post_update= that is no function": of_a_step("post_update=3", post_update=3),
    "post_update= that returns nothing": refused(
        lambda _: train(post_update=lambda state: None), "post_update"
    ),
    "post_update= that returns parameters": refused(
        lambda _: train(post_update=lambda state: state.params), "post_update"
    ),
    "post_update= that changes shapes": refused(
        lambda _: train(
            post_update=lambda s: s.replace(params=jax.tree.map(lambda x: x[:1], s.params))
        ),
        "post_update",
    ),
    "reshard_after_forward=3 on 8 devices": refused(
        lambda _: gshard.make_train_step(loss_fn, kept("p_g_os")[1], reshard_after_forward=3),
        "reshard_after_forward=3",
    ),
    "prefetch=False where nothing is sharded": warned(
        lambda _: gshard.make_train_step(loss_fn, kept()[1], prefetch=False), "prefetch=False"
    ),
    "an option of PyTorch's": raw(
        lambda _: gshard.make_train_step(loss_fn, kept()[1], find_unused_parameters=True),
        *(TypeError, "find_unused_parameters"),
    ),
    "sync_buffers=True with a global loss": warned(
        lambda _: gshard.make_train_step(loss_fn, kept()[1], sync_buffers=True), "sync_buffers"
    ),
    "sync_buffers=True with a loss that returns no new state": warned(
        lambda _: train(loss_semantics="per_device", sync_buffers=True), "sync_buffers", "mutable="
    ),
    "float16 without a scaler": warned(
        lambda _: gshard.make_train_step(loss_fn, shard(precision="float16")[1]),
        *("small gradients become 0", "gshard.GradScaler()"),
    ),
    "float16 with a scaler that is off": right(
        lambda _: (
            gshard.make_train_step(
                loss_fn, shard(precision="float16")[1], scaler=gshard.GradScaler(enable=False)
            ).options.scaler.enable,
            False,
        )
    ),
    "init_loss_scaling=0": refused(
        lambda _: gshard.GradScaler(init_loss_scaling=0), "init_loss_scaling=0"
    ),
    "init_loss_scaling= beyond float32": refused(
        lambda _: gshard.GradScaler(init_loss_scaling=1e39), "init_loss_scaling=1e+39", "float32"
    ),
    "init_loss_scaling= that float32 takes for 0": refused(
        lambda _: gshard.GradScaler(init_loss_scaling=1e-50), "init_loss_scaling=1e-50"
    ),
    "a count of a scaler's state that is a text": refused(
        lambda _: gshard.GradScaler.from_state_dict(
            gshard.GradScaler().state_dict(gshard.ScalerState()) | {"incr_count": "3"}
        ),
        *("incr_count='3'", "0 or more"),
    ),
    "init_loss_scaling=nan": refused(
        lambda _: gshard.GradScaler(init_loss_scaling=float("nan")), "init_loss_scaling=nan"
    ),
    "incr_ratio=0.5": refused(lambda _: gshard.GradScaler(incr_ratio=0.5), "incr_ratio=0.5"),
    "decr_ratio= that float32 takes for 1": refused(
        lambda _: gshard.GradScaler(decr_ratio=1 - 1e-9), "decr_ratio=0.999999999"
    ),
    "decr_ratio=2": refused(lambda _: gshard.GradScaler(decr_ratio=2.0), "decr_ratio=2.0"),
    "incr_every_n_steps=0": refused(
        lambda _: gshard.GradScaler(incr_every_n_steps=0), "incr_every_n_steps=0"
    ),
    "a scaler for float32": right(
        lambda _: (
            train(scaler=gshard.GradScaler())[0],
            train()[0],
        )
    ),
    "another optimizer's keyword arguments": refused(
        lambda _: train(state=linen(optax.lbfgs()), loss=loss_fn, batch=BATCH),
        *("optimizer needs more", "state.tx.update("),
    ),
    "the optimizer returns a number for every leaf": refused(
        lambda _: train(state=linen(optax.stateless(lambda g, _: jax.tree.map(lambda x: 0.0, g)))),
        *("updates that the optimizer returns", "has ()", "for every leaf"),
    ),
    "the optimizer returns None for every leaf": refused(
        lambda _: train(state=linen(optax.stateless(lambda g, _: jax.tree.map(lambda x: None, g)))),
        *("updates that the optimizer returns", "missing"),
    ),
    "the optimizer returns other shapes": refused(
        lambda _: train(
            state=linen(optax.stateless(lambda g, _: jax.tree.map(lambda x: x.ravel()[:1], g)))
        ),
        *("updates that the optimizer returns", "not shaped as planned"),
    ),
    "learning rate and parameters are swapped": refused(
        lambda _: shard((ADAM, 1e-3)), "(params, optax transformation)"
    ),
}
