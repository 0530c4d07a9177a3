"""Ways of cutting a batch into micro-batches, and the names of their faults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils import _pytree

__all__ = ["WORDS", "AccumulationCheck", "Window", "cut", "ragged", "samples"]


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


def samples(batch: Any) -> int:
    """The leading dimension of a nest of tensors; 0 if there is none."""
    sizes = [x.shape[0] for x in _pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 0


def cut(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a nest; tensors without a sample dimension are kept."""
    count = samples(batch)

    def part(leaf: Any) -> Any:
        whole = not (isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count)
        return leaf if whole else leaf[start:stop]

    return _pytree.tree_map(part, batch)


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
    "random": "The whole batch has another gradient each time. Remedy: turn dropout and other "
    "random numbers off for this check.",
    "rounding": "The rounding error of this gradient is too large for a comparison. Remedy: make "
    "the check in float32, without autocast, or earlier in training.",
    "batch": "The whole batch's gradient is not a weighted sum of the micro-batches' gradients: a "
    "sample's loss depends on the other samples (BatchNorm, a contrastive loss). Remedy: "
    "statistics that do not depend on the batch, or no accumulation.",
    "lost": "Only {left} of {parts} micro-batches are in the gradient. Remedy: clear gradients "
    "once a window, not before each backward pass.",
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
