"""What takes the place of the sum: an aggregator that resolves conflicts between gradients."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.formulas.balance import weighted_sum

__all__ = ["Combiner", "load_aggregator"]

Aggregator = Callable[[Tensor], Tensor]


def load_aggregator(combine: "str | Aggregator | None") -> "Aggregator | None":
    """An aggregator as it is, or TorchJD's of that name.

    Args:
        combine: An aggregator: a function of a matrix with one gradient a row that returns one
            row; or a name such as ``"UPGrad"``.

    Raises:
        InputError: If TorchJD is not installed or has no such aggregator, or it cannot be made
            without arguments.
    """
    if not isinstance(combine, str):
        if combine is not None and not callable(combine):
            raise InputError(
                "Parameter `combine` should be an aggregator or a name of one. Found "
                f"{combine!r}. Remedy: combine='UPGrad', or an object of torchjd.aggregation."
            )
        return combine
    try:
        home: Any = import_module("torchjd.aggregation")
        made: Aggregator | None = getattr(home, combine, lambda: None)()
    except ImportError as error:
        raise InputError(
            f"Parameter `combine` should name an aggregator of TorchJD. Found {combine!r}, and "
            f"TorchJD is not there or not whole ({error}). "
            'Remedy: pip install "steadygrad[torchjd]".'
        ) from error
    except TypeError as error:
        raise InputError(
            f"Parameter `combine` should name an aggregator that needs no arguments. Found "
            f"{combine!r}: {error}. Remedy: make it yourself and hand it in."
        ) from error
    if made is None or not hasattr(home, "Aggregator") or not isinstance(made, home.Aggregator):
        raise InputError(
            f"Parameter `combine` should name an aggregator of TorchJD. Found {combine!r}. "
            "Remedy: one of torchjd.aggregation, such as 'UPGrad'."
        )
    return made


class Combiner:
    """Applies an aggregator, or none, to gradients that are scaled already.

    An aggregator of TorchJD that only looks at the gradients' inner products is asked for weights:
    those products can be summed over processes, and no matrix of all gradients is made.

    Args:
        aggregator: A function of a matrix with shape ``(K, n)`` that returns ``(n,)``, or None for
            the sum.
    """

    def __init__(self, aggregator: Aggregator | None) -> None:
        self.aggregator = aggregator
        self.weighting = getattr(aggregator, "gramian_weighting", None)

    @property
    def needs_gram(self) -> bool:
        """Whether inner products are all it looks at."""
        return self.weighting is not None

    def check(self, ranks: int) -> None:
        """Refuses what would differ between processes.

        Raises:
            InputError: If the aggregator looks at the gradients themselves, on several processes.
        """
        if self.aggregator is not None and not self.needs_gram and ranks > 1:
            raise InputError(
                f"Expected one process, or an aggregator with a `gramian_weighting`. Found {ranks} "
                f"processes and {self.aggregator}, which would see each process's items alone. "
                "Remedy: an aggregator such as UPGrad, or process_group=None."
            )

    def weights(self, products: Tensor) -> Tensor:
        """Weights with shape ``(K,)`` from inner products with shape ``(K, K)``."""
        found: Tensor = self.weighting(products) if self.weighting else products.new_ones(())
        return found

    def __call__(
        self, columns: Iterable[Sequence[Tensor | None]], scales: Tensor
    ) -> list[Tensor | None]:
        """One gradient for each tensor, from each tensor's gradients by loss.

        Args:
            columns: For each tensor the losses' gradients, None where there is none.
            scales: The losses' factors, with shape ``(K,)``.
        """
        if self.aggregator is None or self.needs_gram:
            return [weighted_sum(column, scales) for column in columns]
        return self._by_matrix(list(columns), scales, self.aggregator)

    def _by_matrix(
        self, rows: list[Sequence[Tensor | None]], scales: Tensor, aggregator: Aggregator
    ) -> list[Tensor | None]:
        samples = [next((g for g in row if g is not None), None) for row in rows]
        there = [i for i, sample in enumerate(samples) if sample is not None]
        matrix = torch.stack([_row(rows, samples, scales, k, there) for k in range(len(scales))])
        sizes = [samples[i].numel() for i in there]  # type: ignore[union-attr]
        parts = dict(zip(there, aggregator(matrix).split(sizes), strict=True))
        return [
            None if sample is None else parts[i].view(sample.shape).to(sample.dtype)
            for i, sample in enumerate(samples)
        ]


def _row(
    rows: Sequence[Sequence[Tensor | None]],
    samples: Sequence[Tensor | None],
    scales: Tensor,
    k: int,
    there: Sequence[int],
) -> Tensor:
    """One loss's scaled gradients in a line; zeros where it has none."""
    parts = []
    for i in there:
        gradient = rows[i][k]
        if gradient is None:
            gradient = torch.zeros_like(samples[i])  # type: ignore[arg-type]
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        parts.append(weighted_sum([wide], scales[k : k + 1]).reshape(-1))  # type: ignore[union-attr]
    return torch.cat(parts)
