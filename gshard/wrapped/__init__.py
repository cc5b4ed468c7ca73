"""The model and optimizer that the Paddle and PyTorch faces wrap."""
