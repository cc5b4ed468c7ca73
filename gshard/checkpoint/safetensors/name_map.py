"""Which tensor of a file holds which weight: names and layouts of another program, as data.

A rule is the path of a weight, the name of its tensor, and how their axes correspond. One weight
may be in several tensors (a stack of layers), and one tensor may hold several weights (queries,
keys and values). Rules only rename, reorder, split and merge axes, so each holds in both
directions, and a tensor is read and written as a view: nothing is copied but what is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import names_of, pattern, shown

Axes: TypeAlias = tuple[tuple[str, ...], ...]  # of an array; several in one dimension were merged
_PLACEHOLDER = re.compile(r"\{(\w+)(?::([^{}]*))?\}")


@dataclasses.dataclass(frozen=True)
class NameMap:
    """Names and layouts that another program uses in safetensors files, for one kind of model.

    `{x}` in a path matches one component or a part of one, and stands for the same text in the
    name. `{x:q,k,v}` matches only these texts; if path and name both list texts, they correspond in
    order. Axes are names separated by spaces; `(a b)` merges two axes into one dimension, in which
    `b` varies faster. An axis that only the weight has is written `{x}` in the name: each entry is
    a tensor of its own, called 0, 1, 2, ... or by the listed texts. An axis that only the tensor
    has is written `{x:...}` in the path, with the texts listed: one tensor holds several weights.

    Args:
      rules: for each path of a weight, such as `"layers/q/kernel"`, the name of its tensor; or the
        name and the axes, such as `("layers.{layer}.q.weight", "layer in out -> out in")`. Without
        axes the tensor has the weight's layout.
      tied: names of tensors that no weight needs because they repeat another tensor, with the name
        of that one. They are not written. Loading compares them.
      ignored: regular expressions for names of tensors that no weight needs. They are not written.
      prefix: what all names begin with in some files, and not in others. Written files have it.

    Raises:
      GShardError: a rule, or a regular expression, is not valid, or `rules` or `tied` is not a
        mapping.

    Example:
      >>> torch_linear = gshard.NameMap({"w": ("weight", "in out -> out in"), "b": "bias"})
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "p_g_os", min_shard_size=0)
      >>> gshard.save_safetensors(state, "linear.safetensors", name_map=torch_linear)
      >>> from safetensors.numpy import load_file
      >>> {name: x.shape for name, x in load_file("linear.safetensors").items()}
      {'bias': (32,), 'weight': (32, 64)}
      >>> state = gshard.load_safetensors(state, "linear.safetensors", name_map=torch_linear)
    """

    rules: Mapping[str, str | tuple[str, str]]
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: Sequence[str] = ()
    prefix: str = ""

    def __post_init__(self) -> None:
        for name in ("rules", "tied"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise GShardError(f"NameMap: {name}={shown(given)} must be a mapping.")
        _ = self.parsed, self.ignores  # raises for rules that cannot be

    @functools.cached_property
    def parsed(self) -> tuple[Rule, ...]:
        """The rules, checked."""
        return tuple(Rule.of(path, rule) for path, rule in self.rules.items())

    @functools.cached_property
    def ignores(self) -> tuple[re.Pattern[str], ...]:
        """The regular expressions, compiled."""
        found = names_of("NameMap: ignored", self.ignored, "a regular expression")
        return tuple(pattern(x, "NameMap: ignored") for x in found)

    def pieces(self, path: str, shape: Sequence[int]) -> tuple[Piece, ...]:
        """The tensors that hold a weight; none if no rule is for its path."""
        matches = [(rule, rule.path.match(path)) for rule in self.parsed]
        found = [(rule, words) for rule, words in matches if words is not None]
        if len(found) > 1:
            rules = " and ".join(repr(rule.path.text) for rule, _ in found)
            raise GShardError(f"NameMap: {path} fits the rules {rules}. Keep one of them.")
        return found[0][0].pieces(path, shape, found[0][1]) if found else ()


class Piece(NamedTuple):
    """Where one tensor holds a weight, or a part of it."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of the tensor
    leaf_axes: Axes  # of the weight
    file_axes: Axes  # of the tensor
    sizes: Mapping[str, int]  # of axes
    at: Mapping[str, int]  # the entry of each axis that only one of them has

    def in_tensor(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the tensor: what the weight needs, with the weight's axes in its order."""
        mine = [x for x in _flat(self.file_axes) if x not in self.at]
        theirs = [x for x in _flat(self.leaf_axes) if x not in self.at]
        view = self._split(tensor, self.file_axes)
        return view.transpose([mine.index(x) for x in theirs])

    def in_leaf(self, leaf: np.ndarray) -> np.ndarray:
        """A view of the weight: what the tensor holds, with the same axes as `in_tensor`."""
        return self._split(leaf, self.leaf_axes)

    def as_tensor(self, leaf: np.ndarray) -> np.ndarray:
        """A view of the weight in the order of the tensor's numbers; axes are not merged yet."""
        mine = [x for x in _flat(self.leaf_axes) if x not in self.at]
        theirs = [x for x in _flat(self.file_axes) if x not in self.at]
        return self.in_leaf(leaf).transpose([mine.index(x) for x in theirs])

    def _split(self, x: np.ndarray, axes: Axes) -> np.ndarray:
        names = _flat(axes)
        x = x.reshape([self.sizes[name] for name in names])
        return x[(*(self.at.get(name, slice(None)) for name in names), ...)]


def same_layout(name: str, shape: Sequence[int]) -> Piece:
    """A tensor that holds one weight as it is."""
    axes = tuple((str(dim),) for dim in range(len(shape)))
    sizes = {str(dim): n for dim, n in enumerate(shape)}
    return Piece(name, tuple(shape), axes, axes, sizes, {})


@dataclasses.dataclass(frozen=True)
class Template:
    """A text with `{placeholders}`, some with the texts that they may stand for."""

    text: str
    choices: Mapping[str, tuple[str, ...] | None]

    @classmethod
    def of(cls, text: str) -> Template:
        """Parses a text."""
        found = _PLACEHOLDER.findall(text)
        return cls(text, {x: tuple(many.split(",")) if many else None for x, many in found})

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        regex, end, seen = "", 0, set[str]()
        for found in _PLACEHOLDER.finditer(self.text):
            name, choices = found[1], self.choices[found[1]]
            one = "|".join(map(re.escape, choices)) if choices else "[^/]+?"
            regex += re.escape(self.text[end : found.start()])
            regex += f"(?P=_{name})" if name in seen else f"(?P<_{name}>{one})"
            seen.add(name)
            end = found.end()
        return re.compile(regex + re.escape(self.text[end:]))

    def match(self, text: str) -> dict[str, str] | None:
        """What the placeholders stand for in a text, or None if it is another one."""
        found = self._regex.fullmatch(text)
        return {x.removeprefix("_"): y for x, y in found.groupdict().items()} if found else None

    def fill(self, words: Mapping[str, str]) -> str:
        """The text with words for placeholders."""
        return _PLACEHOLDER.sub(lambda found: words[found[1]], self.text)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Weights of one path template, and their tensors."""

    path: Template
    name: Template
    axes: tuple[Axes, Axes] | None  # of the weight and of the tensor; None: the same layout

    @classmethod
    def of(cls, path: str, rule: str | tuple[str, str]) -> Rule:
        """Parses and checks a rule."""
        parts = (rule, None) if isinstance(rule, str) else rule
        if not (isinstance(parts, (tuple, list)) and len(parts) == 2 and isinstance(parts[0], str)):
            raise GShardError(
                f"NameMap: the rule of {path!r} is {shown(rule)}. Give the name of a tensor, or a "
                "pair of the name and the axes, such as ('weight', 'i o -> o i')."
            )
        name, axes = parts
        self = cls(Template.of(path), Template.of(name), _axes(path, axes) if axes else None)
        leaf, file = ({*_flat(x)} for x in self.axes or ((), ()))
        of_path, of_name = self.path.choices, self.name.choices
        lost = of_path.keys() - of_name.keys() - file
        unknown = of_name.keys() - of_path.keys() - leaf
        alone = (leaf - file - of_name.keys()) | (file - leaf - of_path.keys())
        open_ended = [x for x in file - leaf if of_path.get(x, ()) is None]
        both = [x for x in of_path.keys() & of_name.keys() if of_path[x] and of_name[x]]
        uneven = [x for x in both if len(of_path[x] or ()) != len(of_name[x] or ())]
        for wrong, what in (
            (lost, "of the path must be in the name or be an axis of the tensor"),
            (unknown, "of the name must be in the path or be an axis of the weight"),
            (alone, "is an axis of one side only: put it into the name or the path in braces"),
            (open_ended, "of the path must list its texts: {x:q,k,v}"),
            (uneven, "must list as many texts in the path as in the name"),
        ):
            if wrong:
                raise GShardError(f"NameMap: in the rule of {path!r}, {min(wrong)!r} {what}.")
        return self

    def pieces(
        self, path: str, shape: Sequence[int], words: Mapping[str, str]
    ) -> tuple[Piece, ...]:
        """The tensors of a weight of that shape; `words` are the placeholders of its path."""
        leaf, file = self.axes or (same_layout("", shape).leaf_axes,) * 2
        of_path, of_name = self.path.choices, self.name.choices
        fixed = {x: (of_path[x] or ()).index(words[x]) for x in {*_flat(file)} - {*_flat(leaf)}}
        stacked = [x for x in _flat(leaf) if x not in _flat(file)]
        known = {x: len(of_path[x] or ()) for x in fixed}
        known |= {x: len(many) for x in stacked if (many := of_name[x])}
        sizes = _sizes(path, shape, leaf, known)
        said = dict(words)
        for x in of_path.keys() & of_name.keys():
            if (mine := of_path[x]) and (theirs := of_name[x]):
                said[x] = theirs[mine.index(words[x])]
        found = []
        for entry in itertools.product(*(range(sizes[x]) for x in stacked)):
            at = dict(zip(stacked, entry, strict=True))
            texts = {x: many[i] if (many := of_name[x]) else str(i) for x, i in at.items()}
            tensor = tuple(math.prod(sizes[x] for x in group) for group in file)
            name = self.name.fill(said | texts)
            found.append(Piece(name, tensor, leaf, file, sizes, fixed | at))
        return tuple(found)


def _flat(axes: Axes) -> list[str]:
    return [x for group in axes for x in group]


def _axes(path: str, text: str) -> tuple[Axes, Axes]:
    """Parses `in (head feature) -> (head feature) in`."""
    sides = text.split("->")
    found = [
        tuple(tuple(x.strip("()").split()) for x in re.findall(r"\([\w\s]+\)|\w+", side))
        for side in sides
    ]
    whole = [" ".join(re.findall(r"\([\w\s]+\)|\w+", side)) for side in sides]
    clean = all(a == " ".join(b.split()) for a, b in zip(whole, sides, strict=True))
    twice = any(len({*_flat(side)}) < len(_flat(side)) for side in found)
    if len(found) != 2 or not clean or twice:
        raise GShardError(
            f"NameMap: in the rule of {path!r}, the axes {shown(text)} must be those of the weight "
            "and those of the tensor, such as 'in (head feature) -> (head feature) in'."
        )
    return found[0], found[1]


def _sizes(path: str, shape: Sequence[int], axes: Axes, known: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all axes of a weight, one unknown at most in a dimension."""
    sizes = dict(known)
    fits = len(shape) == len(axes)
    for n, group in zip(shape, axes, strict=False):
        unknown = [x for x in group if x not in sizes]
        rest = math.prod(sizes[x] for x in group if x in sizes)
        fits &= len(unknown) < 2 and n == (n // rest if unknown and rest else 1) * rest
        sizes |= {x: n // rest for x in unknown[:1] if rest}
    if not fits:
        said = " ".join(" ".join(x) if len(x) == 1 else f"({' '.join(x)})" for x in axes)
        raise GShardError(
            f"NameMap: {path} is {list(shape)}, and its rule has the axes '{said}'"
            f"{f' with {dict(known)}' if known else ''}. Correct the rule, or use the map of this "
            "model."
        )
    return sizes
