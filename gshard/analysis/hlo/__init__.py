"""Reads compiled programs: what they communicate, between which devices, and how often.

Judging what was read is `gshard.audit`'s task. The counting rules hold for CPU, GPU and TPU text;
what only the TPU compiler does is in `tpu`.
"""

from gshard.analysis.hlo.parser import Array
from gshard.analysis.hlo.program import KINDS, Collective, CompiledProgram, read_program

__all__ = ["KINDS", "Array", "Collective", "CompiledProgram", "read_program"]
