"""`load_safetensors`: a sharded state with the weights of safetensors files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.durable import file_path
from gshard._util.errors import GShardError
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import flag
from gshard.checkpoint.arrays import with_components
from gshard.checkpoint.bounds import Bounds
from gshard.checkpoint.casts import CASTS, can_cast, converted
from gshard.checkpoint.place_shards import inside, place_shards
from gshard.checkpoint.safetensors.fetched import Fetched
from gshard.checkpoint.safetensors.folder import tensors_at
from gshard.checkpoint.safetensors.format import (
    DTYPES,
    Stored,
    refuse_replaced,
)
from gshard.checkpoint.safetensors.name_map import NameMap, Piece
from gshard.checkpoint.safetensors.name_maps import name_map_of
from gshard.checkpoint.safetensors.place import Place, place_of
from gshard.checkpoint.safetensors.tensors import (
    check_filled,
    nearest,
    pieces_by_rule,
    pieces_of,
)
from gshard.checkpoint.step_files import store_errors_explained
from gshard.checkpoint.weights import (
    Weight,
    chooser,
    chosen,
    named,
    replace_weights,
    warn_of_choice,
    weights_of,
    with_copies,
)
from gshard.distributed.agree import run_on_all
from gshard.sharding.host_arrays import plan_of
from gshard.sharding.layout import Layout
from gshard.sharding.validate import refuse_abstract_mesh

_CALL = "load_safetensors"
_BLOCK = 2**23  # bytes of two tensors that are compared at a time


@short_traceback
def load_safetensors(
    state: Any,
    path: str | os.PathLike[str],
    *,
    name_map: NameMap | str | None = None,
    only: str | Sequence[str] | None = None,
    cast: bool = False,
) -> Any:
    """Loads the weights of a safetensors file, or of a folder of shards, into a sharded state.

    They are from `gshard.save_safetensors`, for a state of any level, mesh and precision, or from
    another program with the same names, shapes and dtypes, or with those that `name_map` describes.
    Parameters, their master copies and the collections next to them are replaced, in the layouts of
    `state`. The step, the optimizer's moments (shard a new state for new ones) and random keys are
    kept. Before the first step, copies of the parameters that the optimizer keeps (schedule-free
    optimizers, Prodigy, DoG, Lookahead) are replaced by copies of the loaded ones; after it they
    are kept, and a warning names them.

    One weight at a time is on the host, and only what this process's devices need. With several
    processes all call this, each reads the file, and all return when all have.

    Args:
      state: what `shard_train_state` or a step returned, at any level; for NNX the
        `(model, optimizer)` pair. Its arrays are not changed or freed, unless it is a wrapped pair;
        the result shares those that are kept.
      path: the path of a file; of a folder with one model, in one file or in shards with an index
        (`model.safetensors.index.json`); or of such an index. Or its address in an object store
        (`gs://...`, `s3://...`), of which only what is needed is read.
      name_map: the names and layouts of another program: `"gpt2"`, `"llama"`, `"gemma"`,
        `"gemma3"`, or a `gshard.NameMap`. None for gshard's own.
      only: a regular expression, or several: weights whose path contains a match are loaded and
        the others are kept, such as `"^adapters/"`.
      cast: True converts a weight of another floating dtype to the state's, and one of another
        integer dtype to the state's.

    Returns:
      A state of the same type and with the same plan; for NNX a new pair. A pair that
      `gshard.paddle.group_sharded_parallel` wrapped is changed in place, and returned; its
      reduced gradients stay.

    Raises:
      GShardError: a file is missing, cut, damaged or not of this format; the folder has several
        models; a file changes while it is read; weights of the state are missing in the file or it
        has others; a shape or, without `cast`, a dtype differs; the map is unknown or has no rule
        for a weight; or a store does not answer. With several processes every one raises.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "p_g_os", min_shard_size=0)
      >>> gshard.save_safetensors(state, "weights.safetensors")
      >>> state = gshard.load_safetensors(state, "weights.safetensors")
      >>> bool((gshard.full_params(state)["w"] == 1).all())
      True
    """
    plan = plan_of(state, _CALL)
    refuse_abstract_mesh(plan.mesh, _CALL)

    wrapped = state[0] if isinstance(state, tuple) and hasattr(state[0], "_gshard") else None
    if wrapped is not None:
        wrapped._gshard_refuse_waiting()
        wrapped._gshard_settle()
    components = plan.kind.split(state)

    @store_errors_explained()
    def read() -> Any:
        convert, names = flag("cast", cast), name_map_of(name_map, _CALL)
        file = place_of(path, _CALL, _file_at)
        weights = named(weights_of(components, plan, _CALL), _CALL)
        wanted = chosen(weights, only, _CALL)
        pieces = pieces_of(wanted, names, _CALL)
        others = {name: x for name, x in weights.items() if name not in wanted}
        known = pieces | pieces_by_rule(others, names)
        mine, every = (
            {x.name for each in several.values() for x in each} for several in (pieces, known)
        )
        check_filled(
            {k: [x for x in several if x.name in mine] for k, several in known.items()}, _CALL
        )
        found = tensors_at(file, _CALL)
        if names is not None:
            found = _needed(found, every, names)
        found = {name: x for name, x in found.items() if name in mine or name not in every}
        if only is not None and names is None and mine <= found.keys():
            # Also of what the state lacks, as in `restore`.
            fits = chooser(only, _CALL)
            found = {k: x for k, x in found.items() if k in mine or fits(k.replace(".", "/"))}
        _check_fit(found, wanted, pieces, file, convert, names)

        def make(name: str, layout: Layout, old: Any) -> Any:
            if name not in wanted:
                return old
            dtypes = (wanted[name].layout.dtype, layout.dtype)  # by way of a master copy's
            return _weight(pieces[name], found, dtypes, layout, plan.abstract(layout))

        new = replace_weights(components, plan, make)
        refuse_replaced(found.values(), _CALL)
        return new

    with jax.transfer_guard("allow"):  # these are asked for
        new = run_on_all(read, plan.mesh, call=_CALL)
        new = with_copies(new, components, plan, _CALL)
    if only is not None:
        warn_of_choice(plan, only, _CALL)
    if wrapped is not None:  # a new one would lack what this one keeps, such as its gradients
        return with_components(new, state, plan)
    return plan.kind.merge(new, state, plan.kind.tx(state))


def _file_at(path: Any, call: str) -> Path:
    """The file or folder at a path, with links followed; an index keeps its own name.

    Hugging Face's cache has links to files without names. The shards are beside the link.
    """
    target = file_path(path, call)
    own = Path(os.fsdecode(path)).expanduser().absolute()
    beside = own.name.endswith(".index.json") and not target.name.endswith(".index.json")
    return own if beside else target


def _needed(found: Mapping[str, Stored], wanted: set[str], names: NameMap) -> dict[str, Stored]:
    """The tensors of a file without those that the map leaves out, each with the map's prefix."""
    full, known = {}, {*wanted, *names.tied.values()}
    for name, stored in found.items():
        long = names.prefix + name
        if name not in wanted and long in known:
            if long not in found:
                name = long
            elif not any(x.search(name) for x in names.ignores):
                raise GShardError(
                    f"{_CALL}: {stored.path} has both {long} and {name}, which name the same "
                    "weight of the state. Delete one of them."
                )
        full[name] = stored
    repeated = {}
    for name, original in names.tied.items():
        if name in full and name not in wanted and original in full:
            repeated[name] = original
            if not _equal(full[name], full[original]):
                raise GShardError(
                    f"{_CALL}: {name} is tied to {original} in this state, and differs from it in "
                    f"{full[name].path}. Make the model with an output head of its own."
                )
    ignored = {name for name in full if any(x.search(name) for x in names.ignores)}
    gone = (ignored | repeated.keys()) - wanted
    return {name: x for name, x in full.items() if name not in gone}


def _equal(a: Stored, b: Stored) -> bool:
    """Whether two tensors have the same bits; a block at a time is read."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    blocks = [(i, min(i + _BLOCK, a.nbytes)) for i in range(0, a.nbytes, _BLOCK)]
    return all(a.read(*block) == b.read(*block) for block in blocks)


def _check_fit(
    found: Mapping[str, Stored],
    wanted: Mapping[str, Weight],
    pieces: Mapping[str, Sequence[Piece]],
    file: Place,
    cast: bool,
    names: NameMap | None,
) -> None:
    """Raises a `GShardError` that lists all that does not fit, each name once."""
    tensors = {x.name: (x, wanted[name].layout) for name in pieces for x in pieces[name]}
    missing = [name for name in tensors if name not in found]
    added = [name for name in found if name not in tensors]
    both = [name for name in tensors if name in found]
    shapes = [x for x in both if found[x].shape != tensors[x][0].shape]
    dtypes = [
        x
        for x in both
        if x not in {*shapes} and not _fits(DTYPES.get(found[x].dtype), tensors[x][1].dtype, cast)
    ]
    if not (missing or added or shapes or dtypes):
        return
    tied = names.tied if names else {}
    lost = [f"{x} (a model with a tied head has none)" for x in missing if x in tied]
    lost += nearest((x for x in missing if x not in tied), added)
    said = [f"{_CALL}: {file} has other weights than the state."]
    if missing or added:
        said.append(f"Missing in the file: {', '.join(lost) or 'none'}.")
        said.append(f"Not in the state: {', '.join(added) or 'none'}.")
    said += [
        f"{x} is {list(found[x].shape)} in the file and {list(tensors[x][0].shape)} in the state."
        for x in shapes
    ]
    said += [
        f"{x} is {found[x].dtype} in the file and {tensors[x][1].dtype} in the state."
        for x in dtypes
    ]
    if dtypes and not cast:
        said.append("Pass cast=True to convert dtypes.")
    elif dtypes:
        said.append(CASTS)
    if added and names is not None:
        said.append("What no weight needs is left out by ignored= of the NameMap.")
    if missing or added or shapes:
        said.append(
            "Pass the name_map= of the program that wrote the file, choose weights with only=, or "
            "shard a state of the same model."
        )
    raise GShardError(" ".join(said))


def _fits(stored: Any, wanted: Any, cast: bool) -> bool:
    return stored == wanted or (cast and stored is not None and can_cast(stored, wanted))


def _weight(
    pieces: Sequence[Piece],
    found: Mapping[str, Stored],
    dtypes: Sequence[Any],
    layout: Layout,
    stored: jax.ShapeDtypeStruct,
) -> jax.Array:
    """One weight in its layout, as it is `stored` in a state."""
    fetched = dict[str, Fetched]()

    def read(shards: Sequence[Bounds]) -> list[np.ndarray]:
        parts = [inside(bounds, layout.shape) for bounds in shards]
        return [_read(pieces, found, fetched, part, dtypes) for part in parts]

    return place_shards(stored, read)


def _read(
    pieces: Sequence[Piece],
    found: Mapping[str, Stored],
    fetched: dict[str, Fetched],
    index: tuple[slice, ...],
    dtypes: Sequence[Any],
) -> np.ndarray:
    """A slice of a weight; of each tensor only what is in it is read and converted."""
    axes, sizes = pieces[0].leaf_axes, pieces[0].sizes
    # A slice of a dimension of several axes is no slice of each of them: cut when it is complete.
    cut = {g[0]: s for g, s in zip(axes, index, strict=True) if len(g) == 1}
    inside = {x: cut.get(x, slice(0, sizes[x])) for group in axes for x in group}
    sized = {x: len(range(sizes[x])[s]) for x, s in inside.items()}
    out = np.empty([*sized.values()], dtypes[-1])
    for piece in pieces:
        at = {x: i - inside[x].start for x, i in piece.at.items() if x in inside}
        if any(not 0 <= i < sized[x] for x, i in at.items()):
            continue
        rest = (*(s for x, s in inside.items() if x not in at), ...)  # a view also of a number
        stored = found[piece.name]
        if isinstance(stored.path, Path):
            part = piece.in_tensor(stored.view())[rest]
        else:  # what another shard has read is not read again
            if (tensor := fetched.get(piece.name)) is None:
                tensor = fetched[piece.name] = Fetched(stored)
            part = tensor.fill(piece.in_tensor(tensor.array)[rest])
        for dtype in dtypes:
            part = converted(f"{_CALL}: {piece.name}", part, dtype)
        out[tuple(at.get(x, slice(None)) for x in inside)] = part
    out = out.reshape([math.prod(sized[x] for x in group) for group in axes])
    whole = slice(None)
    return out[tuple(whole if len(g) == 1 else s for g, s in zip(axes, index, strict=True))]
