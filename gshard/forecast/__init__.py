"""What a train step will need, estimated without compiling it."""
