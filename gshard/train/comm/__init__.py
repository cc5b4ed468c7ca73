"""Every collective of the core, the buckets that share one, and the reduction of gradients.

Start reading: `collectives`.
"""
