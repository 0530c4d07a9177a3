"""The units of work, in their fixed order.

A unit is a part of a phase: a pure function of the task, the seed and the state before it. Its
event is recorded when it is whole; one that is cut short leaves no trace.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.engine import Engine, Scaling, State
from steadygrad.studies.inspect import scalers
from steadygrad.studies.inspect.plan import AFTER, BEFORE, PARTS, SEARCH, Plan
from steadygrad.studies.inspect.probe import Chance, chance, never_finite
from steadygrad.studies.inspect.tally import Tally
from steadygrad.studies.inspect.verdict import propose
from steadygrad.studies.ledger import Ledger
from steadygrad.studies.order import main_order

__all__ = ["Units", "parts_in_order"]

PHASES = (BEFORE, SEARCH, AFTER)
WHAT = {BEFORE: "one loss scale", SEARCH: "finding scales", AFTER: "the scales proposed"}


class Units:
    """Runs a plan.

    Args:
        engine: Trains.
        plan: The amounts of work.
        ledger: Keeps what is done.
        checkpoints: Keeps the state after the last part.
        advance: Told how many samples of work are done, as they are done, and on what.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        ledger: Ledger,
        checkpoints: Checkpoints,
        *,
        advance: Callable[[int, str], None],
    ) -> None:
        self.engine, self.plan, self.ledger = engine, plan, ledger
        self.checkpoints, self.advance = checkpoints, advance
        self._states: dict[int, State] = {}

    def run(self) -> None:
        """Does everything that is not recorded yet.

        Raises:
            Halt: When the study has to stop.
            Diverged: If the training loss does not stay finite.
        """
        for phase in PHASES:
            for part in range(PARTS):
                if self.ledger.find("part", phase, part) is None:
                    self._part(phase, part)
            if phase != SEARCH and self.ledger.find("phase", phase) is None:
                self._end(phase)
            if phase == SEARCH and self.ledger.find("proposal") is None:
                self._propose()

    def _propose(self) -> None:
        settled = parts_in_order(self.ledger, BEFORE)[-1]["scales"][""]
        proposal = propose(parts_in_order(self.ledger, BEFORE, SEARCH), 2.0**settled)
        self.ledger.add(
            "proposal", loss_scale=proposal.loss_scale, layer_scales=dict(proposal.layer_scales)
        )

    def _end(self, phase: str) -> None:
        """Evaluates what a phase has come to."""
        self._enter(phase, self.state(phase, PARTS - 1))
        loss = self.engine.evaluate()
        self.advance(self.plan.evaluation, "")
        self.ledger.add("phase", phase=phase, valid_loss=loss)

    def _own(self, phase: str) -> Mapping[str, float]:
        """Layers that have a scale of their own in a phase that does not search."""
        proposal = self.ledger.find("proposal") or {}
        return proposal.get("layer_scales", {}) if phase == AFTER else {}

    def _enter(self, phase: str, state: State | None) -> None:
        """Puts the engine where a phase begins, or where it was."""
        proposal = self.ledger.find("proposal") or {"loss_scale": 1.0}
        makers: dict[str, Scaling] = {
            BEFORE: scalers.one_scale,
            SEARCH: scalers.searched_scales,
            AFTER: lambda model: scalers.proposed_scales(
                model, proposal["loss_scale"], self._own(AFTER)
            ),
        }
        self.engine.scaling = makers[phase]
        if "torch._dynamo" in sys.modules:
            # A new scaler has new hooks: a compiled model would be compiled once more each time,
            # until the compiler's limit is reached.
            torch.compiler.reset()
        if state is None:
            self.engine.restart()
        else:
            self.engine.load(state)

    def _part(self, phase: str, part: int) -> State:
        began = time.monotonic()
        self._enter(phase, self.state(phase, part - 1) if part else None)
        # Phases see the same data and the same random numbers.
        self.engine.seed_everything("train", part)
        first, last = self.plan.stretch(phase, part)
        fields = self._train(phase, first, last)
        number = PHASES.index(phase) * PARTS + part
        state = self.engine.state(last * self.plan.batch_size)
        if self.engine.ranks.is_main:
            self.checkpoints.save(number, state)
        self.ledger.add("part", phase=phase, part=part, steps=last, **fields, time=_since(began))
        if self.engine.ranks.is_main and number:
            self.checkpoints.drop(number - 1)
        self._states = {number: state}
        return state

    def _train(self, phase: str, first: int, last: int) -> dict[str, Any]:
        engine, size = self.engine, self.plan.batch_size
        order = main_order(len(engine.task.train), engine.seed)
        tally = Tally(list(engine.scaler.get_scales()), plain=phase == SEARCH)
        losses = []
        before = engine.scaler.state_dict(), chance(engine)
        for end, loss in engine.run(order, first * size, last * size, size):
            losses.append(loss)
            self._look(phase, tally, order.take(end - size, size), *before)
            before = engine.scaler.state_dict(), chance(engine)
            self.advance(size, WHAT[phase])
        scales = {name: math.log2(own) for name, own in engine.scaler.get_scales().items()}
        return {
            "samples": last * size,
            "loss": math.fsum(losses) / len(losses) if losses else math.nan,
            "scales": scales,
            **tally.fields(),
        }

    def _look(
        self,
        phase: str,
        tally: Tally,
        indices: Tensor,
        state: Mapping[str, Any],
        random: Chance,
    ) -> None:
        """Counts a step, and moves the scales as its phase has it.

        Args:
            phase: The phase.
            tally: Counts.
            indices: The step's samples.
            state: The scaler's before the step.
            random: The random numbers before the step.
        """
        scaler = self.engine.scaler
        culprits, measured, hopeless = scaler.culprits(), scaler.measured, list[str]()
        if phase != SEARCH and culprits:
            found = never_finite(self.engine, indices, random)
            hopeless = [name for name in culprits if name in found]
            scalers.follow_one_scale(scaler, culprits, state, self._own(phase), hopeless)
        tally.add(measured, culprits, hopeless)

    def state(self, phase: str, part: int) -> State:
        """The state after a part: kept, read, or trained again."""
        number = PHASES.index(phase) * PARTS + part
        if number not in self._states:
            loaded = self.checkpoints.load(number)
            # On every rank or on none: training again takes all of them.
            whole = all(self.engine.ranks.gather(loaded is not None))
            self._states[number] = loaded if loaded and whole else self._part(phase, part)
        return self._states[number]


def parts_in_order(ledger: Ledger, *phases: str) -> list[dict[str, Any]]:
    """The recorded parts of some phases, or of all, in the order of the work."""
    wanted: Sequence[str] = phases or PHASES
    found = [event for event in ledger.select("part") if event["phase"] in wanted]
    return sorted(found, key=lambda event: (PHASES.index(event["phase"]), event["part"]))


def _since(began: float) -> dict[str, float]:
    return {"seconds": time.monotonic() - began}
