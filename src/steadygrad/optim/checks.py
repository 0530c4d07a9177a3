"""Checks of the options, parameters and gradients that all optimizers take."""

import warnings
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from steadygrad._checks import InputError, check_choice, check_number, shown

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of parameters


def options_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's options by name, of the ``locals()`` with which its constructor begins.

    So a signature is the only list of options, for users, type checkers and the optimizer alike.
    """
    return {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}


def check_options(group: Mapping[str, Any], betas_needed: int) -> None:
    """Raises InputError unless the options that all optimizers share can be used."""
    check_lr(group["lr"])
    betas = group["betas"] if betas_needed else ()
    if not isinstance(betas, (tuple, list)) or len(betas) != betas_needed:
        raise InputError(
            f"Parameter `betas` should be {betas_needed} numbers from 0 to 1. Found "
            f"{shown(betas)}. Remedy: leave it out for the defaults."
        )
    for beta in betas:
        check_number("betas", beta, low=0, high=1, high_open=True)
    for name in ("foreach", "fused", "master_weights"):
        check_switch(name, group[name], (True, False, None))
    for name in ("maximize", "capturable"):
        check_switch(name, group[name], (True, False))
    if "state_dtype" in group:
        check_choice("state_dtype", group["state_dtype"], ("float32", "8bit"))
    if group["foreach"] and group["fused"]:
        raise InputError("Expected one of `foreach` and `fused`. Found both. Remedy: drop one.")


def check_switch(name: str, value: Any, choices: tuple[bool | None, ...]) -> None:
    """Raises InputError unless an option is one of some constants."""
    # By identity: 1 and a tensor of it are equal to True.
    if not any(value is choice for choice in choices):
        raise InputError(
            f"Parameter `{name}` should be one of {', '.join(map(str, choices))}. "
            f"Found {shown(value)}. Remedy: one of these."
        )


@cache
def warn_once(message: str) -> None:
    """Warns, of each thing once in a process."""
    warnings.warn(message, stacklevel=2)


def check_lr(lr: Any) -> None:
    """Raises InputError unless a learning rate can be used; reads no tensor of an accelerator."""
    if isinstance(lr, Tensor):
        plain = not lr.is_nested and lr.layout is torch.strided and not lr.is_meta
        # A schedule writes into it, and an integer would be cut off to 0.
        if not plain or lr.numel() != 1 or not lr.dtype.is_floating_point:
            raise InputError(
                "Parameter `lr` should be a number, or a dense floating tensor of one element. "
                f"Found {lr.numel()} of {lr.dtype}, {lr.layout}, on {lr.device}. "
                "Remedy: torch.tensor(0.1)."
            )
        if lr.device.type != "cpu":
            return
        # `.numpy()` reads the host's memory; `float(lr)` would count as waiting for a device.
        lr = lr.detach().to(torch.float64).numpy().reshape(())
    # Numbers of numpy are no Python ones, but schedules compute with them.
    is_scalar = hasattr(lr, "item") and getattr(lr, "ndim", 1) == 0
    check_number("lr", lr.item() if is_scalar else lr, low=0)


def check_names(group: Mapping[str, Any], options: Collection[str]) -> None:
    """Raises InputError for a misspelt option, which torch would keep without effect."""
    for name in {*group} - {*options}:
        near = [*map(repr, get_close_matches(name, options, n=1, cutoff=0.8))]
        if name in ("lr_mult", "wd_mult"):
            near = ["param_groups(model, ...), which applies multipliers"]
        if near:
            raise InputError(
                f"Expected options of an optimizer in a group. Found {name!r}. Remedy: {near[0]}."
            )


def is_capturing() -> bool:
    """Whether a CUDA graph is recording on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def check_capture(optimizer: Optimizer) -> None:
    """Raises RuntimeError where a CUDA graph would record a step that is not ready for it."""
    if torch.compiler.is_compiling() or not is_capturing():
        return
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor) and group["lr"].device.type == "cpu":
            raise RuntimeError(
                "Expected an `lr` on the device while a CUDA graph records the step. Found a "
                "tensor on the CPU, whose present value all replays would use. Remedy: lr.cuda()."
            )
        if not group["capturable"]:
            raise RuntimeError(
                "Expected capturable=True while a CUDA graph records the step. Found False. "
                f"Remedy: {type(optimizer).__name__}(..., capturable=True)."
            )


def check_parameter(parameter: Tensor, name: str = "") -> None:
    """Raises InputError unless a step can write to a parameter: real, floating and dense."""
    dtype, remedy = parameter.dtype, ""
    if dtype.is_complex:
        remedy = "torch.view_as_real(p)"
    elif dtype not in TYPES:
        remedy = "parameter.float(), or leave it out of the optimizer"
    elif parameter.layout != torch.strided:
        remedy = "parameter.to_dense()"
    elif any(n > 1 and not s for n, s in zip(parameter.shape, parameter.stride(), strict=True)):
        remedy = "parameter.clone(), as elements share memory here"
    if remedy:
        raise InputError(
            "Expected dense parameters of a real floating type that can be written to. Found "
            f"{dtype}, {parameter.layout}, of shape {tuple(parameter.shape)}"
            f"{f' in parameter {name!r}' if name else ''}. Remedy: {remedy}."
        )


def dense_gradient(parameter: Tensor, name: str = "") -> Tensor | None:
    """A parameter's gradient, which must not be sparse."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        whose = f" for {name!r}" if name else ""
        raise InputError(
            f"Expected dense gradients. Found {gradient.layout}{whose}. Remedy: sparse=False in "
            "the embedding, or another optimizer for it."
        )
    return gradient
