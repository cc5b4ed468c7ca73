"""Compiles for machines that are not present: `compiled` runs `child`, `target` names machines."""
