"""Losses that are traced in a function of the user's own, compared where all processes meet.

Nothing waits where a loss is traced: that may be a trace of this process alone (`lower`,
`jax.make_jaxpr`). What was traced is noted, and compared at the next call that all processes make
anyway: the second batch, or a save.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from jax.sharding import Mesh

from gshard._util.errors import GShardError
from gshard.distributed.agree import all_gather_text, by_value, check_same_call, first_difference
from gshard.sharding.plan import Plan

SAME_LOSS = (
    "The loss, the optimizer with its learning rate, and all values that they read from "
    "outside must be the same on every process. A loop over a set has another order in each "
    "process: sort it. What belongs to one process, such as a key folded with its rank, goes "
    "into the batch."
)


class _Traced:
    """What was traced for arguments of one form."""

    def __init__(self) -> None:
        self.hashes: set[str] = set()
        self.last: Sequence[str] = ()  # lines of the program
        self.name = ""


_traced: weakref.WeakKeyDictionary[Plan, dict[str, _Traced]] = weakref.WeakKeyDictionary()


def is_noted(plan: Plan, form: str) -> bool:
    """Whether a loss was noted for arguments of this form."""
    return form in _traced.get(plan, {})


def note_loss(plan: Plan, form: str, name: str, lines: Sequence[str]) -> None:
    """Notes a loss that was traced.

    Args:
      plan: that of the loss.
      form: shapes and dtypes of its arguments.
      name: the loss, for messages.
      lines: the traced program.
    """
    traced = _traced.setdefault(plan, {}).setdefault(form, _Traced())
    traced.hashes.add(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest())
    traced.last, traced.name = lines, name


def compare_losses(plan: Plan) -> None:
    """Compares what all processes of the plan's mesh have noted. All of them must call it.

    A loss that only some have traced is theirs; for arguments of one form two processes must have
    at least one program in common.

    Raises:
      GShardError: they have not, on all processes.
    """
    mesh: Any = plan.mesh
    if not isinstance(mesh, Mesh) or not mesh.is_multi_process or not mesh.local_devices:
        return
    own = _traced.get(plan, {})
    text = json.dumps({form: sorted(own[form].hashes) for form in sorted(own)})
    texts = all_gather_text(f"losses\n{text}", mesh, what="a comparison of losses")
    found = [json.loads(text) for text in check_same_call(texts, "losses").values()]
    for form in sorted(set().union(*found)):
        known = [set(hashes[form]) for hashes in found if form in hashes]
        if all(a & b for a, b in combinations(known, 2)):
            continue
        mine = own.get(form, _Traced())
        differing = {r: x.strip()[:200] for r, x in first_difference(mine.last, mesh).items()}
        raise GShardError(
            f"the processes do not run the same program: {mine.name or 'a loss'} in a jax.jit of "
            f"yours differs in the traced program: {by_value(differing)}. {SAME_LOSS}"
        )
