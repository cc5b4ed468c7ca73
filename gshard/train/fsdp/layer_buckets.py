"""Which divided leaves of a scope are made whole together: small ones of a layer, used in turn.

A bucket with leaves of all layers would hold them whole from the first layer to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gshard.train.comm.buckets import buckets
from gshard.train.fsdp.lazy_param import Divided, move_together
from gshard.train.fsdp.use_analysis import Places


def move_layers_together(places: Places, args: Sequence[Any], buffer_max_size: int) -> None:
    """Puts leaves among the inputs of a scope into common buckets.

    Args:
      places: of the scope; nothing of it is evaluated yet.
      args: its inputs.
      buffer_max_size: elements of one bucket.
    """
    given = zip(places.jaxpr.invars, args, strict=True)
    leaves = {v: x for v, x in given if isinstance(x, Divided)}
    if len(leaves) < 2 or not buffer_max_size:
        return
    found = [
        (leaves[v], casts)
        for v, casts in places.whole_here().items()
        if v in leaves and len(casts) < 2 and not leaves[v].use.neighbours
    ]
    sizes = [leaf.use.moved.local().stored_size for leaf, _ in found]
    runs = [list(run) for _, run in groupby(found, key=lambda one: one[0].use.layer)]
    kinds = [
        (i, leaf.use.kind, casts[0] if casts else leaf.dtype)
        for i, run in enumerate(runs)
        for leaf, casts in run
    ]
    for bucket in buckets(sizes, kinds, buffer_max_size):
        if len(bucket) > 1:
            members = [found[i] for i in bucket]
            move_together([leaf.cast(casts[0]) if casts else leaf for leaf, casts in members])
