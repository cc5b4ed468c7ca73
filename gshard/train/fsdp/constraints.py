"""Refuses sharding constraints over a data axis inside the loss, with a readable message.

Inside the loss every device has its own examples and full parameters. JAX refuses some such
constraints while tracing and others only when lowering, and never says where they are.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from gshard._util.errors import GShardError
from gshard._util.jaxpr import all_equations
from gshard.sharding.mesh import entry_axes

_LIBRARIES = (str(Path(__file__).parents[2]), "site-packages")


def raise_readable(error: ValueError, axes: Sequence[str]) -> None:
    """Raises a readable error for JAX's refusal of a constraint; returns for any other error.

    Raises:
      GShardError: names the spec, the line of the user's code and the fix.
    """
    said = str(error)
    missing = re.search(r"axis: (\S+) of (P\(.*?\)) is not found in mesh", said)
    if missing:
        raise GShardError(
            f"the model constrains an array to {missing[2]}, and the mesh has no axis "
            f"{missing[1]}. Make one, gshard.make_mesh(extra={{{missing[1]!r}: 2}}), or remove the "
            "axis names from the model."
        ) from error
    spec = re.search(r"P\(.*?\)", said)
    if "with_sharding_constraint" not in said or not spec:
        return
    frames = traceback.extract_tb(error.__traceback__)
    if any(re.search(rf"['\"]{re.escape(axis)}['\"]", spec.group()) for axis in axes):
        raise _refusal(spec.group(), [(f.filename, f.lineno) for f in frames]) from error
    raise GShardError(
        f"JAX refuses the sharding constraint {spec.group()} inside the loss: {said} (Flax "
        "constrains what carries names, nn.with_partitioning: a layer that flattens its kernel, "
        "such as nn.DenseGeneral in attention, takes the names of the flat one, "
        "(None, 'model') for (features, heads x size).)"
    ) from error


def check_constraints(jaxpr: Any, axes: Sequence[str]) -> None:
    """Refuses constraints over `axes` in a traced loss that JAX would refuse when lowering.

    Raises:
      GShardError: names the spec and the line of the user's code.
    """
    for eqn in all_equations(jaxpr):
        sharding = eqn.params.get("sharding")
        if eqn.primitive.name == "sharding_constraint" and isinstance(sharding, NamedSharding):
            named = {a for part in sharding.spec for a in entry_axes(part)}
            if named & set(axes):
                frames = getattr(eqn.source_info.traceback, "frames", ())
                places = [(f.file_name, f.line_num) for f in reversed(frames)]
                raise _refusal(f"P{tuple(sharding.spec)}", places)


def _refusal(spec: str, places: Sequence[tuple[str, int | None]]) -> GShardError:
    own = [place for place in places if not any(name in place[0] for name in _LIBRARIES)]
    where = f" at {own[-1][0]}:{own[-1][1]}" if own else ""
    return GShardError(
        f"the loss constrains a sharding to {spec}{where}. Inside the loss every device has its "
        "own examples and full parameters: there is nothing to constrain over a data axis. Remove "
        "the constraint, or name only axes that carry no data."
    )
