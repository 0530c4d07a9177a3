"""Aggregators in place of the sum: functions that resolve conflicts between gradients.

One with a `gramian_weighting`, as TorchJD's, is asked for weights from the gradients' inner
products: those can be summed over processes, and no matrix of gradients is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.balance.equations import weighted_sum
from steadygrad.numerics import wide

__all__ = ["Aggregator", "aggregated", "aggregator_rows", "gram_weights", "load_aggregator"]

# A function of a matrix with one gradient a row, which returns one row.
Aggregator = Callable[[Tensor], Tensor]


def load_aggregator(combine: str | Aggregator | None) -> Aggregator | None:
    """Returns an aggregator as it is, or makes TorchJD's of that name, without arguments."""
    if combine is None or callable(combine):
        return combine
    try:
        torchjd: Any = import_module("torchjd.aggregation")
    except ImportError as error:
        raise InputError(
            f"Parameter `combine` should be an aggregator. Found {combine!r}, and no TorchJD "
            f'({error}). Remedy: pip install "steadygrad[torchjd]".'
        ) from error
    kind = getattr(torchjd, str(combine), None)
    if not (isinstance(kind, type) and issubclass(kind, torchjd.Aggregator)):
        raise InputError(
            "Parameter `combine` should be an aggregator, or a name of one in torchjd.aggregation. "
            f"Found {combine!r}. Remedy: such as combine='UPGrad'."
        )
    aggregator: Aggregator = kind()
    return aggregator


def aggregator_rows(
    aggregator: Aggregator | None, weights: Mapping[str, float], there: Sequence[bool]
) -> Sequence[int]:
    """Chooses the losses that are rows: those with a weight that may be ``there``.

    Those that only the device knows to take no part are rows of zeros; and so is every other one
    if the aggregator has one number for each row, or a memory of it.
    """
    weighting = getattr(aggregator, "weighting", None)
    named = [(aggregator, name) for name in ("pref_vector", "weights", "n_tasks", "reset")]
    if any(getattr(x, name, None) is not None for x, name in [*named, (weighting, "weights")]):
        return range(len(weights))
    return [i for i, weight in enumerate(weights.values()) if weight and there[i]]


def gram_weights(
    aggregator: Any, products: Tensor, scales: Tensor, rows: Sequence[int], seed: int
) -> Tensor:
    """Weights of gradients times their ``scales``, with shape ``(K,)``, from inner ``products``.

    An aggregator that draws numbers draws from ``seed``, which is the same on all processes.
    """
    products = scales[:, None] * products * scales
    weights = torch.zeros_like(scales)
    if rows:
        # Picked one by one: a list as an index is copied to the device.
        chosen = torch.stack([torch.stack([products[i, j] for j in rows]) for i in rows])
        with _seeded(seed, chosen.device), torch.autocast(chosen.device.type, enabled=False):
            row_weights = aggregator.gramian_weighting(chosen)
        _check_shape(row_weights, len(rows))
        for i, weight in zip(rows, row_weights.unbind(), strict=True):
            weights[i] = weight
    return weights


def aggregated(
    aggregator: Aggregator,
    columns: Sequence[Sequence[Tensor | None]],
    scales: Tensor,
    rows: Sequence[int],
) -> list[Tensor | None]:
    """Combines gradients times their ``scales``; a column has one tensor's of all losses."""
    samples = [next((g for g in column if g is not None), None) for column in columns]
    gradients = [None if sample is None else torch.zeros_like(sample) for sample in samples]
    there = [(i, sample) for i, sample in enumerate(samples) if sample is not None]
    if not rows:
        return gradients
    matrix = torch.stack(
        [torch.cat([_scaled(columns[i][k], s, scales[k]) for i, s in there]) for k in rows]
    )
    with torch.autocast(matrix.device.type, enabled=False):
        line = aggregator(matrix)
    _check_shape(line, matrix.shape[1])
    parts = line.split([sample.numel() for _, sample in there])
    for (i, sample), part in zip(there, parts, strict=True):
        gradients[i] = part.view(sample.shape).to(sample.dtype)
    return gradients


def _scaled(gradient: Tensor | None, sample: Tensor, scale: Tensor) -> Tensor:
    """Flattens one loss's scaled gradient, in float32 or wider; zeros where it has none."""
    gradient = (torch.zeros_like(sample) if gradient is None else gradient).flatten()
    return weighted_sum([gradient.to(wide(gradient.dtype))], scale.reshape(1))  # type: ignore[return-value]


def _check_shape(returned: object, size: int) -> None:
    shape = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
    if shape != (size,):
        raise InputError(
            f"Parameter `combine` should return a tensor of shape ({size},). Found {shape}. "
            "Remedy: a weight for each loss, or an element for each of the gradient."
        )


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds random numbers alike on all processes, and restores the caller's generators."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        # Not `torch.manual_seed`, which reaches devices that are not restored.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
