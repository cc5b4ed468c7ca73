"""Saves and resumes a training run, with its losses so far, after a kill or a signal to stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import gshard
from examples.config import Config, ConfigError, what_decides_the_numbers
from examples.measure import Run


class Checkpoints:
    """The checkpoints of one run: the train state and the losses of all steps so far.

    A run that has ended can therefore be resumed too, with no steps left. Without a folder in the
    settings nothing is read or written.
    """

    def __init__(self, config: Config, run: Run, say: Callable[[str], None]):
        self.config, self.run, self.say, self.state = config, run, say, None
        self.saved = 0  # the newest step that is saved, or being saved
        self.checkpointer = None
        if config.checkpoints:
            folder = Path(config.checkpoints) / run.name
            self.checkpointer = gshard.Checkpointer(folder, keep_last=3)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error) -> None:
        if self.checkpointer is not None:
            self.checkpointer.__exit__(*error)

    def restore(self, state):
        """The newest undamaged state, and its losses into the run; or the state as it was given."""
        if self.checkpointer is None or self.checkpointer.latest_step() is None:
            return state
        restored = self.checkpointer.restore(like=state)
        self.run.losses = restored.metadata["losses"]
        self.run.tokens_per_second = restored.metadata["tokens_per_second"]
        self.saved = restored.data_state["step"]  # a batch is a function of the step
        self.say(f"resumes from step {self.saved}")
        return restored.state

    def steps_left(self) -> Iterable[int]:
        """The numbers of the steps to come; after SIGTERM it saves, and the process exits."""
        steps = range(self.saved, self.config.steps)
        if self.checkpointer is None:
            return steps
        return gshard.distributed.until_preempted(steps, last=self.save_and_wait)

    def after_step(self, state) -> None:
        """Starts to save every `save_every` steps and after the last; training continues."""
        self.state, done = state, len(self.run.losses)
        if done % self.config.save_every == 0 or done == self.config.steps:
            self.save()

    def save(self) -> None:
        """What has been trained since the last time."""
        done = len(self.run.losses)
        if self.checkpointer is None or done == self.saved:
            return
        metadata = {"losses": self.run.losses, "tokens_per_second": self.run.tokens_per_second}
        self.checkpointer.save(done, self.state, data_state={"step": done}, metadata=metadata)
        self.saved = done

    def save_and_wait(self) -> None:
        """Saves, and waits until the save is on disk; then the process may stop."""
        self.save()
        self.checkpointer.wait()
        self.say(f"told to stop after step {len(self.run.losses)}: saved")


def refuse_other_settings(config: Config) -> None:
    """A folder belongs to one training run.

    With other settings, a resumed run would not have the losses of one that never stopped.
    """
    if not config.checkpoints:
        return
    now, file = what_decides_the_numbers(config), Path(config.checkpoints) / "settings.json"
    if file.exists():
        then = json.loads(file.read_text())
        for name in now:
            if then.get(name) != now[name]:
                raise ConfigError(
                    f"{config.checkpoints} holds a training run with {name}={then.get(name)}, and "
                    f"now {name}={now[name]}: choose another folder for checkpoints"
                )
    elif gshard.distributed.process_index() == 0:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text(json.dumps(now, indent=1))
            new.replace(file)  # all of it, or nothing
        except OSError as error:
            raise ConfigError(f"checkpoints={config.checkpoints}: {error}") from error
