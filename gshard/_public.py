"""Where public names come from: `gshard` reads these lines and imports each at its first use."""

# ruff: noqa: F401
from __future__ import annotations

import gshard.distributed as distributed
import gshard.expert as expert
import gshard.paddle as paddle
import gshard.pytorch as pytorch
import gshard.sequence as sequence
from gshard._util.errors import (
    ArgumentTypeError,
    CallOrderError,
    DonatedStateError,
    GShardError,
    GShardWarning,
    NonFiniteError,
    UnevenInputsError,
)
from gshard._util.version import __version__
from gshard.analysis.audit import audit
from gshard.analysis.audit_report import Audit
from gshard.analysis.explain import explain
from gshard.analysis.explain_report import Explanation
from gshard.analysis.forecast import forecast
from gshard.analysis.forecast_report import Forecast
from gshard.analysis.monitor.metrics import Metrics
from gshard.analysis.monitor.profile import profile
from gshard.analysis.setup import TrainSetup
from gshard.checkpoint.checkpointer import Checkpointer
from gshard.checkpoint.checksums import Damage, DamagedCheckpointError
from gshard.checkpoint.orbax import import_orbax
from gshard.checkpoint.restore import Restored
from gshard.checkpoint.safetensors.load import load_safetensors
from gshard.checkpoint.safetensors.name_map import NameMap
from gshard.checkpoint.safetensors.save import save_safetensors
from gshard.checkpoint.save import SaveFailedError
from gshard.data.batch import shard_batch
from gshard.data.loader import DataLoader, global_batches
from gshard.sharding.budget import Budget, budget
from gshard.sharding.host_arrays import full_params
from gshard.sharding.mesh import make_mesh, virtual_devices
from gshard.sharding.plan import Plan
from gshard.sharding.precision import Precision
from gshard.sharding.quantized import Quantized
from gshard.sharding.rules import LeafInfo, ShardDim, by_path, by_predicate, by_shape
from gshard.train.eval_step import make_eval_step
from gshard.train.global_loss.by_examples import by_examples
from gshard.train.gradients import LocalGradients
from gshard.train.loss import Reduced, Weighted
from gshard.train.shard_train_state import shard_train_state
from gshard.train.train_step import make_train_step
from gshard.train.value_and_grad import reduce_gradients, value_and_grad
from gshard.train_state.components import ShardedOptState
from gshard.train_state.nonfinite import GradScaler, ScalerState
