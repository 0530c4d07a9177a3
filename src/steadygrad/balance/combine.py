"""What takes the place of the sum: an aggregator that resolves conflicts between gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.formulas.balance import weighted_sum

__all__ = ["Combiner", "load_aggregator"]

Aggregator = Callable[[Tensor], Tensor]

# What an aggregator has that knows how many rows it will see: numbers for each, or a memory.
SIZED_BY = ("pref_vector", "weights", "_weights", "n_tasks", "reset")


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

    It sees no row of a loss that the host knows to be left out, unless its rows are counted. What
    only the device knows to be left out is a row of zeros; but MGDA, to which that is an answer,
    sees another loss's row in its place.

    Args:
        aggregator: A function of a matrix with shape ``(K, n)`` that returns ``(n,)``, or None for
            the sum.
    """

    def __init__(self, aggregator: Aggregator | None) -> None:
        self.aggregator = aggregator
        self.weighting = getattr(aggregator, "gramian_weighting", None)
        self.sized = any(getattr(aggregator, name, None) is not None for name in SIZED_BY)
        # The shortest vector of a convex hull is zero as soon as one of its corners is.
        self.of_hull = any(kind.__name__ == "MGDA" for kind in type(aggregator).__mro__)

    @property
    def needs_gram(self) -> bool:
        """Whether inner products are all it looks at."""
        return self.weighting is not None

    @property
    def needs_matrix(self) -> bool:
        """Whether it looks at the gradients themselves."""
        return self.aggregator is not None and not self.needs_gram

    @property
    def name(self) -> str:
        """What the aggregator is called, the same in every process."""
        found: str = getattr(self.aggregator, "__name__", type(self.aggregator).__name__)
        return found

    def check(self, ranks: int) -> None:
        """Refuses what would differ between processes.

        Raises:
            InputError: If the aggregator looks at the gradients themselves, on several processes.
        """
        if self.needs_matrix and ranks > 1:
            raise InputError(
                f"Expected one process, or an aggregator with a `gramian_weighting`. Found {ranks} "
                f"processes and {self.name}, which would see each process's items alone. "
                "Remedy: an aggregator such as UPGrad, or process_group=None."
            )

    def weights(
        self, products: Tensor, counted: Tensor, *, slots: Sequence[int], seed: int
    ) -> Tensor:
        """Weights from inner products of the scaled gradients.

        Args:
            products: The inner products, with shape ``(K, K)``; zero for losses left out.
            counted: Which losses are not left out, boolean with shape ``(K,)``.
            slots: The losses that the host does not know to be left out.
            seed: What an aggregator that draws numbers starts from; processes have it in common.

        Returns:
            Weights with shape ``(K,)``, zero for losses outside of ``slots``.
        """
        if self.weighting is None:
            return products.new_ones(())
        chosen = range(len(products)) if self.sized else slots
        weights = list(products.new_zeros(len(products)).unbind())
        if chosen:
            # Picked one by one: a list as an index is copied to the device.
            rows = torch.stack([products[i] for i in chosen])
            rows = torch.stack([rows[:, i] for i in chosen], dim=1)
            there = torch.stack([counted[i] for i in chosen])
            onto = _stand_ins(there).to(rows) if self.of_hull else None
            with _drawing_from(seed, products.device), _as_given(rows):
                found = self.weighting(rows if onto is None else onto @ rows @ onto.T)
            _check_shape(found, len(chosen), self.name)
            found = found.to(rows) if onto is None else found.to(rows) @ onto
            for i, weight in zip(chosen, found.unbind(), strict=True):
                weights[i] = weight
        return torch.stack(weights)

    def __call__(
        self, columns: Iterable[Sequence[Tensor | None]], scales: Tensor, slots: Sequence[int]
    ) -> list[Tensor | None]:
        """One gradient for each tensor, from each tensor's gradients by loss.

        Args:
            columns: For each tensor the losses' gradients, None where there is none.
            scales: The losses' factors, with shape ``(K,)``.
            slots: The losses that the host does not know to be left out.
        """
        if self.aggregator is None or self.needs_gram:
            return [weighted_sum(column, scales) for column in columns]
        chosen = range(len(scales)) if self.sized else slots
        return self._by_matrix(list(columns), scales, chosen, self.aggregator)

    def _by_matrix(
        self,
        rows: list[Sequence[Tensor | None]],
        scales: Tensor,
        slots: Sequence[int],
        aggregator: Aggregator,
    ) -> list[Tensor | None]:
        samples = [next((g for g in row if g is not None), None) for row in rows]
        there = [i for i, sample in enumerate(samples) if sample is not None]
        if not slots:
            return [None if sample is None else torch.zeros_like(sample) for sample in samples]
        matrix = torch.stack([_row(rows, samples, scales, k, there) for k in slots])
        sizes = [samples[i].numel() for i in there]  # type: ignore[union-attr]
        with _as_given(matrix):
            line = aggregator(matrix)
        _check_shape(line, matrix.shape[1], self.name)
        parts = dict(zip(there, line.split(sizes), strict=True))
        return [
            None if sample is None else parts[i].view(sample.shape).to(sample.dtype)
            for i, sample in enumerate(samples)
        ]


def _as_given(matrix: Tensor) -> AbstractContextManager[object]:
    """Keeps autocast from narrowing what an aggregator computes with."""
    kind = matrix.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _check_shape(found: object, size: int, name: str) -> None:
    if isinstance(found, Tensor) and found.shape == (size,):
        return
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise InputError(
        f"Parameter `combine` should be an aggregator that makes one row of several. Expected a "
        f"tensor of shape ({size},), found {shape} from {name}. Remedy: such as "
        "`lambda matrix: matrix.mean(0)`, or a name such as 'UPGrad'."
    )


def _stand_ins(counted: Tensor) -> Tensor:
    """Which row stands in each place, boolean with shape ``(K, K)``: for rows left out the first.

    A hull has the same points if one of its corners is named twice. So rows are left out without
    a matrix whose size only the device knows.
    """
    places = torch.arange(len(counted), device=counted.device)
    first = counted.to(torch.uint8).argmax()
    return torch.where(counted, places, first)[:, None] == places


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Gives random numbers that are the same on all processes, and takes none from the caller's."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        # Not `torch.manual_seed`, which reaches devices that are not put back.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


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
