"""What a GPU needs for a step, by its compiler and by the estimate; for scripts that compile."""

from __future__ import annotations

from typing import Any

import gshard
from benchmarks.footprint import compiled_peak
from gshard.analysis.memory.footprint import footprint


def memory_on_gpu(traced: Any, plan: gshard.Plan) -> dict[str, int]:
    """Bytes of one device: the arguments, the peak with them, and the peak as estimated."""
    compiled = traced.lower().compile()
    return {
        "arguments": compiled.memory_analysis().argument_size_in_bytes,
        "peak": compiled_peak(compiled, "gpu"),
        "estimated": footprint(traced, plan, "gpu").peak,
    }
