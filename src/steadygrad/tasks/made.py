"""Models, optimizers and losses of a task's own functions, checked before they are used."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadygrad.tasks.guard import TaskError

__all__ = ["check_evaluation", "check_model", "check_optimizer", "check_weights"]


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


def check_optimizer(
    optimizer: Any, model: nn.Module, what: str = "Task.make_optimizer"
) -> Optimizer:
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


def check_weights(model: nn.Module, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Checks that an evaluation has left the weights of a model as they were.

    Args:
        model: The model.
        before: State dict of the model before the evaluation, a copy.
        after: State dict after the evaluation.

    Raises:
        TaskError: If a parameter has changed.
    """
    for name, _ in model.named_parameters():
        then, now = before.get(name), after.get(name)
        if isinstance(then, Tensor) and isinstance(now, Tensor) and not torch.equal(then, now):
            raise TaskError(
                f"Task.evaluate should leave the model as it is. Found changes of {name!r}. "
                "Remedy: do not train in Task.evaluate, and restore any weights that it replaces."
            )
