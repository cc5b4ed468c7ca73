"""Reads compiled programs: what they communicate, between which devices, and how often.

`gshard.audit` judges what was read. The counting rules hold for CPU, GPU and TPU text.
"""

from gshard.analysis.hlo.parser import Array
from gshard.analysis.hlo.program import KINDS, Collective, CompiledProgram, read_program

__all__ = ["KINDS", "Array", "Collective", "CompiledProgram", "read_program"]
