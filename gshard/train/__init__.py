"""Sharding a train state, and the train step, evaluation step and gradients that run on it."""
