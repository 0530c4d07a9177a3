"""The workplace of trials: a trainer, checkpoints, and the run's header.

A trial is a pure function of the task, the seed and the state at its point of training, so that
trials can run in any order, in any process, and again after a crash.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from steadygrad.studies.checkpoint import Checkpoints, State
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import evaluation_cost

Advance = Callable[[int, str], None]
"""Told how many samples of work are done, as they are done, and on what."""


@dataclass
class Workplace:
    """The surroundings of a job; ``files`` are places of the functions that the settings name."""

    trainer: Trainer
    checkpoints: Checkpoints
    advance: Advance
    header: Any = None
    files: Mapping[str, str] = field(default_factory=dict)
    run: str = ""  # its identity
    # What a study's trials make once.
    tools: Mapping[str, Any] = field(default_factory=dict)

    def state(self, name: str, samples: int, again: Callable[[], object]) -> State:
        """The state after ``samples``: read, or trained ``again`` by the trial that leaves it."""
        found = self.checkpoints.load(name, samples)
        # On every rank or on none: training again takes all of them.
        if all(self.trainer.context.gather(found is not None)) and found is not None:
            return found
        again()
        return self.trainer.state(samples)

    def evaluate(self) -> float:
        """The validation loss; its cost counts as work that is done."""
        loss = self.trainer.evaluate()
        self.advance(evaluation_cost(len(self.trainer.task.valid)), "")
        return loss
