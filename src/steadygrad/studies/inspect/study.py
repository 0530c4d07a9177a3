"""The study behind ``steadygrad inspect``."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from steadygrad.scale.choose import parts_of
from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import accumulation
from steadygrad.studies.inspect.diagnosis import by_phase, diagnose, propose, shares_of
from steadygrad.studies.inspect.explain import code, explain
from steadygrad.studies.inspect.scalers import given_scales
from steadygrad.studies.inspect.schema import (
    AFTER,
    BEFORE,
    KINDS,
    PARTS,
    SEARCH,
    Accumulation,
    Header,
    Part,
    Phase,
    Plan,
    Settings,
    layers_of,
)
from steadygrad.studies.inspect.trials import TITLES, Runner, make_trials
from steadygrad.studies.schema import Key, Result
from steadygrad.studies.study import Study, Workplace
from steadygrad.studies.trainer import Scaling, Trainer
from steadygrad.studies.trials import Job, Trial

__all__ = ["STUDY", "Inspect"]


class Inspect(Study):
    """Study of float16 gradients: layers that underflow or overflow, and scales that prevent it."""

    name = "inspect"
    # A forward pass that overflows is a finding.
    finite = False
    header: Header

    @classmethod
    def dtype(cls, settings: Settings) -> str:
        """The studied type is float16."""
        return "float16"

    @classmethod
    def scaling(cls) -> Scaling:
        """One loss scale, with which the study begins."""
        return given_scales

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
        check = Trial(("accumulation",), 0, lambda _: {"kind": "accumulation"}, "accumulation")
        chosen = [check] if self.header.settings.accumulation else []
        return [*chosen, *make_trials(self.plan, self.header.task.valid_size)]

    def run(self, job: Job, place: Workplace) -> Result:
        """Runs one trial."""
        if job["kind"] == "accumulation":
            return accumulation.check(place)
        runner = Runner(job, self.plan, place)
        return runner.part(job["part"]) if job["kind"] == "part" else runner.evaluate()

    def milestones(self) -> Mapping[str, Key]:
        """The evaluations with one loss scale and with the proposed scales."""
        return {TITLES[phase]: ("phase", phase) for phase in (BEFORE, AFTER)}

    def summarize(self, results: Results, status: str) -> dict[str, Any]:
        """The diagnosis and the proposal; none before two phases can be compared."""
        parts = results.select(Part)
        phases = by_phase(parts)
        compared = len(phases[BEFORE]) == len(phases[SEARCH]) == PARTS
        diagnosis = diagnose(parts if compared else [])
        proposal = propose(parts) if compared else None
        rows = {
            phase: _phase(phases[phase], results.get(Phase, phase))
            for phase in (BEFORE, AFTER)
            if phases[phase]
        }
        return {
            "task": self.header.task.name,
            "sample": self.header.task.sample,
            "words": [
                *explain(status, rows, diagnosis, proposal),
                *accumulation.explain(results.get(Accumulation)),
            ],
            "diagnosis": {"fault": diagnosis.fault, **vars(diagnosis)},
            "proposal": proposal and {**vars(proposal), "code": code(proposal)},
            "phases": rows,
            "layers": _layers(phases),
        }

    def too_little(self, summary: Mapping[str, Any]) -> str | None:
        """Without a proposal there is nothing to compare, and no diagnosis."""
        if summary["proposal"] is not None:
            return None
        # A part that is cut short is not kept: as much time again would come no further.
        early = "" if summary["phases"] else ", nor was an eighth of the first training done"
        return f"The budget was over before scales were found{early}: nothing is said of the layers"


def _phase(parts: Sequence[Part], end: Phase | None) -> dict[str, Any]:
    return {
        "steps": parts[-1].steps,
        "skipped": sum(part.skipped for part in parts),
        "loss": parts[-1].loss,
        "loss_scale": 2.0 ** parts[-1].scales[""],
        "valid_loss": end.valid_loss if end else None,
        "whole": len(parts) == PARTS,
    }


def _layers(phases: Mapping[str, Sequence[Part]]) -> list[dict[str, Any]]:
    names = layers_of([part for parts in phases.values() for part in parts])
    rows: list[dict[str, Any]] = [{"name": name} for name in names]
    for phase in (BEFORE, AFTER):
        shares = shares_of(phases[phase])
        for row, name in zip(rows, names, strict=True):
            held = {kind: shares.get((name, kind)) for kind in KINDS}
            overflows = sum(part.overflows.get(name, 0) for part in phases[phase])
            row[phase] = {**(held if any(held.values()) else {}), "overflows": overflows}
    return rows


STUDY = Inspect
