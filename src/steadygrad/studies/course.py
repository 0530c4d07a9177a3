"""The course of a training: its random numbers, the order of its data, its learning rates.

Seeds, generators and orders are pure functions of the study's seed and of names.
"""

import copy
import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.schema import seed_for
from steadygrad.tasks import Task
from steadygrad.tasks.start import TASKS_OWN

# Samples of a run whose learning rate does not decay.
ENDLESS = 1 << 62


def generators_kept(device: torch.device) -> ExitStack:
    """Puts Python's, numpy's and torch's generators back into their states when it is closed."""
    kept = ExitStack()
    kept.callback(random.setstate, random.getstate())
    kept.callback(np.random.set_state, np.random.get_state())
    own = [] if device.type == "cpu" else [torch.get_device_module(device)]
    for module in (torch, *own):
        kept.callback(module.set_rng_state, module.get_rng_state())
    return kept


class Order:
    """An endless sequence of sample numbers: epochs, each a permutation of all ``size`` samples.

    Sequences with different names, ``stream``, are independent.
    """

    def __init__(self, size: int, seed: int, stream: str = "main") -> None:
        self.size, self._seed, self._stream = size, seed, stream
        self._epoch: tuple[int, Tensor] | None = None

    def take(self, start: int, count: int) -> Tensor:
        """The sample numbers at positions ``start`` to ``start + count``, shape ``(count,)``."""
        first, offset = divmod(start, self.size)
        last = (start + count - 1) // self.size
        epochs = [self.epoch(number) for number in range(first, last + 1)]
        return torch.cat(epochs)[offset : offset + count]

    def epoch(self, number: int) -> Tensor:
        """The permutation of one epoch, with shape ``(size,)``."""
        if self._epoch is None or self._epoch[0] != number:
            generator = torch.Generator().manual_seed(seed_for(self._seed, self._stream, number))
            self._epoch = number, torch.randperm(self.size, generator=generator)
        return self._epoch[1]


@dataclass(frozen=True)
class Rate:
    """A learning rate relative to the task's own."""

    # Batch size that the task's rule scales the rate to; None: the task's own.
    batch_size: int | None = None
    factor: float = 1.0  # what the scaled rate is multiplied by
    warmup_samples: int = 0  # samples over which the rate rises from `start` times the task's own
    total: int = 0  # samples of the whole run, for a task whose rate decays; 0: it does not
    start: float = 1.0
    stands_for: int = 0  # samples of a longer run whose warm-up and decay are shortened to `total`


class RateSetter:
    """Sets the learning rate of an optimizer that is as the task made it.

    A state that is loaded later brings the options of the time at which it was saved. With
    ``keep_half_life`` Adam's second moment and the weight decay keep theirs in samples.
    """

    def __init__(self, optimizer: Optimizer, task: Task, keep_half_life: bool) -> None:
        self._optimizer, self._task, self._keep_half_life = optimizer, task, keep_half_life
        self._options = [
            {name: copy.deepcopy(group[name]) for name in TASKS_OWN if name in group}
            for group in optimizer.param_groups
        ]
        # As set, and as steps saw them. A hook that holds this object would make a cycle.
        self._rates = rates = [_rates(optimizer)]
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(_rates(optimizer)))
        begun = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        # Torch's own need not begin with another rate.
        if begun != [lr for lr, _ in rates[0]] or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            self.check("a scheduler on it")

    def __call__(self, rate: Rate, seen: float = 0) -> None:
        """Sets a learning rate, after ``seen`` samples of the run."""
        task = self._task
        size = rate.batch_size or task.batch_size
        factor = rate.factor * learning_rate(1.0, size, task.batch_size, task.lr_rule)
        if seen < rate.warmup_samples:
            factor = rate.start + (factor - rate.start) * seen / rate.warmup_samples
        whole = rate.stands_for or rate.total or ENDLESS
        course = task.lr_factor(seen * whole / (rate.total or whole), whole)
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            lr = options["lr"] * factor * course
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            if self._keep_half_life and (size, factor) != (task.batch_size, 1.0):
                _keep_half_life(group, options, size / task.batch_size, factor)
        self._rates[:] = [_rates(self._optimizer)]

    def check(self, found: str = "") -> None:
        """Refuses an optimizer that has changed a rate since it was set, or was ``found`` to."""
        for rates in (*self._rates, _rates(self._optimizer)):
            for rate, given in zip(rates, self._rates[0], strict=False):
                found = found if rate == given else f"a rate of its own, {float(rate[0]):g}"
        if found:
            raise InputError(
                f"The optimizer of {self._task.name} should step at the learning rate that is set. "
                f"Found {found}. Remedy: no scheduler, hook or step of its own that sets a rate; "
                "Task.warmup_samples and Task.lr_decay."
            )


def has_second_moment(optimizer: Optimizer, *, needed: bool) -> bool:
    """Whether the second of two betas is a second moment's decay, by the state after a step.

    Where it is ``needed``, an optimizer with betas of another kind is refused.
    """
    names = {name for state in optimizer.state.values() for name in state}
    betas = optimizer.param_groups[0].get("betas", ())
    found = len(betas) == 2 and not names.isdisjoint(("exp_avg_sq", "exp_inf"))
    if needed and betas and not found:
        raise InputError(
            "Option `--keep-half-life` needs an optimizer with two betas, the second of them for "
            f"its second moment exp_avg_sq. Found {type(optimizer).__name__} with betas {betas}. "
            "Remedy: leave it out."
        )
    return found


def _rates(optimizer: Optimizer) -> list[tuple[Any, int]]:
    """The rates of an optimizer's groups; of tensors the versions, as reading them would wait."""
    return [(group["lr"], getattr(group["lr"], "_version", 0)) for group in optimizer.param_groups]


def _keep_half_life(group: Any, options: Mapping[str, Any], multiple: float, factor: float) -> None:
    r"""Keeps the half-life of Adam's second moment and of the weight decay in samples.

    A step of ``multiple`` times the batch forgets as much as ``multiple`` steps:
    :math:`\beta_2^k`, and :math:`(1 - \eta\lambda)^k \approx 1 - (f\eta)(\lambda k / f)`.

    References:
        | Small Batch Size Training for Language Models (Marek et al., 2025)
        | https://arxiv.org/abs/2507.07101
    """
    if "betas" in options:
        beta1, beta2 = options["betas"]
        group["betas"] = (beta1, beta2**multiple)
    if "weight_decay" in options and factor > 0:
        group["weight_decay"] = options["weight_decay"] * multiple / factor
