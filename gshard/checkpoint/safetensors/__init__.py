"""Weights as one file that other programs read: safetensors, whole values, by name."""
