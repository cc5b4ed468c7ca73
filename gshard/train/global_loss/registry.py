"""What a rule is: from the placements of an equation's operands to those of its results.

A rule states an identity of index arithmetic, or returns None. Without one, the operands are
replicated and the equation runs as it was traced: a missing rule costs a collective, never a wrong
number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from gshard.train.global_loss.placement import Partition, Placement
from gshard.train.global_loss.positions import Positions
from gshard.train.global_loss.transfers import Transfer


class Converter(Protocol):
    """What rules and messages use of `conversions.Conversions`, which describes it."""

    axes: tuple[str, ...]
    other_axes: tuple[str, ...]
    platform: str
    partition: Partition
    micro_batches: int
    batches: int
    limit: int | None
    of_examples: bool
    exchanges: bool
    bodies: int
    transfers: list[Transfer]

    @property
    def is_last(self) -> bool:
        """Whether no other evaluation follows this one, over other axes."""
        ...

    def repeated(self, times: int | None) -> AbstractContextManager[None]:
        """Counts what is recorded inside as often as a loop runs; None: nobody knows how often."""
        ...

    def record(self, kind: str, aval: Any, eqn: Any) -> None:
        """Notes a collective that the loss needs."""
        ...

    def place(self, eqn: Any) -> str:
        """Names an equation and the user's line."""
        ...


class Evaluator(Converter, Protocol):
    """What a rule uses of `evaluator.GlobalEvaluator`, which describes it."""

    returned: list[bool]
    gathers: int

    def arrays(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        placements: Sequence[Placement],
        arrays: Sequence[Any],
        results: Sequence[Placement],
        statistics: Sequence[bool] = (),
    ) -> list[Any]:
        """Evaluates a body, from arrays of these placements to arrays of those."""
        ...

    def indexed(
        self, index: jax.Array, eqn: Any, statistics: bool = False
    ) -> AbstractContextManager[None]:
        """Uses this index of the part, for a function that an equation calls."""
        ...


@dataclass(frozen=True)
class Decision:
    """How one equation is evaluated on parts.

    Attributes:
      operands: the placements that the operands are converted to.
      results: the placements of the results.
      params: parameters of the equation that differ for a part, such as shapes.
      run: evaluates converted operands; None binds the equation with `params`.
      largest: whether the result is the maximum over all parts of what each has, or the minimum;
        None for any other equation.
    """

    operands: Sequence[Placement]
    results: Sequence[Placement]
    params: dict[str, Any] = field(default_factory=dict)
    run: Callable[[list[Any]], Sequence[Any]] | None = None
    largest: bool | None = None


@dataclass(frozen=True)
class Given:
    """An equation, with the placements of its operands and what is known of their values.

    Attributes:
      depends: of each operand, whether it depends on what is differentiated; empty if not known.
    """

    eqn: Any
    placements: list[Placement]
    positions: list[Positions | None]
    evaluator: Evaluator
    depends: Sequence[bool] = ()

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the equation."""
        return self.eqn.params

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The global shapes of the operands."""
        return [v.aval.shape for v in self.eqn.invars]

    @property
    def result(self) -> tuple[int, ...]:
        """The global shape of the first result."""
        return self.eqn.outvars[0].aval.shape

    @property
    def partition(self) -> Partition:
        """The parts of the batch, and this one."""
        return self.evaluator.partition

    def all(self, operands: Placement, results: Placement | None = None) -> Decision:
        """Places all operands alike, and all results alike."""
        outs = [results or operands] * len(self.eqn.outvars)
        return Decision([operands] * len(self.placements), outs)

    def local(self, shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
        """Returns the shape of one part."""
        return self.partition.local_shape(shape, placement)


Rule = Callable[[Given], Decision | None]
RULES: dict[str, Rule] = {}  # of equations with a sharded operand, by the primitive's name
PARTIAL_RULES: dict[str, Rule] = {}  # of equations with a partial sum among the operands


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the primitives of these names."""

    def register(found: Rule) -> Rule:
        if twice := RULES.keys() & names:  # the order of imports would choose
            raise ValueError(f"two rules for {twice}")
        RULES.update(dict.fromkeys(names, found))
        return found

    return register


def partial_rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule that keeps partial sums partial."""

    def register(found: Rule) -> Rule:
        PARTIAL_RULES.update(dict.fromkeys(names, found))
        return found

    return register
