"""Learning rates relative to a task's own, and the decay of an optimizer's second moment."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.formulas.batch_size import learning_rate
from steadygrad.tasks import Task

# Samples of a run whose learning rate does not decay.
ENDLESS = 1 << 62
# Options of the optimizer that follow the batch size.
OPTIONS = ("lr", "betas", "weight_decay")


@dataclass(frozen=True)
class Rate:
    """A learning rate relative to the task's own.

    Attributes:
        batch_size: Batch size that the task's rule scales the rate to; None: the task's own.
        factor: What the scaled rate is multiplied by.
        warmup_samples: Samples over which the rate rises from the task's own.
        total: Samples of the whole run, for a task whose rate decays; 0: it does not.
    """

    batch_size: int | None = None
    factor: float = 1.0
    warmup_samples: int = 0
    total: int = 0


class RateSetter:
    """Sets an optimizer's learning rate.

    Args:
        optimizer: The optimizer as the task made it; a state that is loaded later brings the
            options of the time at which it was saved.
        task: The task.
        keep_half_life: Whether Adam's second moment and the weight decay keep their half-life in
            samples at every batch size.
    """

    def __init__(self, optimizer: Optimizer, task: Task, keep_half_life: bool) -> None:
        self._optimizer, self._task, self._keep_half_life = optimizer, task, keep_half_life
        self._options = [
            {name: copy.deepcopy(group[name]) for name in OPTIONS if name in group}
            for group in optimizer.param_groups
        ]
        self._places = second_moment_places(optimizer) if keep_half_life else []
        for place, options in zip(self._places, self._options, strict=False):
            if place is None and "betas" in options:
                raise InputError(
                    "Option `--keep-half-life` needs an optimizer one of whose betas is seen to be "
                    f"its second moment's. Found {type(optimizer).__name__} with betas "
                    f"{options['betas']}, none or several of which could be. Remedy: leave it out."
                )

    def __call__(self, rate: Rate, seen: float = 0) -> None:
        """Sets a learning rate, after ``seen`` samples of the run."""
        task = self._task
        size = rate.batch_size or task.batch_size
        factor = rate.factor * learning_rate(1.0, size, task.batch_size, task.lr_rule)
        if seen < rate.warmup_samples:
            factor = 1.0 + (factor - 1.0) * seen / rate.warmup_samples
        course = task.lr_factor(seen, rate.total or ENDLESS)
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            lr = options["lr"] * factor * course
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self._keep_half_life and size != task.batch_size:
            self._keep(size / task.batch_size, factor)

    def _keep(self, multiple: float, factor: float) -> None:
        r"""Keeps the half-life of Adam's second moment and of the weight decay in samples.

        A step of ``multiple`` times the batch forgets as much as ``multiple`` steps:
        :math:`\beta_2^k`, and :math:`(1 - \eta\lambda)^k \approx 1 - (f\eta)(\lambda k / f)`.

        References:
            | Small Batch Size Training for Language Models (Marek et al., 2025)
            | https://arxiv.org/abs/2507.07101
        """
        groups = self._optimizer.param_groups
        for group, options, place in zip(groups, self._options, self._places, strict=True):
            if place is not None:
                betas = tuple(options["betas"])
                group["betas"] = _with(betas, place, betas[place] ** multiple)
            if "weight_decay" in options and factor > 0:
                group["weight_decay"] = options["weight_decay"] * multiple / factor


def second_moment_places(optimizer: Optimizer) -> list[int | None]:
    """Place of the second moment's decay in each group's ``betas``; None: it cannot be told.

    Number and order of betas differ (Adan's third is that decay, and none of Lion's two), so the
    optimizer shows it: a second moment is a state that is the same for a gradient and its negative.
    After one step from nothing it is proportional to one less its decay; where it begins otherwise,
    its decay is the only one of them that moves it.

    Args:
        optimizer: The optimizer, which is left alone: copies of it take steps on a few zeros.
    """
    groups = optimizer.param_groups
    if not any(map(_betas, groups)):
        return [None] * len(groups)
    devices = {p.device for g in groups for p in g["params"] if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=[*devices]):
            first = _candidates(optimizer, (1.0,), _is_proportional)
            # A first step shows least of all else that moves a state.
            falling = _candidates(optimizer, (3.0, 1.0), _is_moved)
    except Exception:  # Another program's step may raise anything: nothing is known then.
        return [None] * len(groups)
    pairs = zip(first, falling, strict=True)
    return [next((one[0] for one in pair if len(one) == 1), None) for pair in pairs]


def _betas(group: dict[str, Any]) -> tuple[float, ...]:
    found = group.get("betas")
    return tuple(found) if isinstance(found, (tuple, list)) and group["params"] else ()


def _other(beta: float) -> float:
    return (1 + beta) / 2


def _with(betas: tuple[float, ...], place: int, beta: float) -> tuple[float, ...]:
    return (*betas[:place], beta, *betas[place + 1 :])


def _is_proportional(state: Tensor, moved: Tensor, beta: float) -> bool:
    return torch.allclose(moved * (1 - beta), state * (1 - _other(beta)), rtol=1e-3, atol=0.0)


def _is_moved(state: Tensor, moved: Tensor, beta: float) -> bool:
    return not torch.allclose(moved, state, rtol=1e-6, atol=0.0)


def _candidates(
    optimizer: Optimizer, course: Sequence[float], shows: Callable[[Tensor, Tensor, float], bool]
) -> list[list[int]]:
    """For each group the places of betas of which an even state shows something."""
    up, down = _states(optimizer, course), _states(optimizer, [-x for x in course])
    count = max(map(len, map(_betas, optimizer.param_groups)))
    moved = [_states(optimizer, course, place) for place in range(count)]
    found = []
    for g, group in enumerate(optimizer.param_groups):
        even = [n for n, state in up[g].items() if state.any() and torch.equal(state, down[g][n])]
        found.append(
            [
                place
                for place, beta in enumerate(_betas(group))
                if any(shows(up[g][name], moved[place][g][name], beta) for name in even)
            ]
        )
    return found


def _states(
    optimizer: Optimizer, course: Sequence[float], place: int | None = None
) -> list[dict[str, Tensor]]:
    """For each group the states of one parameter's form after steps along a course from zero.

    The course is a factor on the gradient in each step; the beta at ``place`` is another one.
    """
    other = _copy(optimizer)
    params = [p for group in other.param_groups for p in group["params"]]
    for group in other.param_groups:
        if place is not None and place < len(betas := _betas(group)):
            group["betas"] = _with(betas, place, _other(betas[place]))
    if callable(train := getattr(other, "train", None)):
        train()  # schedule-free optimizers take no steps before
    for factor in course:
        for p in params:
            values = torch.linspace(1.0, 2.0, p.numel(), device=p.device) * factor
            p.grad = values.view(p.shape).to(p.dtype)
        other.step()
    return [
        {
            name: value.detach().to("cpu", torch.float64)
            for p in group["params"]
            for name, value in other.state[p].items()
            if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
        }
        for group in other.param_groups
    ]


def _copy(optimizer: Optimizer) -> Optimizer:
    """A copy without states and hooks, each group with one parameter of a few zeros."""
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for group in optimizer.param_groups:
        # The optimizer's own may be elsewhere in it, too.
        memo |= dict.fromkeys(map(id, group["params"]), torch.zeros(2))
        kept = next((p for p in group["params"] if p.requires_grad and p.numel()), None)
        memo[id(group["params"])] = small = []
        if kept is not None:
            zeros = torch.zeros([min(n, 2) for n in kept.shape])
            small.append(nn.Parameter(zeros.to(kept.device, kept.dtype)))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            memo[id(value)] = OrderedDict()
    other = object.__new__(type(optimizer))
    vars(other).update(copy.deepcopy(vars(optimizer), memo))
    return other
