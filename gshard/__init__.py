"""gshard: ZeRO data parallelism for JAX and Flax in one call."""

from __future__ import annotations

from gshard._version import __version__ as __version__
from gshard.audit import Audit as Audit
from gshard.audit import audit as audit
from gshard.batch import shard_batch as shard_batch
from gshard.distributed import get_rank as get_rank
from gshard.distributed import get_world_size as get_world_size
from gshard.distributed import init_parallel_env as init_parallel_env
from gshard.distributed import new_group as new_group
from gshard.errors import CallOrderError as CallOrderError
from gshard.errors import DonatedStateError as DonatedStateError
from gshard.errors import GShardError as GShardError
from gshard.errors import GShardWarning as GShardWarning
from gshard.errors import NonFiniteError as NonFiniteError
from gshard.evaluate import make_eval_step as make_eval_step
from gshard.host import full_params as full_params
from gshard.loss import Reduced as Reduced
from gshard.loss import Weighted as Weighted
from gshard.mesh import make_mesh as make_mesh
from gshard.mesh import virtual_devices as virtual_devices
from gshard.optimizer import GShardState as GShardState
from gshard.paddle.checkpoint import load_group_sharded_model as load_group_sharded_model
from gshard.paddle.checkpoint import save_group_sharded_model as save_group_sharded_model
from gshard.paddle.data_parallel import DataParallel as DataParallel
from gshard.paddle.data_parallel import fused_allreduce_gradients as fused_allreduce_gradients
from gshard.paddle.group_sharded import group_sharded_parallel as group_sharded_parallel
from gshard.plan import Plan as Plan
from gshard.precision import Precision as Precision
from gshard.promise import Promise as Promise
from gshard.promise import promise as promise
from gshard.rules import Choice as Choice
from gshard.rules import Leaf as Leaf
from gshard.rules import by_path as by_path
from gshard.rules import by_predicate as by_predicate
from gshard.rules import by_shape as by_shape
from gshard.saving import load as load
from gshard.saving import save as save
from gshard.scaler import GradScaler as GradScaler
from gshard.scaler import ScalerState as ScalerState
from gshard.shard import shard_train_state as shard_train_state
from gshard.step import make_train_step as make_train_step
from gshard.unreduced import Unreduced as Unreduced
from gshard.user_loop import reduce_gradients as reduce_gradients
from gshard.user_loop import value_and_grad as value_and_grad
