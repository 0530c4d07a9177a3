"""Per-sample losses: the result of a task's loss function, and their mean over a data set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_count
from steadygrad.tasks.guard import TaskError, is_out_of_memory, reason
from steadygrad.tasks.samples import Samples, to_device

if TYPE_CHECKING:
    from steadygrad.tasks.task import Task

__all__ = ["check_losses", "depend_on_company", "evaluating", "mean_loss"]

EVALUATION_SIZE = 128
# Differences of losses, over their mean, that are rounding, with products in TF32 too.
ALIKE = 2.0**-8


def check_losses(losses: Any, batch_size: int, *, finite: bool = True) -> Tensor:
    """Returns ``losses`` when they are one finite loss for each sample.

    Reading whether they are finite waits for the device: call it where that is no matter.

    Args:
        losses: What ``Task.per_sample_loss`` returned.
        batch_size: Number of samples ``n`` in the batch.
        finite: Whether they have to be finite.

    Returns:
        The losses, with shape ``(n,)``.

    Raises:
        InputError: If they are not a floating-point tensor with shape ``(n,)`` (a loss that is
            already a mean has shape ``()``), are cut off from the parameters while gradients are
            recorded, or are not finite.
    """
    expected = f"`per_sample_loss` should return one loss for each of {batch_size} samples"
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(
            f"{expected}, a floating-point tensor with shape ({batch_size},). Found {kind}. "
            "Remedy: return the tensor of losses itself; of a Hugging Face model, Task.from_hf."
        )
    # A mean may have been expanded.
    is_mean = losses.numel() == 1 or not any(losses.stride())
    if losses.shape != (batch_size,) or (is_mean and batch_size > 1):
        found = f"Found shape {tuple(losses.shape)}"
        if is_mean:
            found += ": a loss that is already a mean. Remedy: reduction='none'; in place of a "
            found += "Hugging Face model's own loss, Task.from_hf."
        else:
            found += ". Remedy: average over every dimension but the first."
        raise InputError(f"{expected}, with shape ({batch_size},). {found}")
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise InputError(
            f"{expected} that depend on the model's parameters. Found losses without a gradient. "
            "Remedy: no .detach(), .item() or torch.no_grad() between the model and its loss, nor "
            "requires_grad=False on all parameters."
        )
    bad = int((~torch.isfinite(losses.detach())).sum()) if finite else 0
    if bad:
        raise InputError(
            f"{expected}, all finite. Found {bad} that are NaN or infinite. "
            "Remedy: a lower learning rate, or look for NaN in the data."
        )
    return losses


def depend_on_company(
    losses: Callable[[Tensor, int], tuple[Tensor, Any]],
    model: nn.Module,
    count: int,
    total: int,
    eps: float,
) -> bool:
    """Whether the loss of a sample depends on the others of its batch, by more than rounding.

    The first half of a batch is compared with itself in other company and alone, in evaluation
    mode but for modules with buffers, as statistics are. Losses that differ without a reason, or
    for other random numbers in a batch of another shape, tell nothing.

    ``losses`` is ``(sample numbers, seed) -> losses, batch's shapes``, numbers and losses with
    shape ``(n,)``; the batch has ``count`` of ``total`` samples, and ``eps`` is the rounding of
    the losses' type.
    """
    mine, near = torch.arange(count // 2), torch.arange(count)
    far = torch.cat([mine, torch.arange(total - count + len(mine), total)])
    statistics = [module for module in model.modules() if module.training and module._buffers]

    def differ(one: Tensor, other: Tensor, part: float = ALIKE) -> bool:
        one, other = (found[: len(mine)].cpu().double() for found in (one, other))
        size = float(one.nan_to_num(0, 0, 0).abs().mean())
        return not torch.allclose(one, other, rtol=0, atol=part * size, equal_nan=True)

    # Half of a batch may be none, or too small for its statistics.
    with torch.no_grad(), evaluating(model), suppress(InputError):
        for module in statistics:
            module.training = True
        (first, shapes), (other, others), (again, _) = (losses(x, 0) for x in (near, far, near))
        random = differ(first, losses(near, 1)[0])
        if differ(first, again) or (random and shapes != others):
            return False
        if differ(first, other) or random:
            return differ(first, other)
        # Other shapes are rounded otherwise.
        return differ(first, losses(mine, 0)[0], max(ALIKE, eps**0.5))
    return False


def mean_loss(
    task: "Task",
    model: nn.Module,
    samples: Samples | None = None,
    *,
    micro_batch_size: int | None = None,
) -> float:
    """Evaluates a model by its mean per-sample loss, in evaluation mode and without gradients.

    Where memory runs out, the micro-batch is halved until it fits.

    Args:
        task: Says the per-sample loss.
        model: The model; every module's training mode is put back afterwards.
        samples: What to evaluate on; None: ``task.valid``.
        micro_batch_size: Most samples in one forward pass; None: the task's, or else 128.

    Returns:
        The mean, summed in float64; it may be NaN or infinite when a loss is.

    Raises:
        InputError: If the losses have the wrong shape.
        TaskError: If a single sample does not fit into memory.
    """
    if micro_batch_size is not None:
        check_count("micro_batch_size", micro_batch_size)
    size = micro_batch_size or task.micro_batch_size or EVALUATION_SIZE
    samples = task.valid if samples is None else samples
    total, start = 0.0, 0
    with torch.no_grad(), evaluating(model):
        while start < len(samples):
            indices = torch.arange(start, min(start + size, len(samples)))
            try:
                losses = task.per_sample_loss(model, to_device(samples.batch(indices), model))
                if not isinstance(losses, Tensor) or losses.shape != indices.shape:
                    check_losses(losses, len(indices))
                # On the host: MPS has no float64.
                total += float(losses.detach().cpu().double().sum())
                start += len(indices)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if len(indices) == 1:
                    raise TaskError(
                        "The evaluation of one sample should fit into memory. Found "
                        f"{reason(error)}. Remedy: a smaller model, shorter samples or another "
                        "device."
                    ) from error
                size = len(indices) // 2
    return total / len(samples)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and each of its modules back into its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
