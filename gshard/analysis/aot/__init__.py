"""A step compiled for a machine that is not there, in a process of its own."""
