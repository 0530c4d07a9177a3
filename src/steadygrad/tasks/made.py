"""Models, optimizers and losses of a task's own functions, checked before they are used."""

import math
import zlib
from collections.abc import Callable, Collection
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
    "check_evaluation",
    "check_gradients",
    "check_model",
    "check_optimizer",
    "check_seeds",
    "fingerprints",
    "make_anew",
    "make_optimizer",
]


def check_model(model: Any) -> nn.Module:
    """Returns the model of ``Task.make_model`` if it can be trained.

    Raises:
        TaskError: If it is no module, some of its tensors have no shape or no values, or all of
            its parameters are frozen.
    """
    expected = "Task.make_model should return a"
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{expected} torch.nn.Module. Found {type(model).__name__}. "
            "Remedy: end the function with `return model`."
        )
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    if any(is_lazy(tensor) for tensor in tensors.values()):
        raise TaskError(
            f"{expected} model whose parameters have shapes. Found lazy ones. Remedy: run one "
            "batch through the model before it is returned."
        )
    empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None:
        raise TaskError(
            f"{expected} model with values. Found {empty!r} on the meta device. Remedy: "
            "model.to_empty(device='cpu') and an initialisation, or no device='meta'."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError(
            f"{expected} model that can be trained. Found no parameter with requires_grad=True. "
            "Remedy: parameter.requires_grad_(True) for those that are to be trained."
        )
    return model


def make_anew(
    make: Callable[[], nn.Module], last: nn.Module, trained: Collection[str]
) -> nn.Module:
    """Makes a model, and checks that none of the last one's trained tensors is in it.

    One number of each of these is NaN meanwhile: a tensor that has it is shared, or copied from
    it. What is frozen may be shared, and a model that is initialised again is new.

    Raises:
        TaskError: If one of them is, by its name.
    """
    firsts = {name: x for name, x in _firsts(last).items() if name in trained and not x.isnan()}
    kept = [first.clone() for first in firsts.values()]
    try:
        for first in firsts.values():
            first.fill_(math.nan)
        fresh = make()
        found = [name for name, x in _firsts(fresh).items() if name in firsts and x.isnan()]
    finally:
        for first, value in zip(firsts.values(), kept, strict=True):
            first.copy_(value)
    if found:
        raise TaskError(
            f"Task.make_model should make a new model at each call. Found {found[0]!r} of the last "
            "one in it, as training leaves it. Remedy: make the model, or a copy.deepcopy of one, "
            "inside the function; of a part that is shared, requires_grad_(False)."
        )
    return fresh


def _parts(model: nn.Module) -> dict[str, Tensor]:
    """This process's parts of a model's state, where they are plain tensors."""
    # Not above: it loads torch.distributed, and modules that a file beside a task may replace.
    from steadygrad.sharding import local

    state = {name: local(x) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    plain = (torch.strided, Tensor)
    return {name: x for name, x in state.items() if (x.layout, type(x)) == plain and x.numel()}


def _firsts(model: nn.Module) -> dict[str, Tensor]:
    """Views of the first number of each of them that can be NaN."""
    can = {n: x for n, x in _parts(model).items() if x.is_floating_point() or x.is_complex()}
    return {name: x[(0,) * x.ndim] for name, x in can.items()}


class RandomDraws(TorchDispatchMode):
    """Random numbers that no seed and no generator of the code within decides."""

    draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Seeds a random operation by the number of those before it."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            torch.manual_seed(self.draws)
            if kwargs.get("generator") is not None:
                other = torch.Generator(kwargs["generator"].device)
                kwargs["generator"] = other.manual_seed(self.draws)
        return func(*args, **kwargs)


def fingerprints(model: nn.Module) -> dict[str, int]:
    """Checksums of this process's part of a model's state, by name."""
    return {
        name: zlib.crc32(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, part in _parts(model).items()
    }


def check_seeds(make: Callable[[int], nn.Module]) -> None:
    """Checks that the seeds with which models are made decide over weights that are drawn.

    Pretrained and constant weights are alike with other random numbers as well.

    Raises:
        TaskError: If the weights are drawn, and the same with seeds 0 and 1.
    """
    first, other = (fingerprints(make(seed)) for seed in (0, 1))
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
    """Makes an optimizer, and a second one to see what the function does with its learning rate.

    Args:
        make: From a learning rate, which some groups may multiply or leave aside, to an optimizer.
        model: The model.
        lr: The learning rate.
        what: The function's name.
        varied: Whether other rates, and other optimizers of the same model, will be made.

    Raises:
        TaskError: If it is no optimizer of the model, not a new one, does not have the rate, or
            the model has changed.
    """
    # The objects are kept: one that is freed may give its identity to another.
    before, _kept = _traits(model, varied)
    with guarded(what):
        first = check_optimizer(make(lr), model, what)
        after, _ = _traits(model, varied)
        other = check_optimizer(make(2 * lr), model, what)
    expected, (rates, others) = (
        f"{what} should",
        ([float(group.get("lr", math.nan)) for group in o.param_groups] for o in (first, other)),
    )
    # What is trained next, and states that are loaded, would not be of this model.
    if after != before:
        raise TaskError(
            f"{expected} be made without a change to the model. Found parameters of another "
            "type, shape or `requires_grad`, with other values, exchanged or with other hooks. "
            "Remedy: make the model like that in Task.make_model."
        )
    if first is other or first.state is other.state:
        raise TaskError(
            f"{expected} be a new optimizer at each call. Found the one that was returned before. "
            "Remedy: make it inside the function."
        )
    asked = not varied and any(math.isclose(rate, lr, rel_tol=1e-6) for rate in rates)
    if math.isnan(sum(rates)) or (rates == others and not asked):
        raise TaskError(
            f"{expected} have the learning rate that its function is handed. Found "
            f"{' and '.join(f'{rate:g}' for rate in rates)} for {lr:g} and for {2 * lr:g}. "
            "Remedy: pass lr on to it."
        )
    return first


def _traits(model: nn.Module, layout: bool) -> tuple[list[Any], list[Any]]:
    """What an optimizer's maker must leave as it is, and the objects themselves."""
    values, ps = fingerprints(model), list(model.parameters())
    kinds = [(p.dtype, p.shape, p.requires_grad, [*(p._backward_hooks or ())]) for p in ps]
    held = [*model.modules(), *ps]
    return [values, [*map(id, held)], kinds if layout else []], held


def check_optimizer(optimizer: Any, model: nn.Module, what: str) -> Optimizer:
    """Returns a function's result if it is an optimizer of the model.

    Args:
        optimizer: What it made.
        model: The model.
        what: The function's name.

    Raises:
        TaskError: If it is no optimizer, or trains none of the model's parameters.
    """
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"{what} should return a torch.optim.Optimizer. Found {type(optimizer).__name__}. "
            "Remedy: end the function with `return optimizer`."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise TaskError(
            f"{what} should return an optimizer of the model's parameters. Found {len(held)} "
            f"others in it. Remedy: {what} uses the parameters that it is handed."
        )
    return optimizer


def check_gradients(optimizer: Optimizer, model: nn.Module, what: str) -> None:
    """Checks, after a backward pass, that an optimizer trains the model and nothing else.

    Raises:
        TaskError: If none of its parameters has a gradient, or one that is not the model's.
    """
    own = set(map(id, model.parameters()))
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    others = sum(id(parameter) not in own for parameter in held)
    if others:
        raise TaskError(
            f"{what} should return an optimizer of the model's parameters. Found {others} others "
            "in it that the loss trains, which would go on from run to run. Remedy: make them "
            "parameters of the model."
        )
    if not held:
        raise TaskError(
            f"Task.per_sample_loss should depend on the parameters that {what} is given. Found no "
            "gradient in them. Remedy: call the model that per_sample_loss is handed, not another."
        )


def check_evaluation(value: Any) -> float:
    """Returns the result of ``Task.evaluate`` as a number.

    Raises:
        TaskError: If it is no number; a text that reads as one is none.
    """
    if not hasattr(value, "__float__"):
        raise TaskError(
            f"Task.evaluate should return a number. Found {type(value).__name__}. "
            "Remedy: end the function with `return float(loss)`."
        )
    return float(value)
