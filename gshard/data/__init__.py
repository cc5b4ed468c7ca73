"""Global batches, the data loader, and checks that processes agree about them."""
