"""The study behind ``steadygrad inspect``."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from steadygrad.scale.choose import parts_of
from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.findings import summarize
from steadygrad.studies.inspect.plan import make_plan, make_trials
from steadygrad.studies.inspect.scalers import given_scales
from steadygrad.studies.inspect.schema import STEPS, Plan
from steadygrad.studies.study import Study
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Trial

__all__ = ["STUDY", "Inspect"]


class Inspect(Study):
    """Study of float16 gradients: layers that underflow or overflow, and scales that prevent it."""

    name = "inspect"
    # One loss scale to begin with. A forward pass that overflows is a finding.
    training: ClassVar[Mapping[str, Any]] = {
        "dtype": "float16",
        "finite": False,
        "scaling": given_scales,
    }
    header: schema.Header

    @classmethod
    def make_plan(cls, settings: Any, trainer: Trainer, *, speed: float, workers: int) -> Plan:
        """The steps that the settings name, or that fit the budget."""
        task, layers = trainer.task, tuple(parts_of(trainer.model))
        plan = Plan(batch_size=task.batch_size, steps=STEPS, layers=layers, work=1)
        return make_plan(settings, plan, len(task.valid), speed=speed, workers=workers)

    def trials(self) -> Sequence[Trial]:
        """The parts of each phase, and an evaluation after the first phase and the last."""
        accumulation = self.header.settings.accumulation
        return make_trials(self.plan, self.header.task.valid_size, accumulation=accumulation)

    def summarize(self, results: Results, status: str) -> schema.Summary:
        """The diagnosis and the proposal; none before two phases can be compared."""
        return summarize(self.header, results, status)

    def too_little(self, summary: Mapping[str, Any]) -> str | None:
        """Without two phases there is nothing to compare, and no diagnosis."""
        if summary["findings"][0]["verdict"] != "unmeasured":
            return None
        # A part that is cut short is not kept: as much time again would come no further.
        early = "" if summary["phases"] else ", nor was an eighth of the first training done"
        return f"The budget was over before scales were found{early}: nothing is said of the layers"


STUDY = Inspect
