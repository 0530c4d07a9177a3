"""How each trial of ``compare`` is run."""

import math
import time
from collections.abc import Mapping
from statistics import median

import torch
from torch.optim import Optimizer

from steadygrad.record.schema.compare import Plan, Run, Speed
from steadygrad.studies.compare.optimizers import Entry
from steadygrad.studies.compare.trials import MARKS, TURNS
from steadygrad.studies.order import main_order
from steadygrad.studies.study import Workplace
from steadygrad.studies.trainer import Diverged, Rate

__all__ = ["Runner"]

# Turns before those that count.
WARM_UP = 4


class Runner:
    """Runs trials; ``entries`` are the optimizers by name."""

    def __init__(self, plan: Plan, entries: Mapping[str, Entry], place: Workplace) -> None:
        self.plan, self.entries, self.place, self.trainer = plan, entries, place, place.trainer

    def training(
        self, optimizer: str, multiple: int, samples: int, point: int, step: int, repeat: int
    ) -> Run:
        """Trains from scratch; all optimizers see the same weights, data and random numbers."""
        trainer, entry = self.trainer, self.entries[optimizer]
        lr, task = entry.lr * 2.0**step, trainer.task
        trainer.task = entry.task(task, lr, point, samples)
        try:
            trainer.restart(repeat)
            trainer.seed_everything("run", repeat)
            what = f"{optimizer} at {lr:.3g} over {samples:,}"
            curve = self._curve(multiple * self.plan.batch_size, samples, repeat, what)
        except Diverged:
            curve = [(samples, math.inf)]
        finally:
            trainer.task = task
        return Run(
            optimizer=optimizer,
            multiple=multiple,
            samples=samples,
            point=point,
            step=step,
            repeat=repeat,
            lr=lr,
            loss=curve[-1][1],
            curve=tuple(curve),
        )

    def _curve(self, size: int, samples: int, repeat: int, what: str) -> list[tuple[int, float]]:
        """Trains, and evaluates at the end; for the verdicts also on the way."""
        trainer, count = self.trainer, MARKS if repeat else 1
        marks = [samples * part // count for part in range(1, count + 1)]
        order, at, found = main_order(len(trainer.task.train), trainer.seed, repeat), 0, []
        for seen in trainer.run(order, 0, samples, size, rate=Rate(total=samples)):
            self.place.advance(seen - at, what)
            at = seen
            if at >= marks[len(found)]:
                loss = self.place.evaluate()
                found.append((at, loss if math.isfinite(loss) else math.inf))
        return found

    def speed(self) -> Speed:
        """Measures a step with each optimizer, in turns on the same gradients."""
        trainer, size = self.trainer, self.plan.batch_size
        model, indices = trainer.model, torch.arange(size)
        # At a rate of zero the weights stay, so that all steps see the same gradients.
        made = {name: entry.make(model, entry.lr) for name, entry in self.entries.items()}
        for optimizer in made.values():
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        seconds: dict[str, list[float]] = {name: [] for name in ("", *made)}
        for _ in range(WARM_UP + TURNS):
            trainer.context.poll()
            began = self._clock()
            trainer.backward(indices)
            seconds[""].append(self._clock() - began)
            for name, optimizer in made.items():
                began = self._clock()
                optimizer.step()
                seconds[name].append(self._clock() - began)
            model.zero_grad()
            self.place.advance(size, "time of a step")
        common, *own = (median(some[WARM_UP:]) for some in seconds.values())
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        trainer.restart()
        return Speed(
            state_bytes={name: _state_bytes(o) / numel for name, o in made.items()},
            time={name: common + time for name, time in zip(made, own, strict=True)},
        )

    def _clock(self) -> float:
        device = self.trainer.context.device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        return time.monotonic()


def _state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state; a tensor that parameters share counts once."""
    tensors = {
        id(value): value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
