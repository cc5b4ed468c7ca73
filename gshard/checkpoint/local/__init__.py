"""The newest steps in a folder of each machine. Start reading: `tier`, `store`, then `reader`."""
