"""The study behind ``steadygrad advise``."""

from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad._checks import InputError
from steadygrad.studies.advise.analysis import Chooser
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import make_plan, make_trials
from steadygrad.studies.advise.schema import Header, Plan, Settings, Summary
from steadygrad.studies.folder import Results
from steadygrad.studies.study import Study
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Trial
from steadygrad.tasks import Task


class Advise(Study):
    """Which batch size: the noise scale, and sample overheads measured by training."""

    name = "advise"
    header: Header

    @classmethod
    def make_plan(cls, settings: Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
        """The longest training whose measurements fit the budget."""
        task = trainer.task
        # A task's own evaluation is done whole on every rank.
        valid = len(task.valid) * (trainer.context.size if task.evaluate else 1)
        kinds = {"decays": task.lr_decay != "none", "noise": not trainer.dependent}
        plan = make_plan(
            settings.budget,
            speed,
            batch_size=task.batch_size,
            train_size=len(task.train),
            workers=workers,
            trials_of=lambda plan: make_trials(plan, valid, lambda key, results: None, **kinds),
        )
        if task.warmup_samples > plan.length:
            raise InputError(
                f"The warm-up should end within the run of {plan.length:,} samples. Found "
                f"Task.warmup_samples = {task.warmup_samples:,}. Remedy: a larger --budget or a "
                "shorter warm-up."
            )
        return plan

    @classmethod
    def largest_batch(cls, plan: Plan, task: Task) -> int:
        """Samples of the largest branch."""
        return max(row[-1] for row in plan.multiples) * plan.batch_size

    def trials(self) -> Sequence[Trial]:
        """Trials in the order of training, then the runs from the initial weights."""
        task, chooser = self.header.task, Chooser(self.header)
        decays, noise = task.lr_decay != "none", not task.dependent
        return make_trials(self.plan, task.valid_size, chooser, decays=decays, noise=noise)

    def summarize(self, results: Results, status: str) -> Summary:
        """The recommendation and its evidence."""
        return summarize(self.header, results, status)

    def too_little(self, summary: Mapping[str, Any]) -> str | None:
        """Without one measured point there is no advice."""
        if any(point["critical"] for point in summary["points"]):
            return None
        return "The budget was over before the first point of training was measured"


STUDY = Advise
