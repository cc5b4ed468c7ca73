"""Weights of a state and tensors of a file: which is in which, by a name map or by path."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gshard._util.errors import GShardError
from gshard.checkpoint.safetensors.format import alignment
from gshard.checkpoint.safetensors.name_map import NameMap, Piece, same_layout
from gshard.checkpoint.weights import Weight


@dataclasses.dataclass
class Tensor:
    """One tensor of a file, and the weights in it by name."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: dict[str, Piece]


@dataclasses.dataclass(eq=False)
class Group:
    """Weights and the tensors that hold them; most have one weight, and one tensor or a stack."""

    weights: list[str]
    tensors: list[Tensor]


def pieces_by_rule(
    weights: Mapping[str, Weight], name_map: NameMap | None
) -> dict[str, tuple[Piece, ...]]:
    """Where the tensors of a file hold each weight; nothing for one without a rule."""
    if name_map is None:
        return {name: (same_layout(name, x.layout.shape),) for name, x in weights.items()}
    return {n: name_map.pieces(x.layout.path, x.layout.shape) for n, x in weights.items()}


def pieces_of(
    weights: Mapping[str, Weight], name_map: NameMap | None, call: str
) -> dict[str, tuple[Piece, ...]]:
    """The same; a `GShardError` for weights without a rule."""
    found = pieces_by_rule(weights, name_map)
    unknown = [weights[name].layout.path for name, pieces in found.items() if not pieces]
    if name_map is not None and unknown:
        rules = list(name_map.rules)
        raise GShardError(
            f"{call}: name_map has no rule for {', '.join(nearest(unknown, rules))}. Use the map "
            "of this model, add rules (gshard.NameMap), or leave these weights out with only=."
        )
    return found


def check_filled(pieces: Mapping[str, Sequence[Piece]], call: str) -> None:
    """Raises a `GShardError` unless each number of a tensor belongs to one weight."""
    tensors: dict[str, list[tuple[str, Piece]]] = {}
    for weight, several in pieces.items():
        for piece in several:
            tensors.setdefault(piece.name, []).append((weight, piece))
    for name, held in tensors.items():
        numbers = 0
        taken = set()
        for _, piece in held:
            inside = {x for group in piece.file_axes for x in group}
            mine = {x: i for x, i in piece.at.items() if x in inside}
            taken.add(tuple(mine.values()))
            numbers += math.prod(piece.sizes[x] for x in inside if x not in mine)
        shapes = {piece.shape for _, piece in held}
        right = len(shapes) == 1 and len(taken) == len(held)
        if not right or {math.prod(shape) for shape in shapes} != {numbers}:
            rooms = " or ".join(f"{math.prod(x)} {[*x]}" for x in sorted(shapes))
            weights = [*dict.fromkeys(weight for weight, _ in held)]
            twice = f" in {len(held)} places" if len(held) > len(weights) else ""
            raise GShardError(
                f"{call}: {name} has room for {rooms} numbers, and {' and '.join(weights)} "
                f"{'has' if len(weights) == 1 else 'have'} {numbers}{twice}. Each number must "
                "belong to one weight: correct the rules of name_map, or only=."
            )


def groups_of(
    dtypes: Mapping[str, np.dtype], pieces: Mapping[str, Sequence[Piece]], call: str
) -> list[Group]:
    """The tensors of a file in its order: the larger alignment first, then by name.

    `dtypes` and `pieces` are those of each weight in the file.
    """
    order = sorted(dtypes, key=lambda name: (alignment(dtypes[name]), name))
    tensors: dict[str, Tensor] = {}
    group_of: dict[str, Group] = {}  # by tensor
    groups: list[Group] = []
    for name in order:
        dtype, mine = dtypes[name], Group([name], [])
        groups.append(mine)
        for piece in pieces[name]:
            tensor = tensors.get(piece.name)
            if tensor is None:
                tensor = tensors[piece.name] = Tensor(piece.name, piece.shape, dtype, {})
                mine.tensors.append(tensor)
            elif (group := group_of[piece.name]) is not mine:
                group.weights += mine.weights
                group.tensors += mine.tensors
                groups.remove(mine)
                mine = group
            if (tensor.shape, tensor.dtype) != (piece.shape, dtype):
                raise GShardError(
                    f"{call}: {name} would be in {piece.name} as {dtype}{list(piece.shape)}, and "
                    f"{' and '.join(tensor.pieces)} as {tensor.dtype}{list(tensor.shape)}. Correct "
                    "the rules of name_map, or give these weights one dtype."
                )
            tensor.pieces[name] = piece
            group_of |= {x.name: mine for x in mine.tensors}
    check_filled(pieces, call)
    return groups


def nearest(names: Iterable[str], known: list[str], most: int = 20) -> list[str]:
    """The names, with the most similar one that is known behind; it is taken out of `known`.

    For the first names only: comparing thousands takes seconds.
    """
    said = []
    for i, name in enumerate(names):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if i < most else []
        said.append(f"{name} (did you mean {close[0]}?)" if close else name)
        for x in close:
            known.remove(x)
    return said
