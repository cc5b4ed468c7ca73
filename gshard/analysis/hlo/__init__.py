"""Reads compiled programs: what they communicate, between which devices, and how often."""

from gshard.analysis.hlo.parser import Array
from gshard.analysis.hlo.program import KINDS, Collective, CompiledProgram, read_program

__all__ = ["KINDS", "Array", "Collective", "CompiledProgram", "read_program"]
