"""Helpers that know nothing of gshard: errors, validation, pytrees, units, chips, jaxprs.

May import: nothing else of gshard.
Start reading: `errors`, then `jaxpr`, which every interpreter of a user's function is built on.
"""
