"""Mixtures of experts: which tokens go to which expert, there and back, and how evenly.

Plain JAX, with the same numbers on one device and on many. Where the parameters of the experts are
kept on a mesh axis (`shard_train_state(keep=)`), the step sends tokens to the devices of their
experts and back by one all-to-all each. `dropless` all-gathers the tokens instead, unless `by=`
says otherwise.

May import: `_util`.
Start reading: `route`, then `dispatch` and `combine`.
"""

from __future__ import annotations

from gshard.expert.balance import dropped, load, load_balancing_loss, update_bias, z_loss
from gshard.expert.dropless import dropless
from gshard.expert.routing import Routing, combine, dispatch, route

__all__ = [
    "Routing",
    "combine",
    "dispatch",
    "dropless",
    "dropped",
    "load",
    "load_balancing_loss",
    "route",
    "update_bias",
    "z_loss",
]


def __dir__() -> list[str]:
    """The public names alone, for completion."""
    return __all__
