"""A loss with the meaning that it has on one device, evaluated on the examples of each device.

The loss is traced once, at the global number of examples. Every value of that trace is replicated,
sharded on one dimension, or a partial sum (`placement`). Rules say for an equation how the
placements of its operands give those of its results (`shape_rules`, `product_rules`,
`index_rules`, `attention_rules`, `partial_rules`, `bodies`, `derivatives`). The evaluator converts
each operand to the placement that its rule asks for (`conversions`). An equation without a fitting
rule gets replicated operands and runs as it was traced.

    batch, sharded --> equation --> rule --> local equation
                          |
                          +--> no rule --> all-gather or sum, then as traced

Every device differentiates its share of the loss: a partial sum as it is, a replicated loss divided
by the number of devices. The shares add up to the loss, so the sum of their gradients is its
gradient.
"""
