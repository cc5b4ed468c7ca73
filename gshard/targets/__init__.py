"""Machines that a step can be planned and compiled for, whether they are there or not."""

from gshard._util.chips import CHIPS as CHIPS
from gshard._util.chips import Chip as Chip
from gshard.analysis.aot.target import Target as Target
from gshard.analysis.aot.target import parse_target as parse_target
