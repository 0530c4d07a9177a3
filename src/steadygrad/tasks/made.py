"""Models and optimizers of a task's own functions, checked before they are used."""

import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad._checks import InputError
from steadygrad.tasks.guard import TaskError, guarded

__all__ = [
    "check_gradients",
    "check_model",
    "check_model_maker",
    "fingerprints",
    "make_optimizer",
    "optimizer_of",
]


def check_model(model: Any) -> nn.Module:
    """Returns the model of ``Task.make_model``, which has to be a module with values.

    Raises:
        TaskError: If it is none, or some of its parameters have no shape yet.
    """
    if not isinstance(model, nn.Module) or any(map(is_lazy, model.parameters())):
        found = "lazy parameters in it" if isinstance(model, nn.Module) else type(model).__name__
        raise TaskError(
            f"Task.make_model should return a torch.nn.Module with values. Found {found}. Remedy: "
            "end the function with `return model`, after one batch through it if it is lazy."
        )
    return model


def _parts(model: nn.Module) -> dict[str, Tensor]:
    """This process's parts of a model's state, where they are plain tensors."""
    # Not above: it loads torch.distributed, and modules that a file beside a task may replace.
    from steadygrad.shards import local

    state = {name: local(x) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    plain = (torch.strided, Tensor)
    return {name: x for name, x in state.items() if (x.layout, type(x)) == plain and x.numel()}


class RandomDraws(TorchDispatchMode):
    """Random numbers that no seed and no generator of the code within decides."""

    draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Seeds a random operation by the number of those before it."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            torch.manual_seed(self.draws)
            if "generator" in kwargs:
                kwargs["generator"] = None
        return func(*args, **kwargs)


def fingerprints(model: nn.Module) -> dict[str, int]:
    """Checksums of this process's part of a model's state, by name."""
    return {
        name: zlib.crc32(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, part in _parts(model).items()
    }


def check_model_maker(
    make: Callable[[int], nn.Module], before: Mapping[str, int], after: Mapping[str, int]
) -> None:
    """Checks that models are made anew, and that the seeds decide over weights that are drawn.

    Pretrained and constant weights are alike with other random numbers as well.

    Args:
        make: Makes the model of a seed.
        before: Checksums of seed 0's before a training step.
        after: Those after it.

    Raises:
        InputError: If a model has what that step made, or the weights are the same with two seeds.
    """
    first = fingerprints(make(0))
    for name in [n for n, value in first.items() if value == after.get(n) != before.get(n)][:1]:
        raise InputError(
            f"Task.make_model should make a new model at each call. Found {name!r} of the last "
            "one in it, as training leaves it. Remedy: make the model, or a copy.deepcopy of one, "
            "inside the function; of a part that is shared, requires_grad_(False)."
        )
    other = fingerprints(make(1))
    # Where a model cannot be made so, it is not known.
    with suppress(TaskError), RandomDraws():  # type: ignore[no-untyped-call]
        drawn = first.items() - fingerprints(make(0)).items() if first == other else ()
        for name, _ in sorted(drawn)[:1]:
            raise InputError(
                "Task.make_model should draw its weights anew for each seed of the study. Found "
                f"the same {name!r} under two seeds. Remedy: no torch.manual_seed, and no "
                "generator with a seed of its own, in the function."
            )


def make_optimizer(
    make: Callable[[float], Any], model: nn.Module, lr: float, what: str, *, varied: bool = False
) -> Optimizer:
    """Makes an optimizer, and a second one to see whether the learning rate is used.

    Args:
        make: From a learning rate, which some groups may multiply or leave aside, to an optimizer.
        model: The model.
        lr: The learning rate.
        what: The function's name.
        varied: Whether optimizers with other rates will be made.

    Raises:
        TaskError: If it is no optimizer, not a new one, does not have the rate, or the model has
            changed.
    """
    # The objects are kept: one that is freed may give its identity to another.
    before, _kept = _traits(model, varied)
    first = optimizer_of(make, lr, what)
    after, _ = _traits(model, varied)
    other = optimizer_of(make, 2 * lr, what)
    rates, others = ([*map(_rate, made.param_groups)] for made in (first, other))
    asked = not varied and any(math.isclose(rate, lr, rel_tol=1e-6) for rate in rates)
    # What is trained next, and states that are loaded, would not be of this model.
    if after != before:
        found = "parameters with other values, exchanged, frozen or with other hooks"
        remedy = "make the model like that in Task.make_model"
    elif first is other or first.state is other.state:
        found, remedy = "the one that was returned before", "make it inside the function"
    elif any(map(math.isnan, rates)) or (rates == others and not asked):
        shown = ", ".join(f"{rate:g}" for rate in rates).replace("nan", "no number")
        found = f"{shown} for {lr:g} and for {2 * lr:g}"
        remedy = "pass lr on to it"
    else:
        return first
    raise TaskError(
        f"{what} should make a new optimizer at each call, at the learning rate that it is handed, "
        f"and leave the model as it is. Found {found}. Remedy: {remedy}."
    )


def _rate(group: Mapping[str, Any]) -> float:
    """A group's learning rate; NaN if it has no number."""
    with suppress(KeyError, TypeError, ValueError, RuntimeError):
        return float(group["lr"])
    return math.nan


def _traits(model: nn.Module, layout: bool) -> tuple[list[Any], list[Any]]:
    """The traits of a model that an optimizer's maker must leave alone, and their owners."""
    ps = list(model.parameters())
    kinds = [(p.requires_grad, *(p._backward_hooks or ())) for p in ps]
    held = [*model.modules(), *ps]
    return [fingerprints(model), [*map(id, held)], kinds if layout else []], held


def optimizer_of(make: Callable[[float], Any], lr: float, what: str) -> Optimizer:
    """The optimizer that a function, ``what`` by name, makes of a learning rate.

    Raises:
        TaskError: If it is none, or the function raises.
    """
    with guarded(what):
        optimizer = make(lr)
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"{what} should return a torch.optim.Optimizer. Found {type(optimizer).__name__}. "
            "Remedy: end the function with `return optimizer`."
        )
    return optimizer


def check_gradients(optimizer: Optimizer, model: nn.Module, what: str) -> None:
    """Checks, after a backward pass, that an optimizer trains the model and nothing else.

    What is no part of the model would go on from run to run.

    Raises:
        TaskError: If none of its parameters has a gradient, or one that is not the model's.
    """
    groups = optimizer.param_groups
    trained = {id(p) for group in groups for p in group["params"] if p.grad is not None}
    others = len(trained.difference(map(id, model.parameters())))
    if others or not trained:
        raise TaskError(
            f"{what} and Task.per_sample_loss should train the parameters of the model that they "
            f"are handed, and none beside. Found {f'{others} others' if others else 'no gradient'} "
            "in the optimizer. Remedy: use no other model, and no parameters outside of it."
        )
