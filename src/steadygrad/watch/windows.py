"""Ways of cutting a batch into micro-batches, and the names of their faults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad._nests import row_counts, take_rows

__all__ = ["WORDS", "AccumulationCheck", "Window", "not_samples", "ragged", "samples"]


@dataclass(frozen=True)
class Window:
    """One way of cutting the batch, and how its gradient compares with the whole one's.

    Attributes:
        name: Name of the way.
        sizes: Samples of each micro-batch.
        ratio: Norm of the accumulated gradient over that of the whole batch's.
        cosine: Cosine of the angle between them.
        layers: Ratio and cosine of each module that has weights.
        bug: Name of the bug; empty where both are equal.
        words: Description of the bug, and the remedy.
    """

    name: str
    sizes: tuple[int, ...]
    ratio: float
    cosine: float
    layers: Mapping[str, tuple[float, float]]
    bug: str
    words: str


@dataclass(frozen=True)
class AccumulationCheck:
    """Comparison of the gradients in each window."""

    windows: Sequence[Window]

    @property
    def bugs(self) -> Sequence[str]:
        """Names of the bugs found, each once."""
        return list(dict.fromkeys(window.bug for window in self.windows if window.bug))

    def __str__(self) -> str:
        """A line for each window."""
        return "\n".join(
            f"{w.name} ({_cut_in_words(w.sizes)}): ratio {w.ratio:.4g}, "
            f"cosine {w.cosine:.4g}. {w.words}"
            for w in self.windows
        )


def samples(batch: Any, least: int, given: int | None) -> int:
    """The number of a nest's samples: a length that all that it holds has.

    Raises:
        InputError: If there is none of at least ``least``.
    """
    lengths = row_counts(batch) if given is None else [given]
    found = str(lengths[0]) if lengths else type(batch).__name__
    for count in dict.fromkeys(length for length in lengths if length >= least):
        try:
            take_rows(batch, count, torch.arange(0, device="cpu"))
        # Sparse and nested tensors of some kinds cannot be cut.
        except (LookupError, RuntimeError) as error:
            found = f"{str(error).splitlines()[0]} beside {count} samples"
        else:
            return count
    raise not_samples(found, least)


def not_samples(found: str, least: int) -> InputError:
    """The refusal of a batch that cannot be cut."""
    return InputError(
        f"Parameter `batch` should hold at least {least} samples, one in each row of all its "
        f"tensors, arrays and lists, in any order. Found {found}. Remedy: a larger batch; or "
        "`split=`, a function from the batch and indices to a micro-batch of these samples."
    )


def ragged(count: int, parts: int) -> list[int]:
    """Sizes that grow by equal steps, as nearly as whole numbers do."""
    more = count - parts
    ends = [round(more * i * (i + 1) / (parts * (parts + 1))) for i in range(parts + 1)]
    return [1 + stop - start for start, stop in pairwise(ends)]


def _cut_in_words(sizes: Sequence[int]) -> str:
    one = len({*sizes}) == 1
    return f"{len(sizes)} x {sizes[0]}" if one else " + ".join(map(str, sizes))


WORDS = {
    "": "The same gradient.",
    "random": "The whole batch has another gradient each time. Remedy: for this check, turn off "
    "random numbers, and modules that each pass changes (spectral norm).",
    "rounding": "The rounding error of this gradient is too large for a comparison. Remedy: make "
    "the check in float32, without autocast, or earlier in training.",
    "batch": "The whole batch's gradient is not a weighted sum of the micro-batches' gradients: a "
    "sample's loss depends on the other samples (BatchNorm, a contrastive loss), or what was cut "
    "is no sample. Remedy: statistics that do not depend on the batch, or no accumulation.",
    "steps": "The loop changes the weights, which were put back; an optimizer's state was not. "
    "Remedy: leave the step out of `accumulate`.",
    "lost": "Only {left} of {parts} micro-batches are in the gradient. Remedy: a backward pass for "
    "each, and gradients cleared once a window, before the first.",
    "overflow": "The accumulated gradient is not finite, and the whole batch's is. Remedy: look "
    "for a division by zero, as for a micro-batch without labels.",
    "sum": "The gradient is {parts} times too large: losses are added up. Remedy: divide each by "
    "the number of micro-batches.",
    "twice": "The gradient is {parts} times too small: it is divided by the number of micro-"
    "batches twice. Remedy: leave one of the two divisions out.",
    "short": "The loop divides by {whole} where the window has {parts} micro-batches. Remedy: "
    "divide by the number that it has.",
    "means": "All micro-batches have the same weight although they contribute different parts of "
    "the loss (a mean of means). Remedy: add up the losses of all samples or tokens, and divide "
    "once by their number in the whole window.",
    "factor": "The gradient is {ratio:.4g} times as large as it should be, in the right "
    "direction. Remedy: look for what the losses are divided by.",
    "weights": "Micro-batches have the weights {used} where {right} would be right. Remedy: look "
    "for what each micro-batch's loss is divided by.",
    "other": "The accumulated gradient is not made of the micro-batches' gradients. Remedy: look "
    "for gradients that were left from before, clipping, or another loss in the loop.",
}
