"""Aggregators in place of the sum: they resolve conflicts between gradients.

One is asked for weights from the gradients' inner products, by a `gramian_weighting` as TorchJD's
have it: those can be summed over processes, and no matrix of gradients is made.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError, from_extra

__all__ = ["aggregator_rows", "gram_weights", "load_aggregator"]


def load_aggregator(combine: Any) -> Any:
    """Returns an aggregator as it is, or makes TorchJD's of that name, without arguments."""
    if isinstance(combine, str):
        kind = getattr(from_extra("torchjd.aggregation", "torchjd"), combine, None)
        combine = combine if kind is None else kind()
    if combine is not None and not hasattr(combine, "gramian_weighting"):
        raise InputError(
            "Parameter `combine` should be an aggregator with a `gramian_weighting`, or the name "
            f"of one in torchjd.aggregation. Found {combine!r}. Remedy: such as combine='UPGrad'."
        )
    return combine


def aggregator_rows(
    aggregator: Any, weights: Mapping[str, float], there: Sequence[bool]
) -> Sequence[int]:
    """Chooses the losses that are rows: those with a weight that may be ``there``.

    Those that only the device knows to take no part are rows of zeros; and so is every other one
    if the aggregator has one number for each row, or a memory of it.
    """
    if any(getattr(aggregator, name, None) is not None for name in ("pref_vector", "reset")):
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
        is_tensor = isinstance(row_weights, Tensor)
        shape = tuple(row_weights.shape) if is_tensor else type(row_weights).__name__
        if shape != (len(rows),):
            raise InputError(
                f"Parameter `combine` should return a weight a loss, of shape ({len(rows)},). "
                f"Found {shape}. Remedy: a `gramian_weighting` that does."
            )
        for i, weight in zip(rows, row_weights.unbind(), strict=True):
            weights[i] = weight
    return weights


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
