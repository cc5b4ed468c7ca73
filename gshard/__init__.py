"""gshard: ZeRO data parallelism for JAX and Flax in one call.

The public API is `__all__`, with the names of three modules: `gshard.distributed` (join and start
processes), `gshard.paddle` and `gshard.pytorch` (the calls that Paddle's and PyTorch's
users know).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gshard._public import *  # noqa: F403
    from gshard._util.version import __version__

__all__ = [
    "ArgumentTypeError",
    "Audit",
    "Budget",
    "CallOrderError",
    "Checkpointer",
    "Damage",
    "DamagedCheckpointError",
    "DataLoader",
    "DonatedStateError",
    "Explanation",
    "Forecast",
    "GShardError",
    "GShardWarning",
    "GradScaler",
    "LeafInfo",
    "LevelForecast",
    "LocalGradients",
    "Metrics",
    "NameMap",
    "NonFiniteError",
    "Plan",
    "Precision",
    "Reduced",
    "Restored",
    "SaveFailedError",
    "ScalerState",
    "ShardDim",
    "ShardedOptState",
    "TrainSetup",
    "UnevenInputsError",
    "Weighted",
    "__version__",
    "audit",
    "budget",
    "by_examples",
    "by_path",
    "by_predicate",
    "by_shape",
    "distributed",
    "explain",
    "forecast",
    "full_params",
    "global_batches",
    "import_orbax",
    "load_safetensors",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "paddle",
    "profile",
    "pytorch",
    "reduce_gradients",
    "save_safetensors",
    "shard_batch",
    "shard_train_state",
    "value_and_grad",
    "virtual_devices",
]


if not TYPE_CHECKING:  # so that type checkers report misspelt names

    def __getattr__(name: str) -> Any:
        """Loads all public names at the first use of one, so that `gshard --help` needs no JAX."""
        if name not in __all__:
            raise AttributeError(f"module 'gshard' has no attribute {name!r}")
        if name == "__version__":
            from gshard._util.version import __version__

            return __version__
        from gshard import _public

        globals().update((known, getattr(_public, known)) for known in __all__)
        return globals()[name]


def __dir__() -> list[str]:
    """The public names: folders that a user has no business with stay out of completion."""
    return __all__
