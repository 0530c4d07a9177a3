"""Checks of the options and parameters that all optimizers take."""

import warnings
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from steadygrad._checks import InputError, check_number
from steadygrad.shards import local

__all__ = [
    "FOREIGN",
    "LARGEST",
    "TYPES",
    "check_capture",
    "check_lr",
    "check_names",
    "check_options",
    "check_parameter",
    "check_shape",
    "check_state_tensor",
    "check_switch",
    "dense_gradient",
    "is_capturing",
    "options_of",
]

# What torch and its schedules put into groups.
_KNOWN_TO_OTHERS = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "base_lr"}
# Types of parameters.
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Types that a state can be loaded from.
_REAL = (*TYPES, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# States that count steps.
COUNTS = ("step", "skipped", "clipping_step")
LARGEST = torch.finfo(torch.float64).max

# Options of other optimizers, which do nothing here.
FOREIGN = {
    *("alpha", "amsgrad", "beta2_decay", "betas", "centered", "clip_value", "clipping_scale"),
    *("clipping_update_period", "dampening", "decoupled_weight_decay", "eps", "etas"),
    *("initial_accumulator_value", "lambd", "lower_bound", "lr_decay", "max_grad_norm"),
    *("momentum", "momentum_decay", "nesterov", "ns_steps", "param_max_rms", "param_min_rms"),
    *("recipe", "rho", "scalar_lr_scale", "scalar_max", "size_update_period", "step_sizes", "t0"),
    *("upper_bound", "weight_decay"),
}


def check_options(group: Mapping[str, Any]) -> None:
    """Raises InputError unless the options that all optimizers share can be used."""
    check_lr(group["lr"])
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InputError(
            f"Parameter `betas` should be two numbers. Found {betas!r}. Remedy: betas=(0.9, 0.999)."
        )
    for beta in betas:
        check_number("betas", beta, low=0, high=1, high_open=True)
    for name in ("foreach", "fused", "master_weights"):
        check_switch(name, group[name], (True, False, None))
    for name in ("maximize", "capturable"):
        check_switch(name, group[name], (True, False))
    if group["foreach"] and group["fused"]:
        raise InputError(
            "Expected at most one of `foreach` and `fused`. Found both. Remedy: leave one out."
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
                f"Remedy: {type(optimizer).__name__}(..., capturable=True), and a tensor `lr` on "
                "the device if it is to change."
            )


def options_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's options by name, of the ``locals()`` with which its constructor begins.

    So a signature is the only list of options, for users, type checkers and the optimizer alike.
    """
    others = ("self", "params", "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


def check_switch(name: str, found: Any, values: tuple[bool | None, ...]) -> None:
    """Raises InputError unless an option is one of some constants."""
    # By identity: 1 and a tensor of it are equal to True.
    if not any(found is value for value in values):
        raise InputError(
            f"Parameter `{name}` should be one of {', '.join(map(str, values))}. "
            f"Found {found!r}. Remedy: one of these."
        )


def check_parameter(parameter: Tensor, name: str = "") -> None:
    """Raises InputError unless a step can write to a parameter: real, floating and dense."""
    whose, dtype = f" in parameter {name!r}" if name else "", parameter.dtype
    found = ""
    if dtype not in TYPES:
        kind, found = "parameters of a real floating type of 16 to 64 bits", str(dtype)
        remedy = "leave it out of the optimizer; a parameter of this type has no gradient"
        remedy = "parameter.float()" if dtype.is_floating_point else remedy
        remedy = "torch.view_as_real(p)" if dtype.is_complex else remedy
    elif parameter.layout != torch.strided:
        kind, found, remedy = "dense parameters", str(parameter.layout), "parameter.to_dense()"
    elif parameter.numel() and _overlaps(parameter):
        kind, found = "parameters with memory for each element", f"strides {parameter.stride()}"
        remedy = "parameter.clone()"
    elif parameter.is_inference():
        kind, found = "parameters that can be written to", "one of torch.inference_mode()"
        remedy = "build the model outside of it"
    if found:
        raise InputError(
            f"Expected {kind}. Found {found} with shape {tuple(parameter.shape)}"
            f"{whose}. Remedy: {remedy}."
        )


def _overlaps(parameter: Tensor) -> bool:
    sizes = zip(parameter.stride(), parameter.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in sizes)


def check_state_tensor(
    name: str,
    value: Any,
    shape: tuple[int, ...],
    bounds: tuple[float, float],
    parameter: Tensor,
) -> None:
    """Raises InputError unless a saved state can be loaded.

    Args:
        name: Name of the state.
        value: The state, a tensor or, of shape ``()``, a number.
        shape: The shape that it must have.
        bounds: Least and largest value of the state.
        parameter: The parameter that it is of.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        in_range = isinstance(value, float) or abs(value) <= LARGEST
        value = torch.tensor(value if in_range else torch.nan, dtype=torch.float64, device="cpu")
    wrong = ""
    if not isinstance(value, Tensor):
        wrong = type(value).__name__
    elif value.is_nested or value.layout is not torch.strided or value.dtype not in _REAL:
        wrong = f"{value.dtype}, {value.layout}"
    else:
        check_shape(name, value, shape, parameter)
    if wrong:
        pass
    elif value.is_meta:
        wrong = "" if parameter.is_meta else "a meta tensor, which has no values"
    elif (own := local(value)).numel():
        least, largest = (float(x) for x in torch.aminmax(own.detach()))
        # A comparison with NaN is false.
        if not bounds[0] <= least <= largest <= bounds[1]:
            wrong = f"values from {least:g} to {largest:g}"
        elif name in COUNTS and largest != int(largest):
            wrong = f"{largest:g}, which is no whole number"
    if wrong:
        kind = "finite numbers" if bounds[0] < 0 else f"numbers from {bounds[0]:g} up"
        raise InputError(
            f"Expected a state `{name}` of {kind}. Found {wrong}. Remedy: load a state dict that "
            "is not damaged."
        )


def check_shape(name: str, value: Any, shape: tuple[int, ...], parameter: Tensor) -> None:
    """Raises InputError unless a saved state has the shape that it must have for a parameter."""
    found = tuple(getattr(value, "shape", ()))
    if found != shape:
        whose = "the parameter's " if shape == parameter.shape else ""
        raise InputError(
            f"Expected a `{name}` with {whose}shape {shape}. Found {found}. Remedy: load the state "
            "of a model with the same parameters in the same order."
        )


def dense_gradient(parameter: Tensor, name: str = "") -> Tensor:
    """A parameter's gradient; a zero that takes no memory for None.

    Raises:
        InputError: If it is sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        own = local(parameter.detach())
        return own.new_zeros(()).expand(own.shape)
    if gradient.layout != torch.strided:
        whose = f" for {name!r}" if name else ""
        raise InputError(
            f"Expected dense gradients. Found {gradient.layout}{whose}. Remedy: sparse=False in "
            "the embedding, or an optimizer for sparse gradients on these parameters."
        )
    return gradient


def check_lr(lr: Any) -> None:
    """Raises InputError unless a learning rate can be used; reads no tensor of an accelerator."""
    if not isinstance(lr, Tensor):
        # Numbers of numpy are no Python ones, but schedules compute with them.
        is_scalar = hasattr(lr, "item") and getattr(lr, "ndim", 1) == 0
        check_number("lr", lr.item() if is_scalar else lr, low=0)
        return
    if lr.is_nested or lr.layout is not torch.strided or lr.is_meta:
        raise InputError(
            f"Parameter `lr` should be a dense tensor with a value. Found {lr.layout} on "
            f"{lr.device}. Remedy: torch.tensor(0.1)."
        )
    if lr.numel() != 1:
        raise InputError(
            f"Parameter `lr` should have one element. Found shape {tuple(lr.shape)}. "
            "Remedy: a 0-d tensor, and groups for several learning rates."
        )
    if not lr.dtype.is_floating_point:
        # A schedule writes into it, and an integer would be cut off to 0.
        raise InputError(
            f"Parameter `lr` should be of a floating type. Found {lr.dtype}. "
            "Remedy: a floating-point tensor, such as torch.tensor(1.0)."
        )
    if lr.device.type == "cpu":  # elsewhere reading it would wait for the device
        # `.numpy()` reads the host's memory; `float(lr)` would count as waiting for a device.
        check_number("lr", lr.detach().to(torch.float64).numpy().item(), low=0)


def check_names(group: Mapping[str, Any], options: Collection[str]) -> None:
    """Raises InputError for a misspelt option, which torch would keep, and which would do nothing.

    Args:
        group: The group.
        options: All names of options there are.
    """
    for name in group:
        if name in options or name in _KNOWN_TO_OTHERS:
            continue
        if name in ("lr_mult", "wd_mult"):
            raise InputError(
                f"Expected the options of an optimizer in a group. Found {name!r}. Remedy: "
                "build the groups with param_groups(model, ...), which applies multipliers."
            )
        if near := get_close_matches(name, options, n=1, cutoff=0.8):
            raise InputError(
                f"Expected the options of an optimizer in a group. Found {name!r}. "
                f"Remedy: did you mean {near[0]!r}?"
            )
    if foreign := sorted((FOREIGN - {*options}) & {*group}):
        warnings.warn(
            f"Expected the options of this optimizer in a group: {sorted(options)}. Found "
            f"{foreign}, which it does not have and leaves aside. Remedy: leave them out.",
            stacklevel=2,
        )
