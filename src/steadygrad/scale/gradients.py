"""Takes the scales out of an optimizer's gradients, and looks for values that are not finite."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadygrad.formulas.exponents import BINS, exponent_histograms
from steadygrad.sharding import local

__all__ = ["Gradients", "by_layer", "count_exponents", "known", "narrow", "unscale", "widen"]

Gradients = dict[int, list[Tensor]]


def narrow(dtype: torch.dtype) -> bool:
    """Whether a floating type holds less than float32 does."""
    return dtype.itemsize < torch.float32.itemsize


def known(tensor: Tensor) -> Any:
    """Numbers, as lists, that the host reads without waiting; None elsewhere and in transforms."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return None
    try:
        return tensor.tolist()
    except RuntimeError:
        # A tracer's stand-in, or one number for each of a batch.
        return None


def widen(optimizer: Optimizer) -> None:
    """Makes an optimizer's float16 gradients float32, where it keeps float32 masters.

    What is unscaled may be no float16 number; for the masters it need not be.
    """
    for group in optimizer.param_groups:
        # How steadygrad's optimizers, and others, say so; False: no masters.
        if group.get("master_weights", False) is False:
            continue
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype == torch.float16:
                parameter.grad = None
                parameter.grad_dtype = None
                parameter.grad = gradient.to(torch.float32)


def by_layer(
    optimizer: Optimizer,
    owner: Callable[[Tensor], int],
    wanted: Callable[[Tensor], bool] = lambda parameter: True,
) -> Gradients:
    """This process's gradients, by the index of their layer.

    Args:
        optimizer: Whose.
        owner: Gives the index of a parameter's layer.
        wanted: Which parameters. Default: all.
    """
    found: Gradients = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or not wanted(parameter):
                continue
            if gradient.is_sparse:
                # Duplicates may overflow as they are added up: before it is looked at.
                parameter.grad = gradient = gradient.coalesce()
                gradient = gradient._values()
            found[owner(parameter)].append(local(gradient))
    return found


@torch.no_grad()
def unscale(gradients: Gradients, inverse: Tensor) -> Tensor:
    """Multiplies gradients in place.

    Args:
        gradients: By layer.
        inverse: Reciprocals of the layers' total scales, with shape ``(layers)``.

    Returns:
        Whether a layer had a value that is not finite, with shape ``(layers)``: 0 or 1.
    """
    found = torch.zeros_like(inverse)
    for index, whole in gradients.items():
        for part in _by_kind(whole):
            device = part[0].device
            # Set where a value is not finite, and left as it was elsewhere.
            flag = found[index].to(device)
            factor = inverse[index].to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(part, flag, factor)
            if device != found.device:
                found[index].copy_(flag)
    return found


def _by_kind(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        kinds[gradient.device, gradient.dtype].append(gradient)
    return kinds.values()


def count_exponents(gradients: Gradients, layers: int, device: torch.device) -> Tensor:
    """Counts of exponents of each layer's gradients, with shape ``(layers, BINS)``."""
    counts = torch.zeros(layers, BINS, device=device)
    for index, whole in gradients.items():
        if whole:
            counts[index] += exponent_histograms(whole).sum(dim=0).to(device)
    return counts
