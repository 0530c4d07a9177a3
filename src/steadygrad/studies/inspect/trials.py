"""The trials of ``inspect``, and how each is run.

A part is an eighth of a phase of training, and starts from the state after the part before it. The
phases that use one loss scale and that find scales do not need each other. The phase that tries
the proposed scales needs both: the proposal is arithmetic on what they recorded.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadygrad.record import Event, Key
from steadygrad.record.schema.inspect import AFTER, BEFORE, PARTS, PHASES, SEARCH, Part, Phase, Plan
from steadygrad.studies.checkpoint import State
from steadygrad.studies.inspect import scalers
from steadygrad.studies.inspect.diagnosis import propose
from steadygrad.studies.inspect.histogram import ExponentHistograms
from steadygrad.studies.inspect.nonfinite import nonfinite_at_any_scale, rng_state
from steadygrad.studies.journal import Journal
from steadygrad.studies.order import main_order
from steadygrad.studies.study import Job, Trial, Workplace
from steadygrad.studies.trainer import Scaling, Trainer

__all__ = ["TITLES", "make_trials", "run_job"]

TITLES = {BEFORE: "one loss scale", SEARCH: "finding scales", AFTER: "the proposed scales"}
# Evaluating a sample is its forward pass: about a third of training on it.
EVALUATION_COST = 1 / 3


def make_trials(plan: Plan, valid_size: int) -> list[Trial]:
    """All trials of a plan, in the order in which they are recorded.

    Args:
        plan: The plan.
        valid_size: Samples in one evaluation.
    """
    found: list[Trial] = []
    measured: tuple[Key, ...] = ()
    for phase in PHASES:
        first = needs = measured if phase == AFTER else ()
        for part in range(PARTS):
            key: Key = ("part", phase, part)
            start, stop = _steps(plan, part)
            job = partial(_job, {"event": "part", "phase": phase, "part": part})
            cost = (stop - start) * plan.batch_size
            found.append(Trial(key, cost, job, TITLES[phase], needs))
            needs = (*first, key)
            measured = (*measured, key)
        if phase != SEARCH:
            job = partial(_job, {"event": "phase", "phase": phase})
            cost = _evaluation(valid_size)
            found.append(Trial(("phase", phase), cost, job, f"evaluating {TITLES[phase]}", needs))
    return found


def _steps(plan: Plan, part: int) -> tuple[int, int]:
    """First step of a part, and the step after its last one."""
    return plan.steps * part // PARTS, plan.steps * (part + 1) // PARTS


def _evaluation(valid_size: int) -> int:
    return math.ceil(valid_size * EVALUATION_COST)


def _job(job: Job, journal: Journal) -> Job:
    """The job; one that tries the proposed scales carries them."""
    if job["phase"] != AFTER:
        return job
    return {**job, **propose(journal.select(Part)).as_dict()}


def run_job(job: Job, plan: Plan, place: Workplace) -> Event:
    """Runs one trial; see :meth:`steadygrad.studies.study.Study.run`."""
    runner = _Runner(job, plan, place)
    return runner.part(job["part"]) if job["event"] == "part" else runner.evaluate()


class _Runner:
    """Runs trials of one phase, with the scales of its job."""

    def __init__(self, job: Job, plan: Plan, place: Workplace) -> None:
        self.phase: Any = job["phase"]
        self.loss_scale: float = job.get("loss_scale", 1.0)
        self.layer_scales: Mapping[str, float] = job.get("layer_scales", {})
        self.plan, self.place = plan, place
        self.trainer: Trainer = place.trainer

    def part(self, part: int) -> Part:
        """Trains over a part of the phase, and keeps the state after it."""
        trainer, (first, last) = self.trainer, _steps(self.plan, part)
        self._enter(self.state(part - 1) if part else None)
        # Phases see the same data and the same random numbers.
        trainer.seed_everything("train", part)
        histograms = self._train(first, last)
        losses, samples = trainer.take_losses(), last * self.plan.batch_size
        self._keep(part, trainer.state(samples))
        scales = trainer.scaler.get_scales()
        return Part(
            phase=self.phase,
            part=part,
            steps=last,
            samples=samples,
            loss=math.fsum(losses) / len(losses),
            scales={name: math.log2(scale) for name, scale in scales.items()},
            **histograms.fields(),
        )

    def evaluate(self) -> Phase:
        """Evaluates the model at the end of the phase."""
        self._enter(self.state(PARTS - 1))
        self.trainer.context.on_main(lambda: self._drop(self.phase, PARTS - 2))
        loss = self.trainer.evaluate()
        self.place.advance(_evaluation(len(self.trainer.task.valid)), "")
        return Phase(phase=self.phase, valid_loss=loss)

    def state(self, part: int) -> State:
        """The state after a part: read, or trained again."""
        samples = _steps(self.plan, part)[1] * self.plan.batch_size
        found = self.place.checkpoints.load(f"{self.phase}-{part}", samples)
        # On every rank or on none: training again takes all of them.
        if all(self.trainer.context.gather(found is not None)) and found is not None:
            return found
        self.place.repeated.append(self.part(part))
        return self.trainer.state(samples)

    def _keep(self, part: int, state: State) -> None:
        """Keeps a state, and drops those that no trial needs any more."""

        def keep() -> None:
            self.place.checkpoints.save(f"{self.phase}-{part}", state)
            # The one before is needed once more if this part is killed before it is recorded.
            self._drop(self.phase, part - 2)
            if self.phase == AFTER:
                self._drop(SEARCH, *range(PARTS))

        # The other ranks go on, and may read the file, when it is written.
        self.trainer.context.on_main(keep)

    def _drop(self, phase: str, *parts: int) -> None:
        for part in parts:
            self.place.checkpoints.drop(f"{phase}-{part}")

    def _enter(self, state: State | None) -> None:
        """Puts the trainer where the phase begins, or into a state of it."""
        makers: dict[str, Scaling] = {
            BEFORE: scalers.one_scale,
            SEARCH: scalers.searched_scales,
            AFTER: lambda m: scalers.proposed_scales(m, self.loss_scale, self.layer_scales),
        }
        self.trainer.scaling = makers[self.phase]
        if "torch._dynamo" in sys.modules:
            # A new scaler has new hooks: a compiled model would be compiled once more each time,
            # until the compiler's limit is reached.
            torch.compiler.reset()
        if state is None:
            self.trainer.restart()
        else:
            self.trainer.load(state)

    def _train(self, first: int, last: int) -> ExponentHistograms:
        trainer, size = self.trainer, self.plan.batch_size
        order = main_order(len(trainer.task.train), trainer.seed)
        names = list(trainer.scaler.get_scales())
        histograms = ExponentHistograms(names, unscaled=self.phase == SEARCH)
        before = trainer.scaler.state_dict(), rng_state(trainer)
        for end in trainer.run(order, first * size, last * size, size):
            self._observe_step(histograms, order.take(end - size, size), *before)
            before = trainer.scaler.state_dict(), rng_state(trainer)
            self.place.advance(size, TITLES[self.phase])
        return histograms

    def _observe_step(
        self,
        histograms: ExponentHistograms,
        indices: Tensor,
        scaler_state: Mapping[str, Any],
        restore_rng: Callable[[], None],
    ) -> None:
        """Counts a step, and moves the scales by the rule of the phase."""
        scaler, layers = self.trainer.scaler, self.layer_scales
        culprits, measured, nonfinite = scaler.culprits(), scaler.measured, list[str]()
        if self.phase != SEARCH and culprits:
            found = nonfinite_at_any_scale(self.trainer, indices, restore_rng)
            nonfinite = [name for name in culprits if name in found]
            scalers.follow_one_scale(scaler, culprits, scaler_state, layers, nonfinite)
        histograms.add(measured, culprits, nonfinite)
