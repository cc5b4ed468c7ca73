"""Which devices take part in a collective together: the notations of `replica_groups`."""

from __future__ import annotations

import math
import re

import numpy as np

from gshard.analysis.hlo.parser import Instruction

Groups = tuple[tuple[int, ...], ...]

_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\}[,\s]*)*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{}]*)\))?\s*\{([^{}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\s*\d+\}[,\s]*)*)\}")
_BRACED = re.compile(r"\{([^{}]*)\}")
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def read_groups(instruction: Instruction) -> Groups | None:
    """Returns the groups of logical device ids, or None when all devices form one group.

    A logical id is an index into the program's flat device assignment: for a program that JAX
    compiles for a mesh, an index into `mesh.devices.flat`.

    The three notations:
      * explicit: `{{0,1},{2,3}}`;
      * iota: `[2,4]<=[4,2]T(1,0)`, the numbers 0..7 shaped (4, 2), transposed, shaped (2, 4);
      * mesh: `mesh['a'=2,'b'=4] {'b'}`, one group for each way to fix the axes not named. An axis
        may be split, `'b':(2)2` being the factor of size 2 after a factor of 2; a mesh whose
        devices lie in another order says so in `device_ids=([4,2]T(1,0))` or `device_ids=(0,2,..)`.

    A collective-permute has pairs instead; devices that are linked by a chain of pairs form one
    group.
    """
    text = instruction.attribute_text
    if instruction.opcode.startswith("collective-permute"):
        pairs = _PAIRS.search(text)
        return _linked(_read_lists(pairs.group(1))) if pairs else None
    mesh = _MESH.search(text)
    if mesh:
        return _mesh_groups(*mesh.groups())
    iota = _IOTA.search(text)
    if iota:
        return _rows(_iota(iota.group(1)))
    explicit = _EXPLICIT.search(text)
    groups = _read_lists(explicit.group(1)) if explicit else ()
    return groups or None


def _read_lists(text: str) -> Groups:
    lists = (_BRACED.findall(text)) if text else []
    return tuple(_numbers(inner) for inner in lists if inner.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids.reshape(-1, ids.shape[-1]))


def _iota(text: str) -> np.ndarray:
    """`[shape]<=[source]T(order)` as an array; `[shape]T(order)` has its source for its shape."""
    lists = [_numbers(inner) for inner in re.findall(r"\[([\d,]+)\]", text)]
    order = re.search(r"T\(([\d,]+)\)", text)
    ids = np.arange(math.prod(lists[-1])).reshape(lists[-1])
    if order:
        ids = ids.transpose(_numbers(order.group(1)))
    return ids.reshape(lists[0]) if len(lists) == 2 else ids


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    names = [(name, int(size)) for name, size in _MESH_AXIS.findall(axes)]
    sizes = dict(names)
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    elif "[" in device_ids:
        ids = _iota(device_ids).reshape(-1)
    else:
        ids = np.array(_numbers(device_ids))
    taken = [
        (name, int(pre or 1), int(size or sizes[name]))
        for name, pre, size in _GROUP_AXIS.findall(grouped)
    ]
    # Every axis becomes its factors, cut wherever a named part begins or ends.
    shape, positions = [], {}
    for name, size in names:
        cuts = {1, size}
        for _, pre, part in (item for item in taken if item[0] == name):
            cuts |= {pre, pre * part}
        ordered = sorted(cuts)
        for low, high in zip(ordered, ordered[1:], strict=False):
            positions[name, low, high] = len(shape)
            shape.append(high // low)
    members = [
        position
        for name, pre, part in taken
        for (axis, low, high), position in positions.items()
        if axis == name and pre <= low and high <= pre * part
    ]
    rest = [position for position in range(len(shape)) if position not in members]
    group = math.prod(shape[position] for position in members)
    return _rows(ids.reshape(shape).transpose(rest + members).reshape(-1, group))


def _linked(pairs: Groups) -> Groups | None:
    """Joins pairs that share a device into sorted groups."""
    group_of: dict[int, set[int]] = {}
    for pair in pairs:
        joined = set().union(*(group_of.get(device, {device}) for device in pair))
        group_of.update(dict.fromkeys(joined, joined))
    groups = {min(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(groups[first] for first in sorted(groups)) or None
