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
from dataclasses import dataclass, field
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


@dataclass
class _Traced:
    """What was traced for arguments of one form."""

    names: set[str] = field(default_factory=set)
    programs: dict[str, tuple[str, Sequence[str]]] = field(default_factory=dict)  # name and lines


_traced: weakref.WeakKeyDictionary[Plan, dict[str, _Traced]] = weakref.WeakKeyDictionary()


def is_noted(plan: Plan, form: str, name: str) -> bool:
    """Whether a loss was noted for arguments of this form."""
    return name in _traced.get(plan, {}).get(form, _Traced()).names


def note_loss(plan: Plan, form: str, name: str, lines: Sequence[str]) -> None:
    """Notes a loss that was traced.

    Args:
      plan: that of the loss.
      form: shapes and dtypes of its arguments.
      name: the loss, for messages.
      lines: the traced program.
    """
    traced = _traced.setdefault(plan, {}).setdefault(form, _Traced())
    found = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    traced.names.add(name)
    traced.programs[found] = name, lines


def compare_losses(plan: Plan) -> None:
    """Compares what all processes of the plan's mesh have noted. All of them must call it.

    What one process has traced beyond the others is its own. So for arguments of one form the
    programs of one of two processes must be among those of the other.

    Raises:
      GShardError: they have not, on all processes.
    """
    mesh: Any = plan.mesh
    if not isinstance(mesh, Mesh) or not mesh.is_multi_process or not mesh.local_devices:
        return
    own = _traced.get(plan, {})
    text = json.dumps({form: sorted(own[form].programs) for form in sorted(own)})
    texts = all_gather_text(f"losses\n{text}", mesh, what="a comparison of losses")
    found = [json.loads(text) for text in check_same_call(texts, "losses").values()]
    for form in sorted(set().union(*found)):
        known = [set(hashes[form]) for hashes in found if form in hashes]
        if all(a <= b or b <= a for a, b in combinations(known, 2)):
            continue
        common = set.intersection(*known)
        mine = own[form].programs if form in own else {}
        name, lines = next((x for key, x in sorted(mine.items()) if key not in common), ("", ()))
        differing = {r: x.strip()[:200] for r, x in first_difference(lines, mesh).items()}
        raise GShardError(
            f"the processes do not run the same program: {name or 'a loss'}, in a loop of your "
            f"own, differs in the traced program: {by_value(differing)}. {SAME_LOSS}"
        )
