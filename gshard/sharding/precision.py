"""The dtypes in which parameters are stored, computed with and sent, and gradients are reduced.

Source: mixed precision training (Micikevicius et al., 2018), section 3.1; ZeRO (Rajbhandari et al.,
2020), section 3.1: parameters and gradients in 2 bytes, a master copy next to the moments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util import validation
from gshard._util.arguments import named_fields
from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import shown
from gshard.sharding.quantized import Quantized, wire_dtype

_NAMES = ("bfloat16", "float16", "float32", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@named_fields({"dtype": "It is compute_dtype= here."})
@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed precision training, as dtypes or by name (`bf16` and `fp16` too).

    Args:
      compute_dtype: dtype of `state.params`, which the loss gets, and which all-gathers transfer
        unless the loss casts it before. By default bfloat16; `"float32"` leaves float32 parameters
        as they are.
      param_dtype: dtype of the master copies that the optimizer updates. They are sharded like the
        optimizer state; a parameter whose compute dtype is this one has no master copy.
      reduce_dtype: dtype in which gradients are summed over micro-batches and devices. By default
        the compute dtype of each parameter.
      output_dtype: dtype of floating auxiliary and evaluation outputs. By default unchanged;
        a step may return a narrower sum over examples as float32.
      exceptions: other compute dtypes by path pattern, such as `{"LayerNorm": "float32"}`.
      gather_dtype: dtype in which all-gathers of parameters send them, in blocks of at most 256
        entries with a scale each: `"int8"`, `"int4"`, `"float8_e4m3fn"`, `"float8_e5m2"`, or a
        `Quantized`, which also sets the block length. None sends the compute dtype. All devices
        compute with the same rounded parameters.
      scatter_dtype: the same for reduce-scatters of gradients. The sums are float32. `"int4"` is
        rounded up or down at random; the random numbers are a function of the step, the device and
        the parameter.
      wire_exceptions: other dtypes to send arrays in, by path pattern, such as `{"router": None}`;
        None sends them as they are.
      state_dtype: `"int8"` stores the optimizer's moments in 8 bits, in blocks with a scale each.
        Embeddings, arrays of fewer than 4096 elements and arrays whose blocks would be too short
        keep their dtype. None: all arrays do.
      state_exceptions: exceptions to `state_dtype`, by pattern of a parameter's path or of the path
        of an array of the optimizer state: `"int8"`, or None to keep the dtype. Arrays that are not
        moments, such as copies of parameters, keep theirs in any case.

    Raises:
      GShardError: a dtype is unknown or not of its kind, or a pattern is not a regular expression.

    Example:
      >>> precision = gshard.Precision("bfloat16", exceptions={"^b$": "float32"})
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", precision=precision, min_shard_size=0)
      >>> state.params["w"].dtype.name, state.params["b"].dtype.name
      ('bfloat16', 'float32')
    """

    compute_dtype: Any = "bfloat16"
    param_dtype: Any = "float32"
    reduce_dtype: Any = None
    output_dtype: Any = None
    exceptions: Mapping[str, Any] = field(default_factory=dict, hash=False)
    gather_dtype: Any = None
    scatter_dtype: Any = None
    wire_exceptions: Mapping[str, Any] = field(default_factory=dict, hash=False)
    state_dtype: Any = None
    state_exceptions: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "param_dtype", "reduce_dtype", "output_dtype"):
            given = getattr(self, name)
            if given is not None or name in ("compute_dtype", "param_dtype"):
                object.__setattr__(self, name, _wide(given, name))
        for name in ("gather_dtype", "scatter_dtype"):
            object.__setattr__(self, name, wire_dtype(getattr(self, name), name))
        if getattr(self.gather_dtype, "rounding", None) == "stochastic":
            raise GShardError(
                f"gather_dtype={self.gather_dtype}: parameters are always rounded to the nearest, "
                "so that those that a step does not change are sent as the same values again. "
                "Leave rounding= out; it applies to scatter_dtype= only."
            )
        checked = _by_pattern("exceptions", self.exceptions, "{'LayerNorm': 'float32'}", _wide)
        object.__setattr__(self, "exceptions", checked)
        sent = _by_pattern("wire_exceptions", self.wire_exceptions, "{'router': None}", wire_dtype)
        object.__setattr__(self, "wire_exceptions", sent)
        random = [k for k, x in sent.items() if getattr(x, "rounding", None) == "stochastic"]
        if random and self.gather_dtype is not None and self.scatter_dtype is None:
            raise GShardError(
                f"wire_exceptions[{random[0]!r}]={sent[random[0]]}: rounding= is for gradients, "
                "and without scatter_dtype= these are sent as they are. Leave rounding= out."
            )
        if sent and self.gather_dtype is None and self.scatter_dtype is None:
            raise GShardError(
                "wire_exceptions= goes with gather_dtype= or scatter_dtype=; without these every "
                "array is sent as it is."
            )
        object.__setattr__(self, "state_dtype", _of_state(self.state_dtype, "state_dtype"))
        stored = _by_pattern("state_exceptions", self.state_exceptions, "{'norm': None}", _of_state)
        object.__setattr__(self, "state_exceptions", stored)
        if stored and self.state_dtype is None:
            raise GShardError(
                "state_exceptions= has no effect without state_dtype='int8'. Give both or none."
            )

    def compute(self, path: str) -> Any:
        """Returns the compute dtype of the parameter at `path`."""
        return first_match(self.exceptions, (path,), self.compute_dtype)

    def output(self, tree: Any) -> Any:
        """Casts the floating arrays of a tree to the output dtype."""
        if self.output_dtype is None:
            return tree

        def cast(x: Any) -> Any:
            return jnp.asarray(x, self.output_dtype) if is_floating(jnp.result_type(x)) else x

        return jax.tree.map(cast, tree)


def as_precision(precision: Any) -> Precision | None:
    """Converts a `precision=` argument: a `Precision`, a compute dtype or its name, or None."""
    if precision is None or isinstance(precision, Precision):
        return precision
    return Precision(compute_dtype=floating_dtype(precision, "precision"))


def first_match(patterns: Mapping[str, Any], paths: Sequence[str], default: Any) -> Any:
    """Returns what the first pattern that is found in one of the paths stands for."""
    found = (x for text, x in patterns.items() if any(re.search(text, path) for path in paths))
    return next(found, default)


def is_floating(dtype: Any) -> bool:
    """Whether this is a real floating dtype; a `Precision` applies to no other."""
    return jnp.issubdtype(dtype, jnp.floating)


def _by_pattern(
    name: str, given: Any, example: str, checked: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """Checks an argument that maps path patterns to dtypes, and each of these by `checked`."""
    if not isinstance(given, Mapping):
        raise GShardError(
            f"{name}={shown(given)} must map path patterns to dtypes, such as {example}."
        )
    for text in given:
        validation.pattern(text, name)
    return {text: checked(dtype, f"{name}[{text!r}]") for text, dtype in given.items()}


def _of_state(value: Any, name: str) -> Any:
    """Returns the dtype of moments, or None for the one that the optimizer gives them."""
    try:
        if value is None or jnp.dtype(value) == jnp.int8:
            return None if value is None else jnp.dtype(jnp.int8)
    except (TypeError, ValueError):
        pass
    raise GShardError(
        f"{name}={shown(value)} is not a dtype that moments can be stored in. Choose 'int8', or "
        "None for the dtype that the optimizer gives them: float32, or its own mu_dtype=."
    )


def _wide(value: Any, name: str) -> Any:
    """Returns a floating dtype of 16 bits or more."""
    dtype = floating_dtype(value, name)
    if dtype.itemsize < 2:
        raise GShardError(
            f"{name}={dtype}: sums of so few bits overflow or lose what is added. Choose one of "
            f"{', '.join(_NAMES)}. For products in float8 use Flax's fp8 layers (the page "
            '"Precision" of the documentation); to send arrays in float8 use gather_dtype= and '
            "scatter_dtype=."
        )
    return dtype


def floating_dtype(value: Any, name: str) -> Any:
    """Checks an argument that is a floating dtype, or its name."""
    choices = f"Choose one of {', '.join(_NAMES)}."
    if isinstance(value, Quantized):
        raise GShardError(
            f"{name}={value!r} is a dtype to send arrays in: pass it as wire=, gather_dtype= or "
            f"scatter_dtype=. {choices}"
        )
    try:
        if value is None:  # NumPy's float64
            raise TypeError("None is not a dtype")
        dtype = jnp.dtype(_SHORT.get(value, value) if isinstance(value, str) else value)
    except (TypeError, ValueError) as error:
        hint = did_you_mean(value, _NAMES)
        raise GShardError(f"{name}={shown(value)} is not a dtype.{hint} {choices}") from error
    if not is_floating(dtype):
        raise GShardError(f"{name}={dtype} is not floating. {choices}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise GShardError(f"{name}={dtype} needs jax.config.update('jax_enable_x64', True).")
    return dtype
