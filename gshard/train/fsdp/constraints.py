"""A sharding constraint on a data axis inside the loss: found, and refused in words.

Inside the loss every device has its own rows and whole parameters. JAX refuses some such
constraints while tracing and others only when lowering, each time without saying where.
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


def explain(error: ValueError, axes: Sequence[str]) -> None:
    """Puts JAX's refusal while tracing in gshard's words; returns for any other error.

    Raises:
      GShardError: names the spec, the line of the user's code and the mend.
    """
    said = str(error)
    missing = re.search(r"axis: (\S+) of (P\(.*?\)) is not found in mesh", said)
    if missing:
        raise GShardError(
            f"the model lays something out as {missing[2]}, and the mesh has no axis {missing[1]}. "
            f"Make one, gshard.make_mesh(extra={{{missing[1]!r}: 2}}), or take the names out of "
            "the model."
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


def refuse(jaxpr: Any, axes: Sequence[str]) -> None:
    """Refuses constraints over `axes` in a traced loss that JAX would refuse when lowering.

    Raises:
      GShardError: as `explain`.
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
        "own rows and whole parameters: there is nothing to constrain over a data axis. Remove the "
        "constraint, or name only axes that carry no data."
    )
