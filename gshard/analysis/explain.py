"""`explain` says what takes the memory of a train state, and why it has its layout."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from gshard._util.errors import GShardError, GShardWarning
from gshard._util.pytree import flatten, same_leaves
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import shown
from gshard.analysis.explain_report import Explanation, Measured, OtherArrays, StateArray, StateCopy
from gshard.analysis.forecast import level_forecast
from gshard.analysis.setup import Choices
from gshard.sharding.budget import budget
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import HOST, Layout
from gshard.sharding.level import LEVELS
from gshard.sharding.plan import Plan, check_state, describe_layout
from gshard.sharding.rules import setting_of
from gshard.sharding.validate import refuse_donated, refuse_traced
from gshard.train_state import OVERWRITTEN

_MICRO_BATCHES = (1, 2, 4, 8)  # for the table of bytes sent
_WAYS: dict[str, dict[str, Any]] = {  # to accumulate gradients, and to keep gathered parameters
    **{name: {"accumulate": name} for name in ("level", "local", "scatter", "sync")},
    "kept": {"reshard_after_forward": False},
}
_NAMES = {"params": "parameters", "opt_state": "optimizer state", "non_trainable": "non_trainable"}


@short_traceback
def explain(state: Any, plan: Plan | None = None, *, micro_batches: int = 1) -> Explanation:
    """Explains what takes the memory of a train state, why, and which setting would change it.

    Nothing is moved or compiled. With several processes each one measures its own devices.

    Args:
      state: a train state that `shard_train_state` or a train step returned, concrete or abstract.
        For NNX the `(model, optimizer)` pair, also as `gshard.paddle` wraps it.
      plan: the plan of this state; by default the one that the state carries.
      micro_batches: number of micro-batches in one step, for the comparison of the levels.

    Returns:
      The explanation. Print it, or read its fields; all amounts are bytes of one device.

    Raises:
      GShardError: `shard_train_state` did not make this state.
      DonatedStateError: a train step has taken over the memory of this state.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "p_g_os", min_shard_size=0
      ... )
      >>> found = gshard.explain(state)
      >>> found.level, found.group_size
      ('p_g_os', 8)
      >>> str(found).startswith("level p_g_os on 8 devices, shard groups of 8: ")
      True
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
    sent = {
        k: {name: budget(plan, micro_batches=k, **ways).wire_bytes for name, ways in _WAYS.items()}
        for k in sorted({*_MICRO_BATCHES, micro_batches})
    }
    parts = plan.kind.split(state)
    same_leaves(parts, flatten(plan.layouts)[0], "the state is")
    arrays = jax.tree.leaves(parts)
    refuse_traced(arrays, "explain")
    refuse_donated(arrays)
    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)
    plans, impossible = _other_levels(plan)
    return Explanation(
        level=plan.level.name,
        devices=plan.mesh.size,
        group_size=plan.group.size,
        leaves=state_arrays(plan, plans),
        planned=plan.bytes_per_device,
        measured=None if abstract else _measure(parts, plan),
        levels={name: level_forecast(other, choices) for name, other in plans.items()},
        impossible=impossible,
        wire=sent,
        micro_batches=micro_batches,
    )


def state_arrays(plan: Plan, plans: Mapping[str, Plan] | None = None) -> tuple[StateArray, ...]:
    """Returns every array of a plan's state as it is stored between steps, largest first.

    `plans` are those of the same state by level, which say what would change a layout.
    """
    known: dict[str, dict[str, Layout]] = {}
    for name, other in (plans or {}).items():
        paths, layouts, _ = flatten(other.layouts)
        known[name] = dict(zip(paths, layouts, strict=True))
    paths, layouts, _ = flatten(plan.layouts)
    found = [_state_array(path, x, plan, known) for path, x in zip(paths, layouts, strict=True)]
    return tuple(sorted(found, key=lambda x: -x.bytes))


def _state_array(
    path: str, layout: Layout, plan: Plan, known: Mapping[str, Mapping[str, Layout]]
) -> StateArray:
    local, size = layout.local(), layout.bytes_per_device
    replicated = layout.dim is None and layout.kept is None and local.size > 1
    reason, change, marked = _why(path, layout, plan, known)
    return StateArray(
        path=path,
        part=path.split("/")[0],
        shape=layout.shape,
        dtype=str(layout.dtype),
        placement=describe_layout(layout),
        bytes=size,
        on_host=layout.on_host,
        padding=(local.stored_size - local.size) * layout.dtype.itemsize // layout.group.size,
        saved_if_sharded=size - size // layout.group.size if replicated else 0,
        reason=reason,
        change=change,
        marked=marked,
    )


def _why(
    path: str, layout: Layout, plan: Plan, known: Mapping[str, Mapping[str, Layout]]
) -> tuple[str, str, bool]:
    """Returns why a leaf is replicated or sharded, what changes that, and whether to mark it."""
    if layout.dim is not None or layout.kept is not None:
        return layout.reason, "", False
    if layout.local().size < 2:
        return "a scalar", "", False
    if path.startswith(f"non_trainable/{OVERWRITTEN}/"):
        return "the loss returns its next value", "", False
    shards = "shards_opt_state" if path.startswith("opt_state/") else "shards_params"
    if not getattr(plan.level, shards):
        why = f"level {plan.level.name} replicates it on every device"
        there = {name: of[path] for name, of in known.items() if path in of}
        by = next((name for name, x in there.items() if x.dim is not None), None)
        if by is not None:
            return why, f"level {by}", False
        # The level that would shard it, if the state can have that, and what else keeps it whole.
        by = next((name for name in there if getattr(LEVELS[name], shards)), None)
        if by is None:
            return why, "", False
        setting = setting_of(there[by].reason)
        change = f"level {by}, with {setting}" if setting else ""
        return f"{why}, level {by} too: {there[by].reason}", change, False
    return layout.reason, setting_of(layout.reason), plan.group.size > 1


def _other_levels(plan: Plan) -> tuple[dict[str, Plan], dict[str, str]]:
    """Returns plans of the same state by level, and the reasons why some levels have none."""
    plans: dict[str, Plan] = {}
    impossible: dict[str, str] = {}
    with warnings.catch_warnings():  # they were given when the state was sharded
        warnings.simplefilter("ignore", GShardWarning)
        for name, level in LEVELS.items():
            try:
                plans[name] = plan if level is plan.level else plan.at_level(level)
            except GShardError as error:  # such as a rule that shards layers
                impossible[name] = str(error)
    return plans, impossible


Shape = tuple[tuple[int, ...], str]  # of an array, with its dtype


class _Buffer(NamedTuple):
    """A local shard of an array; `memory` identifies what it shares with views of it."""

    device: str
    memory: Any
    bytes: int
    on_host: bool


_Array = tuple[jax.Array, list[_Buffer]]


def _measure(state: Any, plan: Plan) -> Measured:
    """Measures a concrete state, and all other live arrays on the platform of its devices."""
    if not isinstance(plan.mesh, Mesh):
        raise GShardError(
            "explain(state, plan): the state has arrays, and the plan was made without devices. "
            "Leave plan out: the state knows its own."
        )
    # Before any shard of one is looked at: that makes further arrays.
    alive = jax.live_arrays(plan.mesh.devices.flat[0].platform)
    found = {str(d): dict.fromkeys(plan.bytes_per_device, 0) for d in plan.mesh.local_devices}
    paths, leaves, _ = flatten(state)
    own: set[Any] = set()
    differences: list[str] = []
    for path, x, layout in zip(paths, leaves, jax.tree.leaves(plan.layouts), strict=True):
        part, buffers = path.split("/")[0], _buffers(x)
        for device, memory, size, on_host in buffers:
            own.add(memory)
            if part in found.get(device, {}):  # the count of steps is in no part
                found[device]["host" if on_host else part] += size
            if on_host != layout.on_host:
                differences.append(f"{path}: on the {'host' if on_host else 'device'} of {device}")
        differences += _differences(path, x, _by_device(buffers), layout, list(found))
    # Arrays over several devices come before views of their shards, which use the same memory.
    others: list[_Array] = []
    for x, buffers in sorted(((x, _buffers(x)) for x in alive), key=lambda pair: -len(pair[1])):
        mine = [b for b in buffers if b.memory not in own]
        own.update(b.memory for b in mine)
        if mine:
            others.append((x, mine))
    stats = {str(d): d.memory_stats() for d in plan.mesh.local_devices}
    return Measured(
        found,
        tuple(differences),
        _grouped(others),
        dict(_by_device(b for _, buffers in others for b in buffers)),
        tuple(_copies(others, plan)),
        {device: dict(x) for device, x in stats.items() if x},
    )


def _buffers(x: Any) -> list[_Buffer]:
    """Returns the local shards of an array that take memory."""
    if not isinstance(x, jax.Array) or x.is_deleted():
        return []
    found = []
    for shard in x.addressable_shards:
        if size := shard.data.nbytes:
            on_host = shard.data.sharding.memory_kind == HOST
            try:
                address = shard.data.unsafe_buffer_pointer()
            except (NotImplementedError, RuntimeError):  # the backend has no addresses
                address = id(shard.data)
            found.append(_Buffer(str(shard.device), (shard.device, address), size, on_host))
    return found


def _by_device(buffers: Iterable[_Buffer]) -> Counter[str]:
    found = Counter[str]()
    for buffer in buffers:
        found[buffer.device] += buffer.bytes
    return found


def _differences(
    path: str, x: Any, stored: Counter[str], layout: Layout, devices: Sequence[str]
) -> Iterator[str]:
    if not isinstance(x, jax.Array):
        yield f"{path}: not on a device, a {type(x).__name__}"
        return
    for device in dict.fromkeys([*devices, *stored]):
        wanted = layout.bytes_per_device if device in devices else 0
        if stored[device] != wanted:
            yield (
                f"{path}: {stored[device]:,} B on {device}, planned {wanted:,} B (it has shape "
                f"{x.shape}, planned {layout.stored_shape})"
            )
            return


def _grouped(others: Sequence[_Array]) -> tuple[OtherArrays, ...]:
    groups: dict[tuple[tuple[int, ...], str, str], list[_Array]] = {}
    for x, buffers in others:
        key = (x.shape, str(x.dtype), _placement(x, buffers))
        groups.setdefault(key, []).append((x, buffers))
    found = [
        OtherArrays(*key, count=len(arrays), bytes=_fullest(arrays))
        for key, arrays in groups.items()
    ]
    return tuple(sorted(found, key=lambda row: -row.bytes))


def _placement(x: jax.Array, buffers: Sequence[_Buffer]) -> str:
    host = ", on host" if buffers[0].on_host else ""
    devices = {buffer.device for buffer in buffers}
    if len(devices) == 1:
        return f"on {buffers[0].device}{host}"
    how = "replicated on" if x.is_fully_replicated else "sharded over"
    return f"{how} {len(devices)} devices{host}"


def _fullest(arrays: Sequence[_Array]) -> int:
    """Returns the bytes on the device that has most of them."""
    return max(_by_device(b for _, buffers in arrays for b in buffers).values(), default=0)


def _copies(others: Sequence[_Array], plan: Plan) -> Iterator[StateCopy]:
    """Yields complete copies of components of a state among the other arrays, by placement."""
    placements: dict[str, dict[Shape, list[_Array]]] = {}
    for x, buffers in others:
        devices = len({buffer.device for buffer in buffers})
        placement = _placement(x, buffers) if devices == 1 else f"on {devices} devices"
        by_shape = placements.setdefault(placement, {})
        by_shape.setdefault((x.shape, str(x.dtype)), []).append((x, buffers))
    wanted = list(_wanted(plan))
    for placement, by_shape in placements.items():
        left = list(wanted)
        while left:  # one copy of each component before a second copy of any
            name, shapes = left.pop(0)
            if any(len(by_shape.get(shape, ())) < n for shape, n in shapes.items()):
                continue
            left.append((name, shapes))
            copy = [by_shape[shape].pop() for shape, n in shapes.items() for _ in range(n)]
            largest = sorted(shapes, key=lambda shape: -math.prod(shape[0]))
            named = tuple(f"{shapes[s]} x {s[1]}{list(s[0])}" for s in largest[:3])
            yield StateCopy(name, placement, len(copy), named, _fullest(copy))


def _wanted(plan: Plan) -> Iterator[tuple[str, Counter[Shape]]]:
    """Yields the shapes of each component of a state, as the user made it and as stored."""
    plain = plan.kind.split(plan.template)
    for component, name in _NAMES.items():
        made = [(tuple(x.shape), x) for x in jax.tree.leaves(getattr(plain, component))]
        stored = [(x.stored_shape, x) for x in jax.tree.leaves(getattr(plan.layouts, component))]
        logical, sharded = (
            Counter((shape, str(x.dtype)) for shape, x in arrays if math.prod(shape) > 1)
            for arrays in (made, stored)
        )
        for shapes in (logical, sharded) if sharded != logical else (logical,):
            if shapes:
                yield name, shapes
