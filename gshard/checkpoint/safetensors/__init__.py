"""The weights of a state as safetensors files. Start reading: `save`, `load`, then `name_map`."""
