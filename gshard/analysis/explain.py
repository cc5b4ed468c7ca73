"""`explain`: what holds the memory of a train state, and why it lies as it does."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from gshard._util.errors import GShardError, GShardWarning
from gshard._util.pytree import flatten, same_leaves
from gshard._util.validation import shown
from gshard.analysis.explain_report import Beside, Copy, Explanation, Held, Measured
from gshard.analysis.forecast import of_level
from gshard.analysis.setup import Choices
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import HOST, Layout
from gshard.sharding.level import LEVELS
from gshard.sharding.plan import Plan, check_state, describe_layout
from gshard.sharding.rules import setting_of
from gshard.sharding.validate import refuse_donated
from gshard.train_state import OVERWRITTEN

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan

_MICRO_BATCHES = (1, 2, 4, 8)  # for which the table of what is sent is made


def explain(state: Any, plan: Plan | None = None, *, micro_batches: int = 1) -> Explanation:
    """Says what holds the memory of a train state, why it lies so, and what would change it.

    Nothing is moved or compiled. With several processes each one measures its own devices.

    Args:
      state: of `shard_train_state` or of a step, concrete or abstract; for NNX the
        `(model, optimizer)` pair, also one that Paddle's face wrapped.
      plan: of the state; by default the one that it carries.
      micro_batches: of one step, for what the levels take and send.

    Raises:
      GShardError: `shard_train_state` did not make this state, or a step has taken over its memory.
    """
    if plan is None:
        plan = plan_of(state, "explain")
    if not isinstance(plan, Plan):
        raise GShardError(
            f"explain(state, plan): plan is {shown(plan)}. Pass the plan that "
            "gshard.shard_train_state returned, or leave it out; an NNX model and its optimizer go "
            "in as one pair, explain((model, optimizer))."
        )
    check_state(state, plan, "explain(state, plan)")
    choices = Choices(micro_batches=micro_batches)
    parts = plan.kind.split(state)
    paths, leaves, _ = flatten(plan.layouts)
    same_leaves(parts, paths, "the state is")
    arrays = jax.tree.leaves(parts)
    refuse_donated(arrays)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)
    held = [_held(path, x, plan) for path, x in zip(paths, leaves, strict=True)]
    plans, cannot = _other_levels(plan)
    return Explanation(
        plan.level.name,
        plan.group.devices,
        plan.group.size,
        tuple(sorted(held, key=lambda x: -x.bytes)),
        plan.bytes_per_device,
        None if abstract else measure(parts, plan),
        {name: of_level(other, choices) for name, other in plans.items()},
        cannot,
        {k: _wire(plan, k) for k in sorted({*_MICRO_BATCHES, micro_batches})},
        micro_batches,
    )


def _held(path: str, layout: Layout, plan: Plan) -> Held:
    part, local = path.split("/")[0], layout.local()
    size = layout.bytes_per_device
    spare = 0 if layout.dim is not None or local.size < 2 else size - size // layout.group.size
    reason, change, marked = _why(path, layout, plan)
    return Held(
        path,
        part,
        layout.shape,
        str(layout.dtype),
        describe_layout(layout),
        size,
        layout.on_host,
        (local.stored_size - local.size) * layout.dtype.itemsize // layout.group.size,
        spare,
        reason,
        change,
        marked,
    )


def _why(path: str, layout: Layout, plan: Plan) -> tuple[str, str, bool]:
    """Why a leaf is whole or divided, what changes that, and whether it is to be marked."""
    part = path.split("/")[0]
    if layout.dim is not None:
        return layout.reason, "", False
    if layout.local().size < 2:
        return "a single number", "", False
    if path.startswith(f"extras/{OVERWRITTEN}/"):
        return "what the loss returns for it takes its place", "", False
    state = part == "opt_state"
    if not (plan.level.shards_opt_state if state else plan.level.shards_params):
        by = (x.name for x in LEVELS.values() if (x.shards_opt_state if state else x.shards_params))
        return f"level {plan.level.name} keeps it whole on every device", f"level {next(by)}", False
    return layout.reason, setting_of(layout.reason), bool(plan.group.size > 1)


def _other_levels(plan: Plan) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plans of the same state at every level, and why there is none at some."""
    plans: dict[str, Plan] = {}
    cannot: dict[str, str] = {}
    with warnings.catch_warnings():  # they were said when the state was divided
        warnings.simplefilter("ignore", GShardWarning)
        for name, level in LEVELS.items():
            try:
                plans[name] = plan if level is plan.level else plan.at_level(level)
            except GShardError as error:  # such as a rule that divides layers
                cannot[name] = str(error)
    return plans, cannot


def _wire(plan: Plan, micro_batches: int) -> dict[str, int]:
    found = of_level(plan, Choices(micro_batches=micro_batches))
    return {"level": found.wire, **found.wire_by_flavour}


Shape = tuple[tuple[int, ...], str]  # of an array, with its dtype


def measure(state: Any, plan: Plan) -> Measured:
    """Measures a state that has arrays, and what else is alive on its devices' platform.

    Args:
      state: the parts of it (`Parts`).
      plan: over a concrete mesh.
    """
    if not isinstance(plan.mesh, Mesh):
        raise GShardError(
            "explain(state, plan): the state has arrays, and the plan was made without devices. "
            "Leave plan out: the state knows its own."
        )
    devices = list(plan.mesh.local_devices)
    alive = jax.live_arrays(
        plan.mesh.devices.flat[0].platform
    )  # before any shard of one is looked at
    found = {str(d): dict.fromkeys(plan.bytes_per_device, 0) for d in devices}
    paths, leaves, _ = flatten(state)
    own: set[Any] = set()
    differs: list[str] = []
    for path, x, layout in zip(paths, leaves, jax.tree.leaves(plan.layouts), strict=True):
        part, held = path.split("/")[0], Counter[str]()
        for device, key, size, on_host in _buffers(x):
            own.add(key)
            held[device] += size
            if part in found.get(device, {}):  # the count of steps is in no part
                found[device]["host" if on_host else part] += size
            if on_host != layout.on_host:
                differs.append(f"{path}: on the {'host' if on_host else 'device'} of {device}")
        differs += _differences(path, x, held, layout, list(found))
    strange = [(x, mine) for x in alive if (mine := [b for b in _buffers(x) if b[1] not in own])]
    # An array over several devices before views of its parts, which are the same memory.
    strange.sort(key=lambda pair: -len(pair[1]))
    others: list[tuple[jax.Array, list[Any]]] = []
    for x, buffers in strange:
        mine = [b for b in buffers if b[1] not in own]
        own.update(b[1] for b in mine)
        if mine:
            others.append((x, mine))
    by_device = Counter[str]()
    for _, buffers in others:
        for device, _, size, _ in buffers:
            by_device[device] += size
    stats = {str(d): d.memory_stats() for d in devices}
    return Measured(
        found,
        tuple(differs),
        _grouped(others),
        dict(by_device),
        tuple(_copies(others, plan)),
        {device: dict(x) for device, x in stats.items() if x},
    )


def _buffers(x: Any) -> list[tuple[str, Any, int, bool]]:
    """(device, what identifies the memory, bytes, whether the host's) of every part that is here.

    Views of one part are arrays of their own that share its memory.
    """
    if not isinstance(x, jax.Array) or x.is_deleted():
        return []
    found = []
    for shard in x.addressable_shards:
        size = shard.data.nbytes
        if size:
            on_host = shard.data.sharding.memory_kind == HOST
            found.append((str(shard.device), _identity(shard), size, on_host))
    return found


def _identity(shard: Any) -> Any:
    try:
        return shard.device, shard.data.unsafe_buffer_pointer()
    except (NotImplementedError, RuntimeError):  # a backend that tells no addresses
        return shard.device, id(shard.data)


def _differences(
    path: str, x: Any, held: Counter[str], layout: Layout, devices: Sequence[str]
) -> Iterator[str]:
    if not isinstance(x, jax.Array):
        yield f"{path}: not on a device, a {type(x).__name__}"
        return
    for device in dict.fromkeys([*devices, *held]):
        wanted = layout.bytes_per_device if device in devices else 0
        if held[device] != wanted:
            yield (
                f"{path}: {held[device]:,} B on {device}, by the plan {wanted:,} B (it has shape "
                f"{x.shape}, planned {layout.stored_shape})"
            )
            return


def _grouped(others: Iterable[tuple[jax.Array, list[Any]]]) -> tuple[Beside, ...]:
    groups: dict[tuple[tuple[int, ...], str, str], list[list[Any]]] = {}
    for x, buffers in others:
        groups.setdefault((x.shape, str(x.dtype), _lies(x, buffers)), []).append(buffers)
    found = [
        Beside(shape, dtype, lies, len(arrays), _fullest(arrays))
        for (shape, dtype, lies), arrays in groups.items()
    ]
    return tuple(sorted(found, key=lambda row: -row.bytes))


def _lies(x: jax.Array, buffers: list[Any]) -> str:
    devices = {device for device, *_ in buffers}
    host = ", on host" if buffers[0][3] else ""
    if len(devices) == 1:
        return f"on {buffers[0][0]}{host}"
    how = "whole on" if x.is_fully_replicated else "divided over"
    return f"{how} {len(devices)} devices{host}"


def _fullest(arrays: Iterable[list[Any]]) -> int:
    """Bytes on the device that holds most."""
    by_device = Counter[str]()
    for buffers in arrays:
        for device, _, size, _ in buffers:
            by_device[device] += size
    return max(by_device.values(), default=0)


def _copies(others: Sequence[tuple[jax.Array, list[Any]]], plan: Plan) -> Iterator[Copy]:
    """Parts of a state among the arrays of each place, as often as they are there completely."""
    places: dict[str, dict[Shape, list[tuple[jax.Array, list[Any]]]]] = {}
    for x, buffers in others:
        devices = {device for device, *_ in buffers}
        place = _lies(x, buffers) if len(devices) == 1 else f"on {len(devices)} devices"
        key = (x.shape, str(x.dtype))
        places.setdefault(place, {}).setdefault(key, []).append((x, buffers))
    wanted = _wanted(plan)
    for place, by_shape in places.items():
        left = list(wanted)
        while left:  # a whole state before a second copy of one of its parts
            name, shapes = left.pop(0)
            if any(len(by_shape.get(shape, ())) < n for shape, n in shapes.items()):
                continue
            left.append((name, shapes))
            taken = [by_shape[shape].pop() for shape, n in shapes.items() for _ in range(n)]
            largest = sorted(shapes, key=lambda s: -math.prod(s[0]))
            yield Copy(
                name,
                place,
                len(taken),
                tuple(f"{shapes[s]} x {s[1]}{list(s[0])}" for s in largest[:3]),
                _fullest(buffers for _, buffers in taken),
            )


def _wanted(plan: Plan) -> list[tuple[str, Counter[Shape]]]:
    """Shapes of each part of a state, as the user made it and as stored; without single numbers."""
    plain, stored = plan.kind.split(plan.template), plan.layouts
    found: list[tuple[str, Counter[Shape]]] = []
    for attribute, name in (
        ("params", "parameters"),
        ("opt_state", "optimizer state"),
        ("non_trainable", "non_trainable"),
    ):
        logical = [
            (tuple(x.shape), str(x.dtype)) for x in jax.tree.leaves(getattr(plain, attribute))
        ]
        places = jax.tree.leaves(getattr(stored, attribute))
        divided = [(x.stored_shape, str(x.dtype)) for x in places]
        for shapes in (logical, divided):
            counted = Counter(shape for shape in shapes if math.prod(shape[0]) > 1)
            if counted and (name, counted) not in found:
                found.append((name, counted))
    return found
