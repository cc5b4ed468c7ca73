"""Misuses in one process, by what is used wrongly."""

from __future__ import annotations

from tests.misuses.one_process import (
    batches,
    checkpoints,
    faces,
    gradients,
    loaders,
    losses,
    meshes,
    options,
    reports,
    states,
    steps,
    transforms,
)

TOPICS = {
    "Meshes": meshes.ROWS,
    "States that are sharded": states.ROWS,
    "Options": options.ROWS,
    "Batches": batches.ROWS,
    "Losses": losses.ROWS,
    "States and plans of a step": steps.ROWS,
    "Gradients": gradients.ROWS,
    "Transforms, modes and threads": transforms.ROWS,
    "Loaders": loaders.ROWS,
    "Files": checkpoints.ROWS,
    "Reports, forecasts, rules": reports.ROWS,
    "Paddle, PyTorch, processes": faces.ROWS,
}
