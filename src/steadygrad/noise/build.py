"""Components of a `NoiseScale`: the parameters it measures, its meter and its source."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from steadygrad._checks import InputError, check_choice, check_count, check_type
from steadygrad._names import own_name
from steadygrad.distributed import World
from steadygrad.noise.meters import Measured, Meter
from steadygrad.noise.norms import euclidean_norms, preconditioned_norms
from steadygrad.noise.sign_meter import SignMeter

__all__ = [
    "check_finds_passes",
    "check_options",
    "choose_parameters",
    "make_meter",
    "warn_of_batch_norm",
]

SOURCES = ("microbatch", "per_example", "accumulated")
METRICS = ("euclidean", "preconditioned", "l1")
ACCUMULATIONS = ("mean", "sum", "samples")


def check_options(
    source: str,
    metric: str,
    accumulation: str,
    layers: str,
    optimizer: Optimizer | None,
    samples: "Callable[[], int] | int | None",
) -> None:
    """Checks the options of `NoiseScale` that are names, before any hook is registered.

    Raises:
        InputError: If one is unknown, ``layers`` is given where it means nothing, or the metric
            lacks its optimizer.
    """
    check_choice("source", source, SOURCES)
    check_choice("metric", metric, METRICS)
    check_choice("accumulation", accumulation, ACCUMULATIONS)
    if layers != "all" and source != "per_example":
        raise InputError(
            "Parameter `layers` is for source='per_example' only. Found "
            f"layers={layers!r} with source={source!r}. Remedy: leave it out."
        )
    if isinstance(samples, int) or not (samples is None or callable(samples)):
        check_count("samples", samples)
    if samples is not None:
        check_finds_passes(source)
    if metric == "euclidean":
        return
    if source == "per_example":
        raise InputError(
            f"Expected another source for metric={metric!r}. Found source='per_example'. "
            "Remedy: source='microbatch'."
        )
    if optimizer is None:
        raise InputError(
            f"Expected `optimizer` for metric={metric!r}. Found None. "
            "Remedy: hand in the optimizer that trains the model, or metric='euclidean'."
        )


def check_finds_passes(source: str) -> None:
    """Raises for a source that needs a context around every micro-batch."""
    if source != "microbatch":
        raise InputError(
            "Expected source='microbatch' where NoiseScale itself detects micro-batches "
            f"(`samples`). Found {source!r}. Remedy: `with noise.microbatch(n)` around each "
            "backward pass."
        )


def choose_parameters(
    model: nn.Module, names: set[str] | None, groups: Callable[[str], str] | None
) -> tuple[list[Measured], list[str]]:
    """The trainable parameters to measure, and the names of their groups.

    Args:
        model: The model as it is called in training.
        names: Names to choose from; None: all.
        groups: Group of a name, from which wrappers' parts are taken out. None: the outermost
            module that the parameter lies in.

    Raises:
        InputError: If there are none, or ``groups`` cannot be called.
    """
    group_of = groups or (lambda name: name.split(".")[0])
    check_type("groups", group_of, Callable, "`groups=table.get` for a dict")  # type: ignore[arg-type]
    chosen = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (names is None or name in names)
    ]
    if not chosen:
        raise InputError(
            "Expected a model with trainable parameters. Found none to measure. "
            "Remedy: unfreeze them with `requires_grad_()` before NoiseScale is built."
        )
    if any(parameter.is_meta for _, parameter in chosen):
        raise InputError(
            "Expected parameters on a device. Found some on 'meta'. "
            "Remedy: build NoiseScale after `to_empty` or the first load."
        )
    labels = [group_of(own_name(name, model)) for name, _ in chosen]
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
        InputError: If the metric cannot work with this source.
    """
    reduced = source == "accumulated"
    dtype = torch.float32 if measured[0].parameter.device.type == "mps" else torch.float64
    if metric == "euclidean" or optimizer is None:
        return Meter(measured, groups, world, euclidean_norms, dtype, reduced)
    if world.kind == "fsdp" and source != "accumulated":
        raise InputError(
            f"Expected another source for metric={metric!r} of sharded parameters. "
            f"Found source={source!r}. Remedy: source='accumulated'."
        )
    if metric == "l1":
        return SignMeter(measured, groups, world, optimizer, dtype, reduced)
    return Meter(measured, groups, world, preconditioned_norms(optimizer), dtype, reduced)


def warn_of_batch_norm(model: nn.Module) -> None:
    """Warns once if a layer makes the samples of a batch depend on each other."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            warnings.warn(
                f"{own_name(name, model)!r} ({type(module).__name__}) normalises over the batch, "
                "so the samples of a micro-batch are not independent, and the noise scale is only "
                "approximate. Remedy: LayerNorm or GroupNorm, or ignore this warning.",
                stacklevel=3,
            )
            return
