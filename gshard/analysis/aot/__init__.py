"""Compiling for machines that are not there: `compiled` runs `child`, `target` names machines."""
