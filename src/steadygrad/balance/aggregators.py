"""Aggregators in place of the sum: functions that resolve conflicts between gradients."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.formulas.balance import weighted_sum

__all__ = ["Aggregator", "Combiner", "load_aggregator"]

# A function of a matrix with one gradient a row, which returns one row.
Aggregator = Callable[[Tensor], Tensor]
TORCHJD = "torchjd.aggregation"


def load_aggregator(combine: "str | Aggregator | None") -> "Aggregator | None":
    """Returns an aggregator as it is, or makes TorchJD's of that name.

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
        torchjd: Any = import_module(TORCHJD)
        made: Aggregator | None = getattr(torchjd, combine, lambda: None)()
    except ImportError as error:
        raise _no_aggregator(
            f"{combine!r}, but TorchJD cannot be imported ({error})",
            'pip install "steadygrad[torchjd]"',
        ) from error
    except TypeError as error:
        raise _no_aggregator(
            f"{combine!r}, which needs arguments, where one with no arguments is made ({error})",
            "make it yourself and hand it in",
        ) from error
    if made is None or not isinstance(made, getattr(torchjd, "Aggregator", ())):
        raise _no_aggregator(repr(combine), "one of torchjd.aggregation, such as 'UPGrad'")
    return made


def _no_aggregator(what: str, remedy: str) -> InputError:
    return InputError(
        f"Parameter `combine` should name an aggregator of TorchJD. Found {what}. Remedy: {remedy}."
    )


class Combiner:
    """Applies an aggregator, or the sum for None, to gradients that are scaled already.

    An aggregator with a `gramian_weighting`, as TorchJD's, is asked for weights from the gradients'
    inner products: those can be summed over processes, and no matrix of gradients is made.

    Losses the host knows are inactive are dropped from the matrix, unless the aggregator has one
    number per row or a memory. Losses only the device knows are inactive appear as zero rows.
    TorchJD's MGDA would return zero for those, so they are replaced by a copy of an active row.
    """

    def __init__(self, aggregator: Aggregator | None) -> None:
        self.aggregator = aggregator
        self.weighting = getattr(aggregator, "gramian_weighting", None)
        self.needs_gram = self.weighting is not None
        self.needs_matrix = aggregator is not None and not self.needs_gram
        # The same in every process.
        self.name: str = getattr(aggregator, "__name__", type(aggregator).__name__)

    def check(self, ranks: int) -> None:
        """Refuses an aggregator of whole gradients on several processes."""
        if self.needs_matrix and ranks > 1:
            raise InputError(
                f"Expected one process, or an aggregator with a `gramian_weighting`. Found {ranks} "
                f"processes and {self.name}, which would see each process's items alone. "
                "Remedy: an aggregator such as UPGrad, or process_group=None."
            )

    def weights(
        self, products: Tensor, active: Tensor, scales: Tensor, slots: Sequence[int], seed: int
    ) -> Tensor:
        """Computes weights of the scaled gradients from the gradients' inner products.

        Args:
            products: The inner products, with shape ``(K, K)``.
            active: Which losses took part, boolean with shape ``(K,)``.
            scales: The losses' factors, with shape ``(K,)``.
            slots: The losses that the host does not know to be inactive.
            seed: Seed for an aggregator that draws numbers, the same on all processes.
        """
        products = torch.where(active[:, None] & active, products, 0.0)
        products = scales[:, None] * products * scales
        rows = self._rows(len(products), slots)
        weights = list(products.new_zeros(len(products)).unbind())
        if rows and self.weighting is not None:
            # Picked one by one: a list as an index is copied to the device.
            chosen = torch.stack([products[i] for i in rows])
            chosen = torch.stack([chosen[:, i] for i in rows], dim=1)
            stand_in = torch.eye(len(rows), dtype=chosen.dtype, device=chosen.device)
            if _is_mgda(self.aggregator):
                counted = active & (scales > 0)
                stand_in = _stand_ins(torch.stack([counted[i] for i in rows])).to(chosen)
            with _seeded(seed, products.device), _without_autocast(chosen):
                row_weights = self.weighting(stand_in @ chosen @ stand_in.T)
            _check_shape(row_weights, len(rows), self.name)
            for i, weight in zip(rows, (row_weights.to(chosen) @ stand_in).unbind(), strict=True):
                weights[i] = weight
        return torch.stack(weights)

    def __call__(
        self, columns: Iterable[Sequence[Tensor | None]], scales: Tensor, slots: Sequence[int]
    ) -> list[Tensor | None]:
        """Combines gradients by an aggregator that uses the gradients themselves.

        Args:
            columns: For each tensor the losses' gradients, None where there is none.
            scales: The losses' factors, with shape ``(K,)``.
            slots: The losses that the host does not know to be inactive.
        """
        columns = list(columns)
        samples = [next((g for g in column if g is not None), None) for column in columns]
        gradients = [None if sample is None else torch.zeros_like(sample) for sample in samples]
        present = [(i, sample) for i, sample in enumerate(samples) if sample is not None]
        rows = self._rows(len(scales), slots)
        if not rows or self.aggregator is None:
            return gradients
        matrix = torch.stack(
            [torch.cat([_scaled(columns[i][k], s, scales[k]) for i, s in present]) for k in rows]
        )
        with _without_autocast(matrix):
            line = self.aggregator(matrix)
        _check_shape(line, matrix.shape[1], self.name)
        parts = line.split([sample.numel() for _, sample in present])
        for (i, sample), part in zip(present, parts, strict=True):
            gradients[i] = part.view(sample.shape).to(sample.dtype)
        return gradients

    def _rows(self, count: int, slots: Sequence[int]) -> Sequence[int]:
        """Chooses the losses that are rows: those of ``slots``, or all in the weights' order."""
        return range(count) if _needs_every_row(self.aggregator) else slots


def _needs_every_row(aggregator: Aggregator | None) -> bool:
    """Whether an aggregator has one number per row, or a memory of each row."""
    weighting = getattr(aggregator, "weighting", None)
    named = [(aggregator, name) for name in ("pref_vector", "weights", "n_tasks", "reset")]
    return any(getattr(x, name, None) is not None for x, name in [*named, (weighting, "weights")])


def _is_mgda(aggregator: Aggregator | None) -> bool:
    """Whether it looks for the shortest vector of a convex hull, which one zero row makes zero."""
    kind = getattr(sys.modules.get(TORCHJD), "MGDA", None)
    return kind is not None and isinstance(aggregator, kind)


def _stand_ins(active: Tensor) -> Tensor:
    """Makes a matrix, boolean with shape ``(K, K)``, that replaces inactive rows by an active one.

    A corner that occurs twice changes no hull, and the number of rows stays known to the host.
    """
    places = torch.arange(len(active), device=active.device)
    first = active.to(torch.uint8).argmax()
    return torch.where(active, places, first)[:, None] == places


def _scaled(gradient: Tensor | None, sample: Tensor, scale: Tensor) -> Tensor:
    """Flattens one loss's scaled gradient, in float32 or wider; zeros where it has none."""
    gradient = torch.zeros_like(sample) if gradient is None else gradient
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return weighted_sum([wide], scale.reshape(1)).reshape(-1)  # type: ignore[union-attr]


def _check_shape(returned: object, size: int, name: str) -> None:
    if isinstance(returned, Tensor) and returned.shape == (size,):
        return
    shape = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
    raise InputError(
        f"Parameter `combine` should be an aggregator that makes one row of several. Expected a "
        f"tensor of shape ({size},), found {shape} from {name}. Remedy: such as "
        "`lambda matrix: matrix.mean(0)`, or a name such as 'UPGrad'."
    )


def _without_autocast(matrix: Tensor) -> AbstractContextManager[object]:
    """Keeps autocast from narrowing an aggregator's operands."""
    kind = matrix.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


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
