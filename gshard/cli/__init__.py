"""The `gshard` command."""
