"""Which parameters stay on a shard axis, such as experts: `keep=`, or Flax's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gshard._util import validation
from gshard._util.errors import GShardError, did_you_mean, some, warn
from gshard._util.validation import dimension, shown
from gshard.sharding.group import Group, entry_axes
from gshard.sharding.layout import Kept
from gshard.sharding.topology import EXPERT, SEQUENCE

Keep = Mapping[str, tuple[str, int]]
_EXAMPLE = "keep={'experts/': ('expert', 0)}"


def kept_params(
    keep: Keep | None,
    params: Mapping[str, Any],
    metadata: Mapping[str, Sequence[Any]],
    scan_dims: Mapping[str, int | None],
    group: Group,
    untrained: Mapping[str, str | None],
) -> dict[str, Kept]:
    """Returns what is kept of some parameters, by their path.

    Args:
      keep: the user's argument.
      params: every parameter by its path, of which shapes alone are read.
      metadata: the names of dimensions in Flax's metadata, by path.
      scan_dims: the dimensions that scans over layers iterate over, by path.
      group: the data axes.
      untrained: paths of the other state, such as an NNX model's that `wrt=` does not train, each
        with the parameter that it mirrors (as an average does), or None: it is stored like that.

    Raises:
      GShardError: a pattern matches nothing, two ask for different things of one array, an axis is
        not one of the shard axes, or a dimension does not exist or cannot be sharded over the axis.
    """
    sizes = dict(zip(group.shard, group.sizes, strict=True))
    asked: dict[str, tuple[str, int]] = {}
    first: dict[str, str] = {}  # by path, the first pattern that matches it
    others: dict[str, list[str]] = {}
    for path, names in metadata.items():
        dims = [d for d, entry in enumerate(names) if EXPERT in entry_axes(entry)]
        if path in params and dims and EXPERT in sizes:
            asked[path] = EXPERT, dims[0]
    if keep is not None and not isinstance(keep, Mapping):
        raise GShardError(
            f"keep={shown(keep)} must map path patterns to a shard axis and a dimension, such as "
            f"{_EXAMPLE}."
        )
    for text, value in (keep or {}).items():
        axis, dim = _checked(text, value, sizes, group)
        matches = validation.pattern(text, "keep").search
        found = {path: (axis, dim) for path in params if matches(path)}
        others[text] = [path for path in untrained if matches(path)]
        if not found and not others[text]:
            raise GShardError(
                f"keep: the pattern {text!r} matches no parameter.{did_you_mean(text, params)} "
                f"There are {some(sorted(params))}."
            )
        shapes = {path: tuple(params[path].shape) for path in found}
        _warn_of_unlike(text, dim, shapes)
        for path, shape in shapes.items():
            _refuse_two(path, shape, keep or {}, first.setdefault(path, text), text)
        asked |= found
    for text, other in others.items():
        if alone := [path for path in other if untrained[path] not in asked]:
            warn(
                f"keep: the pattern {text!r} matches {some(alone)}, which the optimizer does not "
                "train (wrt=): it is not kept, and is all-gathered for the loss. Only trained "
                "parameters are kept, and those that frozen= names (Linen and plain parameters)."
            )
    validation.warn_of_cut_numbers("keep", keep or (), [*params, *untrained])
    axes = sorted({axis for axis, _ in asked.values()})
    if len(axes) > 1:
        raise GShardError(
            f"keep= and the metadata of the model name several axes, {', '.join(axes)}: parameters "
            "can be kept on one axis of the mesh."
        )
    if sizes.get(EXPERT, 1) > 1 and not asked and not keep:
        warn(
            f"the mesh has an expert axis of {sizes[EXPERT]} devices, and no parameter is kept on "
            f"it: it is an ordinary shard axis. Name the experts, {_EXAMPLE}, or name the axis in "
            "the model's metadata, nn.with_partitioning(init, ('expert', None, None))."
        )
    is_trial = group.devices == 1 and set(axes) <= sizes.keys()  # on one device, before many
    if keep and axes and sizes.get(axes[0], 1) == 1 and not is_trial:
        one = f"whose axis {axes[0]!r} has one device"
        why = one if axes[0] in sizes else "without an expert axis"
        warn(
            f"keep= changes nothing on a mesh {why}. Leave it out, or share the experts over "
            "several devices: gshard.make_mesh(expert=4)."
        )
    kept = {path: _kept(path, params[path], *at, scan_dims, sizes) for path, at in asked.items()}
    return {path: x for path, x in kept.items() if x.devices > 1}


def _checked(text: str, value: Any, sizes: Mapping[str, int], group: Group) -> tuple[str, int]:
    """Checks one entry of `keep=`."""
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], str)
    if not pair or isinstance(value[1], bool) or not isinstance(value[1], int):
        raise GShardError(
            f"keep: {text!r} is mapped to {shown(value)}. Give the axis and the dimension, such as "
            f"{_EXAMPLE}."
        )
    axis, dim = value
    known = [name for name in sizes if name != SEQUENCE]
    absent = axis == EXPERT and axis not in (*group.axes, *dict(group.model_axes))
    if axis not in known and not absent:  # make_mesh(expert=1) makes no such axis
        why = "is not in the mesh"
        if axis in sizes:
            why = "holds slices of the sequences: use an axis of its own"
        elif axis in group.replica:
            why = "is a replica axis, over which everything is replicated"
        elif axis in dict(group.model_axes):
            why = "is an axis of your own, over which gshard shards nothing"
        raise GShardError(
            f"keep: {text!r} names the axis {axis!r}, which {why}.{did_you_mean(axis, known)} "
            f"Axes that can keep parameters: {', '.join(known) or 'none'}; "
            "gshard.make_mesh(expert=4) makes an axis 'expert'."
        )
    return axis, dim


def _refuse_two(path: str, shape: tuple[int, ...], keep: Keep, first: str, text: str) -> None:
    """Refuses a pattern that asks for something else of an array than the first that matches it."""
    (axis, dim), (other, at) = keep[first], keep[text]
    if (axis, dimension(dim, len(shape))) != (other, dimension(at, len(shape))):
        raise GShardError(
            f"keep: {path} {list(shape)} matches {first!r}, which keeps dimension {dim} on "
            f"{axis!r}, and {text!r}, which keeps dimension {at} on {other!r}. Change one of these "
            "patterns so that it does not match this array."
        )


def _warn_of_unlike(text: str, dim: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Warns of a pattern whose arrays differ in the number of experts: some may not be experts."""
    first: dict[int, str] = {}  # by the entries of the dimension, an array with as many
    for path, shape in shapes.items():
        found = dimension(dim, len(shape))
        if found is not None:
            first.setdefault(shape[found], f"{shape[found]} in {path} {list(shape)}")
    if len(first) > 1:
        warn(
            f"keep: the pattern {text!r} matches arrays with different numbers of experts on "
            f"dimension {dim}: {some(list(first.values()))}. If some are not experts, such as a "
            "router, give a pattern that matches only experts. If all are, give each number of "
            "experts a pattern of its own."
        )


def _kept(
    path: str,
    leaf: Any,
    axis: str,
    dim: int,
    scan_dims: Mapping[str, int | None],
    sizes: Mapping[str, int],
) -> Kept:
    shape, devices = tuple(leaf.shape), sizes.get(axis, 1)
    where = f"keep: dimension {dim} of {path} {list(shape)}"
    found = dimension(dim, len(shape))
    if found is None:
        raise GShardError(
            f"{where} does not exist: the array has {len(shape)}. Give the dimension of the "
            "experts, or a pattern that does not match this array."
        )
    if found == scan_dims.get(path):
        raise GShardError(
            f"{where} is the one that a scan over layers iterates over. Give the dimension of the "
            f"experts, such as {found + 1}."
        )
    if shape[found] % devices or not shape[found]:
        fitting = [n for n in range(2, shape[found] + 1) if shape[found] % n == 0]
        fits = f", such as {some([str(n) for n in fitting], most=6)}" if fitting else ""
        raise GShardError(
            f"{where} has {shape[found]} entries, which the {devices} devices of the axis {axis!r} "
            f"cannot share equally. Use an axis of a size that divides {shape[found]}{fits}, or "
            f"{devices} or {2 * devices} experts, or a pattern that does not match this array."
        )
    return Kept(axis, found, devices)
