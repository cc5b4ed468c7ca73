"""Which way to train suits a machine."""
