"""Errors, validation, pytree paths, units and jaxprs: helpers that know nothing of gshard."""
