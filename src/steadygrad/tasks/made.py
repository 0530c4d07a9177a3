"""Models, optimizers and losses of a task's own functions, checked before they are used."""

import math
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad.sharding.shards import local
from steadygrad.tasks.guard import TaskError, guarded

__all__ = [
    "changed",
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
    """Makes a model in which nothing is left of what training has changed in the last one.

    Meanwhile one number in each of the last model's trained tensors is NaN: a tensor that has it
    too is shared or copied. Frozen parts may be shared, and a model that is initialised again.

    Args:
        make: Makes a model.
        last: The model that it made before; unchanged afterwards.
        trained: Names of its tensors that training changes.

    Raises:
        TaskError: If a trained tensor of the last model is in the new one.
    """
    firsts = {name: number for name, number in _firsts(last) if name in trained}
    kept = {name: number.clone() for name, number in firsts.items()}
    try:
        for number in firsts.values():
            number.fill_(math.nan)
        fresh = make()
        old = [name for name, number in _firsts(fresh, finite=False) if name in firsts]
    finally:
        for name, number in firsts.items():
            number.copy_(kept[name])
    if old:
        raise TaskError(
            f"Task.make_model should make a new model at each call. Found {old[0]!r} of the last "
            "one in it, as training leaves it. Remedy: make the model, or a copy.deepcopy of one, "
            "inside the function; of a part that is shared, requires_grad_(False)."
        )
    return fresh


def _firsts(model: nn.Module, *, finite: bool = True) -> Iterable[tuple[str, Tensor]]:
    """Views of the first number of each floating-point tensor of a model; those that are NaN."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        part = local(value)
        if part.numel() and bool(part[(0,) * part.ndim].isnan()) != finite:
            yield name, part[(0,) * part.ndim]


class RandomDraws(TorchDispatchMode):
    """Torch's random numbers, whatever seed and generator they are asked of, drawn from another."""

    draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, with another seed if it is random."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            torch.manual_seed(self.draws)
            if kwargs.get("generator") is not None:
                other = torch.Generator(kwargs["generator"].device)
                kwargs["generator"] = other.manual_seed(self.draws)
        return func(*args, **kwargs)


def fingerprints(model: nn.Module) -> dict[str, int]:
    """Checksums of the values in this process's part of a model's state, by name."""
    return {
        name: zlib.crc32(local(value).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and value.layout is torch.strided
    }


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """Names of the tensors that differ between two :func:`fingerprints`."""
    return {name for name in before if after.get(name) != before[name]}


def check_seeds(make: Callable[[int], nn.Module]) -> None:
    """Checks that the study's seed decides over initial weights that are drawn at all.

    Pretrained and constant weights are the same under all seeds, and also where other random
    numbers are drawn.

    Args:
        make: Makes a model with a seed of that number.

    Raises:
        TaskError: If the weights are drawn, and the same under two seeds.
    """
    first = fingerprints(make(0))
    if changed(first, fingerprints(make(1))):
        return
    try:
        with RandomDraws():
            other = fingerprints(make(0))
    except TaskError:  # it cannot be told
        return
    drawn = changed(first, other)
    if drawn:
        raise TaskError(
            "Task.make_model should draw its weights anew for each seed of the study. Found the "
            f"same {min(drawn)!r} under two seeds. Remedy: no torch.manual_seed, and no generator "
            "with a seed of its own, in the function."
        )


def make_optimizer(
    make: Callable[[float], Any], model: nn.Module, lr: float, what: str, *, varied: bool = False
) -> Optimizer:
    """Makes an optimizer, and another one to see that it is new and has the learning rate.

    Args:
        make: From a learning rate to an optimizer of the model.
        model: The model.
        lr: The learning rate; of some groups it may be multiplied or fixed.
        what: The function's name.
        varied: Whether it is used with other rates too, and with others on the same model.

    Raises:
        TaskError: If it is no optimizer of the model, is returned twice, has the same learning
            rates whatever it is asked for, or the model has changed.
    """
    # The objects are kept: one that is freed may give its identity to another.
    before, _kept = _traits(model, varied)
    with guarded(what):
        found = [make(lr), make(2 * lr)]
    rates = [
        [float(group.get("lr", math.nan)) for group in check_optimizer(o, model, what).param_groups]
        for o in found
    ]
    # What is trained next, and states that are loaded, would not be of this model.
    after, _ = _traits(model, varied)
    if after != before:
        raise TaskError(
            f"{what} should be made without a change to the model. Found parameters of another "
            "type, shape or `requires_grad`, with other values, exchanged or with other hooks. "
            "Remedy: make the model like that in Task.make_model."
        )
    first, other = ({id(o), id(o.state), *map(id, o.param_groups)} for o in found)
    if first & other:
        raise TaskError(
            f"{what} should be a new optimizer at each call. Found the one that was returned "
            "before. Remedy: make it inside the function."
        )
    asked = not varied and any(math.isclose(rate, lr, rel_tol=1e-6) for rate in rates[0])
    if math.isnan(sum(rates[0])) or (rates[0] == rates[1] and not asked):
        raise TaskError(
            f"{what} should have the learning rate that its function is handed. Found "
            f"{' and '.join(f'{rate:g}' for rate in rates[0])} for {lr:g} and for {2 * lr:g}. "
            "Remedy: pass lr on to it."
        )
    return found[0]


def _traits(model: nn.Module, layout: bool) -> tuple[list[Any], list[Any]]:
    """What an optimizer's maker must leave as it is, and the objects themselves."""
    values = fingerprints(model)
    parameters = list(model.parameters())
    held = [*model.modules(), *parameters]
    kinds = [(p.dtype, p.shape, p.requires_grad, [*(p._backward_hooks or ())]) for p in parameters]
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
    """Checks, after a backward pass, that the optimizer trains the model and nothing else.

    Args:
        optimizer: The optimizer.
        model: The model.
        what: Name of the function that made the optimizer.

    Raises:
        TaskError: If no parameter of the model that the optimizer holds has a gradient, or one has
            that is not the model's.
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
            "Task.per_sample_loss should depend on the parameters that the optimizer trains. Found "
            f"no gradient in those of {what}. Remedy: call the model that per_sample_loss is "
            "handed, not another one."
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
