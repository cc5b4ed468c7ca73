"""The only core folder that knows Flax: it converts train states to `Components` and back.

A *kind* (`Linen` or `Nnx`) splits a state into components, merges components into a state, and
turns the user's loss into one pure function of unsharded parameters.

May import: `_util`.
Start reading: `components`, then `linen`.
"""

from __future__ import annotations

from gshard.train_state.components import SCAN_NAMES as SCAN_NAMES
from gshard.train_state.components import Components as Components
from gshard.train_state.components import Kind as Kind
from gshard.train_state.components import PureLoss as PureLoss
from gshard.train_state.components import ShardedOptState as ShardedOptState
from gshard.train_state.frozen import FROZEN as FROZEN
from gshard.train_state.frozen import OVERWRITTEN as OVERWRITTEN
from gshard.train_state.frozen import PARAMETERS as PARAMETERS
from gshard.train_state.kind import abstract as abstract
from gshard.train_state.kind import abstract_like as abstract_like
from gshard.train_state.kind import as_state as as_state
from gshard.train_state.kind import is_init as is_init
from gshard.train_state.kind import is_nnx_pair as is_nnx_pair
from gshard.train_state.kind import kind_of as kind_of
from gshard.train_state.linen import COLLECTIONS as COLLECTIONS
