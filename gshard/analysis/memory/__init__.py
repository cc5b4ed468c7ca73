"""What one device needs for a step, from its trace: a model of what compilers make of it."""
