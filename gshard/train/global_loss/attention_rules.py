"""Rules of the attention kernels that `jax.nn.dot_product_attention` takes from cuDNN."""

from __future__ import annotations

import math

from gshard.train.global_loss.placement import PARTIAL, REPLICATED, sharded
from gshard.train.global_loss.registry import Decision, Given, rule

_OF_PACKED = slice(6, 10)  # operands: where sequences begin, and tables of pages


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
def cudnn_attention(given: Given) -> Decision | None:
    """Forward and backward, example by example; a bias may be shared by all.

    Operands that a call does not have are empty. Packed sequences and pages mix examples, and
    dropout draws by their position on the device.
    """
    if not given.evaluator.of_examples:
        return None
    examples, place = given.shapes[0][0], sharded(0)
    packed = any(math.prod(shape) for shape in given.shapes[_OF_PACKED])
    # newer kernels may also take a function of the scores, with operands of its own
    if packed or given.params["dropout_rate"] or given.params.get("score_mod") is not None:
        return None
    wanted = [place if s[0] == examples else REPLICATED for s in given.shapes]
    shared = [s for s, p in zip(given.shapes, wanted, strict=True) if p == REPLICATED]
    if any(s[0] > 1 for s in shared) or not set(given.placements) <= {REPLICATED, place}:
        return None
    # the gradient of a shared bias is a sum over examples
    sizes = [v.aval.shape[0] for v in given.eqn.outvars]
    return Decision(wanted, [place if n == examples else PARTIAL for n in sizes])
