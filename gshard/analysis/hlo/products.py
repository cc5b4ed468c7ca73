"""The FLOP of matrix products and convolutions in compiled programs."""

from __future__ import annotations

import math
import re

from gshard.analysis.hlo.parser import Computation, Instruction, read_sizes

_OF_LIBRARY = re.compile(r'"lhs_contracting_dimensions":\["?([^\]]*?)"?\]')


def is_product(instruction: Instruction) -> bool:
    """Whether an instruction is a matrix product or a convolution, also of cuBLAS or cuDNN."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        text = instruction.attribute_text
        return "dot_dimension_numbers" in text or "dim_labels" in instruction.attributes
    return opcode in ("dot", "convolution")


def product_flops(instruction: Instruction, computation: Computation) -> int:
    """Returns the FLOP of one execution: two for each multiply-add."""
    attributes = instruction.attributes
    left, right = (read_sizes(computation.by_name[x].shape) for x in instruction.operands[:2])
    out = read_sizes(instruction.shape)  # of cuDNN's results, the first
    if "dim_labels" in attributes:  # XLA:TPU writes matrix products as convolutions
        labels = attributes["dim_labels"].split("_")[1].split("->")[0]
        target = attributes.get("custom_call_target", "")
        if "BackwardInput" in target:  # counted as forwards, where its operand is the output
            out = left
        elif "BackwardFilter" in target:
            out, right = right, out
        each = math.prod(n for n, label in zip(right, labels, strict=True) if label != "o")
    else:
        listed = attributes.get("lhs_contracting_dims", "").strip("{}")
        if instruction.opcode == "custom-call":
            found = _OF_LIBRARY.search(instruction.attribute_text)
            listed = found[1].replace('"', "") if found else ""
        each = math.prod(left[int(d)] for d in listed.split(",") if d.strip())
    return 2 * math.prod(out) * each
