"""What a `NoiseScale` is built of: which parameters it measures, and with which meter."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.noise.meters import Measured, Meter, euclidean_norms, preconditioned_norms
from steadygrad.noise.sign_meter import SignMeter
from steadygrad.noise.sources import plain_name
from steadygrad.sharding import World

__all__ = ["METRICS", "choose_parameters", "first_part", "make_meter", "warn_of_batch_norm"]

METRICS = ("euclidean", "preconditioned", "l1")


def first_part(name: str) -> str:
    """The default group of a parameter: the outermost module it lies in."""
    return name.split(".")[0]


def choose_parameters(
    model: nn.Module, names: set[str] | None, group_of: Callable[[str], str]
) -> tuple[list[Measured], list[str]]:
    """The trainable parameters to measure, and the names of their groups.

    Args:
        model: The model as it is called in training.
        names: Names to choose from; None: all.
        group_of: Group of a name, from which wrappers' parts are taken out.

    Raises:
        InputError: If there are none.
    """
    chosen = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (names is None or name in names)
    ]
    if not chosen:
        raise InputError("Expected a model with trainable parameters. Found none to measure.")
    if any(parameter.is_meta for _, parameter in chosen):
        raise InputError(
            "Expected parameters on a device. Found some on 'meta'. "
            "Remedy: build NoiseScale after `to_empty` or the first load."
        )
    labels = [group_of(plain_name(name)) for name, _ in chosen]
    group_names = list(dict.fromkeys(labels))
    index = {label: i for i, label in enumerate(group_names)}
    measured = [
        Measured(name, parameter, index[label])
        for (name, parameter), label in zip(chosen, labels, strict=True)
    ]
    return measured, group_names


def make_meter(
    metric: str,
    optimizer: Optimizer | None,
    source: str,
    measured: list[Measured],
    groups: int,
    world: World,
) -> Meter:
    """The meter of a metric.

    Raises:
        InputError: If the metric lacks its optimizer, or cannot work with this source.
    """
    reduced = source == "accumulated"
    dtype = torch.float32 if measured[0].parameter.device.type == "mps" else torch.float64
    if metric == "euclidean":
        return Meter(measured, groups, world, euclidean_norms, dtype, reduced)
    if optimizer is None:
        raise InputError(f"Expected `optimizer` for metric={metric!r}. Found None.")
    if source == "per_example" or (world.kind == "fsdp" and source != "accumulated"):
        remedy = "accumulated" if world.kind == "fsdp" else "microbatch"
        raise InputError(
            f"Expected another source for metric={metric!r}. Found source={source!r}. "
            f"Remedy: source={remedy!r}."
        )
    if metric == "l1":
        return SignMeter(measured, groups, world, optimizer, dtype)
    return Meter(measured, groups, world, preconditioned_norms(optimizer), dtype, reduced)


def warn_of_batch_norm(model: nn.Module) -> None:
    """Warns once if a layer makes the samples of a batch depend on each other."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            warnings.warn(
                f"{plain_name(name)!r} ({type(module).__name__}) normalises over the batch, so the "
                "samples of a micro-batch are not independent, and the noise scale means less.",
                stacklevel=3,
            )
            return
