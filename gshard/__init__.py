"""gshard: ZeRO data parallelism for JAX and Flax in one call.

The public API is `__all__`, with the names of five modules: `gshard.distributed` (join and start
processes), `gshard.sequence` (operations of models whose sequences are sharded), `gshard.expert`
(mixtures of experts), `gshard.paddle` and `gshard.pytorch` (the calls that Paddle's and PyTorch's
users know). `gshard.models` has models to plan with and to train; import it by itself:
`from gshard.models import llama`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # no locks, process groups and signals as gshard uses them
    raise ImportError(
        "gshard runs on Linux and macOS. On Windows, use it in WSL 2: "
        "https://docs.jax.dev/en/latest/installation.html"
    )
if TYPE_CHECKING:
    from gshard._public import *
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
    "LocalGradients",
    "Metrics",
    "NameMap",
    "NonFiniteError",
    "Plan",
    "Precision",
    "Quantized",
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
    "expert",
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
    "sequence",
    "shard_batch",
    "shard_train_state",
    "value_and_grad",
    "virtual_devices",
]


if not TYPE_CHECKING:  # so that type checkers report misspelt names
    import threading

    _loading = threading.RLock()  # of two threads that import parts of one cycle, one would fail
    _homes = {}

    def __getattr__(name: str) -> Any:
        """Imports a public name at its first use: `gshard --help` needs no JAX, Linen no NNX."""
        import importlib

        if name not in __all__:
            if name.isidentifier() and not name.startswith("_"):
                with _loading:
                    _say_where(name)
            raise AttributeError(f"module 'gshard' has no attribute {name!r}")

        with _loading:
            if name not in globals():
                module, own = _home_of(name)
                found = importlib.import_module(module)
                globals()[name] = getattr(found, own) if own else found
        return globals()[name]

    def _say_where(name: str) -> None:
        """Raises an error for a name of PyTorch or Paddle, or of one of gshard's modules."""
        import importlib.util
        import sys

        from gshard._util.errors import MissingAttributeError, missing_name

        if importlib.util.find_spec(f"gshard.{name}") is not None:  # a folder, not imported yet
            if name == "models":  # no ImportError: `from gshard import models` then imports it
                raise MissingAttributeError(
                    "gshard.models is not imported yet. Import it first, such as: "
                    "from gshard.models import llama."
                )
            return
        places = "gshard.distributed", "gshard.pytorch", "gshard.paddle"
        known = {place: vars(importlib.import_module(place)) for place in places}
        for place, found in known.items():
            if name in found.get("__all__", ()):
                raise missing_name("gshard", name, f"It is {place}.{name}.", sys._getframe(2))
        for place, found in known.items():
            if hint := found.get("_INSTEAD", found.get("INSTEAD", {})).get(name):
                raise missing_name("gshard", name, f"In {place}: {hint}", sys._getframe(2))

    def _home_of(name: str) -> tuple[str, str]:
        """Returns the module of a public name, as `_public.py` imports it, and its name there."""
        import ast
        import pkgutil

        if not _homes:
            for line in ast.parse(pkgutil.get_data("gshard", "_public.py")).body:
                if isinstance(line, ast.ImportFrom):
                    _homes.update((x.name, (line.module, x.name)) for x in line.names)
                elif isinstance(line, ast.Import):
                    _homes.update((x.asname, (x.name, "")) for x in line.names)
        return _homes[name]


def __dir__() -> list[str]:
    """The public names: folders that a user has no business with stay out of completion."""
    return __all__
