"""What a run does: metrics of its steps, writers of them, and profiles of some steps."""
