"""The study behind ``steadygrad compare``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from steadygrad.studies.compare.findings import summarize
from steadygrad.studies.compare.optimizers import Entry, entries_of
from steadygrad.studies.compare.plan import make_plan, make_trials
from steadygrad.studies.compare.schema import KNOWN, OWN, Header, Plan, Settings, Summary, Traits
from steadygrad.studies.compare.trials import slowdown, tried
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Result
from steadygrad.studies.study import Study, Workplace
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Job, Trial
from steadygrad.tasks import Task

__all__ = ["STUDY", "Compare"]


class Compare(Study):
    """Whether another optimizer is worth it on a task, at which rate, and how sure that is."""

    name = "compare"
    header: Header
    # Made once: a user's file runs when its functions are loaded.
    _entries: Mapping[str, Entry] = MappingProxyType({})

    @classmethod
    def make_plan(cls, settings: Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
        """The longest runs that fit the budget, once all optimizers have taken steps."""
        task = trainer.task
        entries = trainer.context.together(lambda: entries_of(settings, task))
        entries = {name: tried(trainer, name, entry) for name, entry in entries.items()}
        plan = make_plan(
            settings,
            tuple(entries),
            batch_size=task.batch_size,
            train_size=len(task.train),
            # All have as many trials, so that the mean time of their steps counts.
            speed=speed / slowdown(trainer, entries),
            workers=workers,
            # A task's own evaluation is done whole on every rank.
            valid_size=len(task.valid) * (trainer.context.size if task.evaluate else 1),
        )
        traits = {n: entry.traits for n, entry in entries.items() if n not in (*KNOWN, OWN)}
        return msgspec.structs.replace(plan, traits=traits)

    @classmethod
    def largest_batch(cls, plan: Plan, task: Task) -> int:
        """Samples of the largest batch."""
        return plan.multiples[-1] * plan.batch_size

    def trials(self) -> Sequence[Trial]:
        """The searches, the verdicts, and the runs at the default rates."""
        return make_trials(self.plan, self.header.task.valid_size)

    def run(self, job: Job, place: Workplace) -> Result:
        """Runs one trial, which is given the optimizers by name."""
        task = place.trainer.task
        if not self._entries:
            found, traits = entries_of(self.header.settings, task, self.files), self.plan.traits
            self._entries = {
                n: replace(e, traits=traits.get(n, Traits())) for n, e in found.items()
            }
        return super().run({**job, "entries": self._entries}, place)

    def summarize(self, results: Results, status: str) -> Summary:
        """The verdicts and their evidence."""
        return summarize(self.header, results, status)

    def too_little(self, summary: Mapping[str, Any]) -> str | None:
        """Without a verdict nothing is said."""
        if summary["verdicts"]:
            return None
        return "The budget was over before two seeds of the verdicts were trained"


STUDY = Compare
