"""Losses that are traced in a function of the user's own, compared where all processes meet.

Nothing waits where a loss is traced: that may be a trace of this process alone (`lower`,
`jax.make_jaxpr`). What was traced is noted, and compared at the next call that all processes make
anyway: the second batch, the next `for` over a loader, or a save.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from gshard._util.errors import GShardError
from gshard.distributed.agree import (
    all_gather_text,
    by_value,
    check_same_call,
    first_difference,
    hash_of,
    spans_processes,
)
from gshard.sharding.plan import Plan

SAME_LOSS = (
    "The loss, the optimizer with its learning rate, and all values that they read from "
    "outside must be the same on every process. A loop over a set has another order in each "
    "process: sort it. What belongs to one process, such as a key folded with its rank, goes "
    "into the batch."
)


# Name and lines of each program, by its hash.
_Programs = dict[str, tuple[str, Sequence[str]]]
# By the form of the arguments.
_traced: weakref.WeakKeyDictionary[Plan, dict[str, _Programs]] = weakref.WeakKeyDictionary()


def is_noted(plan: Plan, form: str, name: str) -> bool:
    """Whether a loss was noted for arguments of this form."""
    programs = _traced.get(plan, {}).get(form, {})
    return any(name == known for known, _ in programs.values())


def note_loss(plan: Plan, form: str, name: str, lines: Sequence[str]) -> None:
    """Notes a loss that was traced.

    Args:
      plan: that of the loss.
      form: shapes and dtypes of its arguments.
      name: the loss, for messages.
      lines: the traced program.
    """
    _traced.setdefault(plan, {}).setdefault(form, {})[hash_of(lines)] = name, lines


def compare_losses(plan: Plan) -> None:
    """Compares what all processes of the plan's mesh have noted. All of them must call it.

    What one process has traced beyond the others is its own. So for arguments of one form the
    programs of one of two processes must be among those of the other.

    Raises:
      GShardError: they have not, on all processes.
    """
    if not spans_processes(plan):
        return
    mesh: Any = plan.mesh
    own = _traced.get(plan, {})
    text = json.dumps({form: sorted(own[form]) for form in sorted(own)})
    texts = all_gather_text(f"losses\n{text}", mesh, what="a comparison of losses")
    found = [json.loads(text) for text in check_same_call(texts, "losses").values()]
    for form in sorted(set().union(*found)):
        known = [set(hashes[form]) for hashes in found if form in hashes]
        if all(a <= b or b <= a for a, b in combinations(known, 2)):
            continue
        common = set.intersection(*known)
        mine = sorted(own.get(form, {}).items())
        name, lines = next((x for key, x in mine if key not in common), ("", ()))
        differing = {r: x.strip()[:200] for r, x in first_difference(lines, mesh).items()}
        raise GShardError(
            f"the processes do not run the same program: {name or 'a loss'}, in a loop of your "
            f"own, differs in the traced program: {by_value(differing)}. {SAME_LOSS}"
        )
