"""The weights of a state as a safetensors file. Start reading: `save`, then `load`."""
