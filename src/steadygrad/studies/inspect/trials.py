"""The trials of ``inspect``, and how each is run.

A part is an eighth of a phase of training, and starts from the state after the part before it. The
phases that use one loss scale and that find scales do not need each other. The phase that tries
the proposed scales needs both: the proposal is arithmetic on what they recorded.
"""

import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from steadygrad.studies.checkpoint import State
from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import scalers
from steadygrad.studies.inspect.diagnosis import propose
from steadygrad.studies.inspect.histogram import ExponentHistograms
from steadygrad.studies.inspect.nonfinite import nonfinite_at_any_scale
from steadygrad.studies.inspect.schema import (
    AFTER,
    BEFORE,
    PARTS,
    PHASES,
    SEARCH,
    Part,
    Phase,
    Plan,
)
from steadygrad.studies.order import generators, generators_kept, main_order
from steadygrad.studies.schema import Key
from steadygrad.studies.study import Workplace
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Job, Trial, evaluation_cost
from steadygrad.watch import GradientWatch

__all__ = ["TITLES", "Runner", "make_trials"]

TITLES = {BEFORE: "one loss scale", SEARCH: "finding scales", AFTER: "the proposed scales"}


def make_trials(plan: Plan, valid_size: int) -> list[Trial]:
    """All trials, in the order in which they are recorded; one evaluates ``valid_size`` samples."""
    found: list[Trial] = []
    measured = tuple(("part", phase, part) for phase in (BEFORE, SEARCH) for part in range(PARTS))
    for phase in PHASES:
        first: tuple[Key, ...] = measured if phase == AFTER else ()
        needs = first
        for part in range(PARTS):
            key: Key = ("part", phase, part)
            start, stop = _steps(plan, part)
            cost = (stop - start) * plan.batch_size
            found.append(Trial(key, cost, partial(_job, key), TITLES[phase], needs))
            needs = (*first, key)
        if phase != SEARCH:
            key, cost = ("phase", phase), evaluation_cost(valid_size)
            what = f"evaluating {TITLES[phase]}"
            found.append(Trial(key, cost, partial(_job, key), what, needs))
    return found


def _steps(plan: Plan, part: int) -> tuple[int, int]:
    """First step of a part, and the step after its last one."""
    return plan.steps * part // PARTS, plan.steps * (part + 1) // PARTS


def _job(key: Key, results: Results) -> Job:
    """The job; one that tries the proposed scales carries them."""
    job: dict[str, Any] = dict(zip(("kind", "phase", "part"), key, strict=False))
    if job["phase"] == AFTER:
        job["proposal"] = vars(propose(results.select(Part)))
    return job


class Runner:
    """Runs trials of one phase, with the scales of its job."""

    def __init__(self, job: Job, plan: Plan, place: Workplace) -> None:
        self.phase, self.plan, self.place, self.trainer = job["phase"], plan, place, place.trainer
        self.proposal: Mapping[str, Any] = job.get("proposal", {})

    def part(self, part: int) -> Part:
        """Trains over a part of the phase, and keeps the state after it."""
        trainer, (first, last) = self.trainer, _steps(self.plan, part)
        self._enter(part)
        # Phases see the same data and the same random numbers.
        trainer.seed_everything("train", part)
        histograms = self._train(first, last)
        finite = [loss for loss in trainer.take_losses() if math.isfinite(loss)]
        samples = last * self.plan.batch_size
        state = trainer.state(samples)
        # The other ranks continue, and may read the file, when it is written.
        trainer.context.on_main(lambda: self._keep(part, state))
        return Part(
            phase=self.phase,
            part=part,
            steps=last,
            samples=samples,
            loss=math.fsum(finite) / len(finite) if finite else None,
            scales={name: math.log2(scale) for name, scale in trainer.scaler.get_scales().items()},
            **histograms.fields(),
        )

    def evaluate(self) -> Phase:
        """Evaluates the model at the end of the phase."""
        self._enter(PARTS)
        checkpoints = self.place.checkpoints
        self.trainer.context.on_main(lambda: checkpoints.drop(f"{self.phase}-{PARTS - 2}"))
        loss = self.place.evaluate()
        return Phase(phase=self.phase, valid_loss=loss if math.isfinite(loss) else None)

    def _enter(self, parts: int) -> None:
        """Puts the trainer into the state after a number of parts of the phase."""
        state, last = None, parts - 1
        if parts:
            samples = _steps(self.plan, last)[1] * self.plan.batch_size
            state = self.place.state(f"{self.phase}-{last}", samples, partial(self.part, last))
        given = partial(scalers.given_scales, **self.proposal)
        self.trainer.scaling = scalers.searched_scales if self.phase == SEARCH else given
        if "torch._dynamo" in sys.modules:
            # A new scaler has new hooks: a compiled model would be compiled once more each time,
            # until the compiler's limit is reached.
            torch.compiler.reset()
        if state is None:
            self.trainer.restart()
        else:
            self.trainer.load(state)

    def _keep(self, part: int, state: State) -> None:
        """Keeps a state, and drops states that no trial needs any more."""
        self.place.checkpoints.save(f"{self.phase}-{part}", state)
        # The one before is needed once more if this part is killed before it is recorded.
        self.place.checkpoints.drop(f"{self.phase}-{part - 2}")
        for searched in range(PARTS) if self.phase == AFTER else ():
            self.place.checkpoints.drop(f"{SEARCH}-{searched}")

    def _train(self, first: int, last: int) -> ExponentHistograms:
        """Trains over some steps, counts them, and moves the scales by the rule of the phase."""
        trainer, size, searching = self.trainer, self.plan.batch_size, self.phase == SEARCH
        order = main_order(len(trainer.task.train), trainer.seed)
        histograms = ExponentHistograms([*trainer.scaler.get_scales()], unscaled=searching)
        device = trainer.context.device
        before, restore_rng = trainer.scaler.state_dict(), generators(device)
        watch = GradientWatch(trainer.model)
        for end in trainer.run(order, first * size, last * size, size):
            scaler, nonfinite = trainer.scaler, list[str]()
            culprits, measured = scaler.culprits(), scaler.measured
            indices = order.take(end - size, size)
            forward = _forward_fault(watch, trainer, indices) if culprits else None
            if forward is not None:
                # No scale would have prevented it, so none moves.
                scaler.load_state_dict(before)
                histograms.add_forward(forward)
            elif culprits and not searching:
                found = nonfinite_at_any_scale(trainer, indices, restore_rng)
                nonfinite = [name for name in culprits if name in found]
                own = self.proposal.get("layer_scales", {})
                scalers.follow_one_scale(scaler, culprits, before, own, nonfinite)
                watch.report()  # of the repeated step
            if forward is None:
                histograms.add(measured, culprits, nonfinite)
            before, restore_rng = scaler.state_dict(), generators(device)
            self.place.advance(size, TITLES[self.phase])
        watch.close()
        return histograms


def _forward_fault(watch: GradientWatch, trainer: Trainer, indices: Tensor) -> str | None:
    """The cause of a step that was not finite, if it lies before the backward pass."""
    found, context = watch.report(), trainer.context
    if found is not None and found.in_forward:
        return found.cause
    if all(map(math.isfinite, context.sum([trainer.last_loss()]))):
        return None
    with generators_kept(context.device):
        batch = trainer.task.train.batch(context.share(indices))
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    nan = any(isinstance(x, Tensor) and bool(x.isnan().any()) for x in leaves)
    more = ", and NaN is in the batch" if any(context.gather(nan)) else ""
    return f"the loss is not finite, though the model's outputs are{more}"
