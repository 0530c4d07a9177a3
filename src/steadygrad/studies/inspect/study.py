"""The study behind ``steadygrad inspect``."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from steadygrad.record import Event, Key
from steadygrad.record.schema.inspect import AFTER, BEFORE, Header, Plan, Settings
from steadygrad.scale.layers import parts_of
from steadygrad.studies.inspect.scalers import one_scale
from steadygrad.studies.inspect.summary import summarize
from steadygrad.studies.inspect.trials import TITLES, make_trials, run_job
from steadygrad.studies.journal import Journal
from steadygrad.studies.study import Job, Study, Trial, Workplace
from steadygrad.studies.trainer import Scaling, Trainer

__all__ = ["Inspect"]


class Inspect(Study):
    """Where float16 gradients underflow or overflow, and which scales prevent it."""

    name = "inspect"
    header: Header

    @classmethod
    def dtype(cls, settings: Settings) -> str:
        """It is float16 that is studied."""
        return "float16"

    @classmethod
    def scaling(cls) -> Scaling:
        """One loss scale, with which the study begins."""
        return one_scale

    @classmethod
    def make_plan(cls, settings: Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
        """The steps that the settings name; the budget only ends them."""
        task = trainer.task
        layers = tuple(parts_of(trainer.model))
        plan = Plan(batch_size=task.batch_size, steps=settings.steps, layers=layers, work=1)
        work = sum(trial.cost for trial in make_trials(plan, len(task.valid)))
        return msgspec.structs.replace(plan, work=work)

    def trials(self) -> Sequence[Trial]:
        """The parts of each phase, and an evaluation after the first phase and the last."""
        return make_trials(self.plan, self.header.task.valid_size)

    def run(self, job: Job, place: Workplace) -> Event:
        """Runs one trial."""
        return run_job(job, self.plan, place)

    def milestones(self) -> Mapping[str, Key]:
        """The evaluations with one loss scale and with the proposed scales."""
        return {TITLES[phase]: ("phase", phase) for phase in (BEFORE, AFTER)}

    def summarize(self, journal: Journal, status: str) -> dict[str, Any]:
        """The diagnosis and the proposal."""
        return summarize(self.header, journal, status)

    def too_little(self, summary: Mapping[str, Any]) -> str | None:
        """Without a proposal there is nothing to compare, and no diagnosis."""
        if summary["proposal"] is not None:
            return None
        # A part that is cut short is not kept: as much time again would come no further.
        early = "" if summary["phases"] else ", nor was an eighth of the first training done"
        return f"The budget was over before scales were found{early}: nothing is said of the layers"
