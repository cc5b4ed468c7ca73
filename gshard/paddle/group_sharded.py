"""`group_sharded_parallel`: Paddle's call, translated to `shard_train_state`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gshard._util.arguments import named_arguments
from gshard._util.errors import GShardError, did_you_mean, warn
from gshard._util.pytree import flatten
from gshard._util.validation import check_integer, flag, shown
from gshard.paddle.grad_scaler import Scaler
from gshard.sharding.group import data_group
from gshard.sharding.level import Level, LevelName, parse_level
from gshard.sharding.rules import LeafInfo
from gshard.train.comm.buckets import BUCKET_SIZE, END_BUCKET_SIZE
from gshard.train.shard_train_state import ShardingOptions, shard_and_advise
from gshard.train_state.nnx import new_optimizer
from gshard.train_state.nonfinite import GradScaler
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.arguments import as_module, first_process, mesh_of
from gshard.wrapped.wrapped_model import Wrapped, wrapped
from gshard.wrapped.wrapped_optimizer import WrappedOptimizer

SEGMENT_SIZE = 2**20


class GroupSharded(Wrapped):
    """A model whose train state is sharded; also an instance of the model's own class."""

    __slots__ = ()


_INSTEAD = {
    "level": 'Pass "os", "os_g" or "p_g_os".',
    "sync_params_buffers": "Leave it out: all processes take the values of the first one.",
    "sharding_degree": "Pass group=gshard.paddle.new_group(devices), with that many devices.",
}


@named_arguments(_INSTEAD)
def group_sharded_parallel(
    model: Any,
    optimizer: Any,
    level: LevelName,
    scaler: Any = None,
    group: Any = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = BUCKET_SIZE,
    segment_size: int = SEGMENT_SIZE,
    sync_comm: bool = False,
    dp_group: Any = None,
    exclude_layer: Any = None,
    *,
    wire: Any = None,
) -> tuple[Any, Any, Any]:
    """Shards a model and its optimizer over devices.

    The arguments are copied and not changed. The result is trained with `model.backward(loss_fn,
    batch)`, `optimizer.step()` and `optimizer.clear_grad()`, or in your own `nnx.jit` loop.

    Args:
      model: an NNX module, or `(linen_module, variables)`.
      optimizer: `nnx.Optimizer(model, tx, wrt=...)`, or an optax transformation, which then trains
        every `nnx.Param`.
      level: `"os"` shards the optimizer state, `"os_g"` gradients too, `"p_g_os"` parameters too.
        `"dp"` shards nothing, like `DataParallel`.
      scaler: a `gshard.paddle.GradScaler` for float16, or the scaler that another call returned
        for a model on the same devices.
      group: the devices to shard over, from `gshard.paddle.new_group`, or a mesh. Default: all.
      offload: keep the optimizer state, and sharded parameters, in host memory between steps.
      sync_buffers: buffers that the loss changes take the value of the first device, not the mean;
        within `gshard.pytorch.Join` also where that device has no data left.
      buffer_max_size: size of a gradient bucket in elements; 0 turns buckets off.
      segment_size: in elements. At `"p_g_os"` larger parameters are sharded; the other levels use
        the default threshold of `gshard.shard_train_state`.
      sync_comm: at `"p_g_os"`, do not prefetch: all-gather a parameter only when it is needed.
      dp_group: devices, one from each replica of the sharded state; orthogonal to `group`.
      exclude_layer: at `"p_g_os"`, layers that stay replicated, with their sublayers: class names,
        `id(layer)`s, or regular expressions for paths.
      wire: gshard's own: `"int8"` or a float8 dtype in which gradients are reduce-scattered, and at
        `"p_g_os"` parameters all-gathered, as in `gshard.shard_train_state`.

    Returns:
      The wrapped model, the wrapped optimizer, and the wrapped scaler (None without `scaler`).
      The model is one of its own class, with `backward`, `grads`, `no_sync`, `clear_gradients`,
      `parameters`, `state_dict`, `set_state_dict` and `plan`. The optimizer has `step`,
      `clear_grad`, `get_lr`, `set_lr`, `state_dict` and `set_state_dict`; the scaler has `scale`,
      `unscale_`, `step`, `update`, `minimize`, `loss_scaling`, `state_dict` and `load_state_dict`.

    Raises:
      GShardError: an argument is invalid; nothing is changed.

    Example:
      >>> from flax import nnx
      >>> net = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> model, optimizer, _ = gshard.paddle.group_sharded_parallel(
      ...     net, tx, "p_g_os", segment_size=0
      ... )
      >>> loss = model.backward(lambda model, batch: jnp.mean(model(batch["x"]) ** 2), batch)
      >>> optimizer.step()
      >>> optimizer.clear_grad()
    """
    call = "group_sharded_parallel"
    module = as_module(model, call, GroupSharded)
    chosen = parse_level(level)
    if scaler is not None and not isinstance(scaler, (GradScaler, Scaler)):
        raise GShardError(f"scaler={shown(scaler)} is not a gshard.paddle.GradScaler.")
    flag("sync_buffers", sync_buffers)
    flag("sync_comm", sync_comm)
    segment_size = check_integer("segment_size", segment_size, 0, " of elements")
    meaning = " of elements (0: no buckets)"
    buffer_max_size = check_integer("buffer_max_size", buffer_max_size, 0, meaning)
    pair = (module, _as_optimizer(optimizer, module))
    rules = None if exclude_layer is None else excluding(exclude_layer, module)
    mesh, replica_axes = mesh_of(group, dp_group)
    devices = [device.id for device in mesh.devices.flat]
    if isinstance(scaler, Scaler) and scaler.devices != devices:
        raise GShardError(
            f"scaler= belongs to a model on the devices {scaler.devices}, where its scale is, and "
            f"this model is on {devices}. Pass a new gshard.paddle.GradScaler, or wrap both models "
            "on the same devices."
        )
    alone = data_group(mesh, None, replica_axes).size == 1
    shards = chosen.shards_params
    at_p_g_os = [
        ("segment_size", segment_size != SEGMENT_SIZE),
        ("sync_comm", sync_comm),
        ("exclude_layer", rules is not None),
    ]
    useless = [f"{name} at level {chosen.name!r}" for name, yes in at_p_g_os if yes and not shards]
    if shards and alone and sync_comm:
        useless.append("sync_comm on one device")
    buffers = nnx.state(module, nnx.Not(nnx.Any(pair[1].wrt, nnx.RngState)))
    if sync_buffers and not jax.tree.leaves(buffers):
        useless.append("sync_buffers for a model without buffers")
    if useless:
        warn(f"{call}: these have no effect: {'; '.join(useless)}. Leave them out.")
    options = ShardingOptions(
        offload=offload, replica_axes=replica_axes, broadcast_from=first_process(mesh), wire=wire
    )
    if shards:
        options |= ShardingOptions(min_shard_size=segment_size, rules=rules)
    (model, optimizer), plan = shard_and_advise(pair, mesh, chosen, options, _advice(chosen))
    if plan.rounds_at_random:
        raise GShardError(
            f"{call}: wire={wire!r} rounds gradients at random, by the number of the step, "
            "and backward() does not know which step it is part of. Use wire='int8'."
        )
    params = jax.tree.leaves(nnx.state(module, nnx.Param))
    if scaler is None and any(jnp.result_type(x) == jnp.float16 for x in params):
        warn(
            f"{call}: parameters are float16 and scaler is None: small gradients become 0. Pass "
            "scaler=gshard.paddle.GradScaler()."
        )
    keep = Accumulation(
        plan,
        bucket_size=buffer_max_size,
        end_bucket_size=END_BUCKET_SIZE,
        sync_buffers=sync_buffers,
        prefetch=not (sync_comm and shards and not alone),
    )
    scaler = Scaler(scaler, devices) if isinstance(scaler, GradScaler) else scaler
    return wrapped(model, GroupSharded, keep), wrapped(optimizer, WrappedOptimizer, keep), scaler


def _advice(level: Level) -> str:
    """What this call offers to shard small parameters, or their optimizer state, too."""
    if level.shards_params:
        return "Lower segment_size= of group_sharded_parallel."
    return (
        f"group_sharded_parallel ignores segment_size= at level {level.name!r}. Use level 'p_g_os' "
        f"with a lower segment_size=, or gshard.shard_train_state with one at {level.name!r}."
    )


def _as_optimizer(optimizer: Any, model: nnx.Module) -> nnx.Optimizer[Any]:
    if isinstance(optimizer, WrappedOptimizer):
        raise GShardError("this optimizer is wrapped already. Pass the one that it was made from.")
    if isinstance(optimizer, optax.GradientTransformation):
        return new_optimizer(model, optimizer, nnx.Param)
    if not isinstance(optimizer, nnx.Optimizer):
        raise GShardError(
            f"optimizer={shown(optimizer)} is not an optimizer. Pass an optax transformation such "
            "as optax.adamw(1e-3), or nnx.Optimizer(model, tx, wrt=nnx.Param), which also takes "
            "optax.MultiSteps and the like."
        )
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    wanted = jax.tree.leaves(jax.eval_shape(optimizer.tx.init, params))
    have = jax.tree.leaves(nnx.as_pure(optimizer.opt_state))
    if [x.shape for x in wanted] != [x.shape for x in have]:
        raise GShardError(
            "the optimizer was made for another model: its state has other shapes. Make one for "
            "this model: nnx.Optimizer(model, tx, wrt=nnx.Param)."
        )
    return optimizer


def excluding(entries: Any, model: nnx.Module) -> Callable[[LeafInfo], str | None]:
    """Returns a rule that keeps the parameters of these layers and their sublayers replicated."""
    if not isinstance(entries, (list, tuple)):
        raise GShardError(
            f"exclude_layer={shown(entries)} must be a list of class names, ids of layers or "
            "patterns of paths, such as ['GroupNorm', id(model.head), 'decoder.norm']."
        )
    layers = [("/".join(map(str, path)), layer) for path, layer in nnx.iter_modules(model)]
    paths = flatten(nnx.as_pure(nnx.state(model)))[0]
    patterns: list[re.Pattern[str]] = []
    for entry in entries:
        found = _patterns(entry, layers, paths)
        if not found:
            classes = {type(layer).__name__ for _, layer in layers}
            hint = did_you_mean(entry, classes | {path for path, _ in layers if path})
            raise GShardError(
                f"exclude_layer: {shown(entry)} is not a layer of the model.{hint} It has the "
                f"classes {sorted(classes)}; ids are those of the model's own layers, "
                "id(model.head), and patterns are searched in paths such as "
                f"{paths[0] if paths else ''!r}."
            )
        patterns += found

    def excluded(leaf: LeafInfo) -> str | None:
        return "replicate" if any(p.search(leaf.path) for p in patterns) else None

    return excluded


def _patterns(entry: Any, layers: list[tuple[str, Any]], paths: list[str]) -> list[re.Pattern[str]]:
    """Returns what matches paths inside the layers that an entry names, or the entry itself."""
    # Paddle's parameter names have dots.
    texts = (entry, entry.replace(".", "/")) if isinstance(entry, str) else ()
    found = [
        re.compile(f"^{re.escape(path)}/" if path else "")
        for path, layer in layers
        if entry in (id(layer), type(layer).__name__) or path and path in texts
    ]
    for text in () if found else texts:
        with contextlib.suppress(re.error):
            pattern = re.compile(text)
            if any(map(pattern.search, paths)):
                return [pattern]
    return found
