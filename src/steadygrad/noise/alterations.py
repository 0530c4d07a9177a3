"""Steps whose gradients are not what was seen: counted, and one warning with a likely cause."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.formulas.summed_parts import likely_cause
from steadygrad.noise.witness import Verdict

__all__ = ["Alterations"]

# On an accelerator the host looks so seldom, at numbers that have long arrived.
_INTERVAL = 16

# What `.grad` seems to hold, and the remedy.
_CAUSES = {
    "clipping": (
        "smaller ones, as after clipping",
        "noise.step() before gradients are clipped or normalised",
    ),
    "loss scale": (
        "ones that carry another loss scale",
        "NoiseScale(model, scaler=scaler), and noise.step(grad_scale=1.0) after scaler.unscale_()",
    ),
    "accumulation": (
        "ones divided after the backward passes, by the number of micro-batches or samples",
        "noise.step() before that, and the `accumulation` that the losses then have",
    ),
    "leftover": (
        "ones that hold more: gradients left from before, or of a backward pass not seen",
        "zero_grad() before the first micro-batch, and noise told of every backward pass",
    ),
    "cleared": (
        "none",
        "noise.step() before zero_grad()",
    ),
    "unseen": (
        "ones of backward passes that were not seen",
        "NoiseScale(model, samples=...), or `noise.samples(n)` before every backward pass",
    ),
    "summed": (
        "ones added up over the processes, not averaged",
        "noise.step(grad_scale=number of processes), times the loss scale if there is one",
    ),
}


class _Report(NamedTuple):
    """Counts on the host of a step that was altered."""

    parts: int
    samples: int
    processes: int


class Alterations:
    """Counts steps left out because ``.grad`` was not the sum of the parts, and warns once.

    Attributes:
        count: Their number, with shape ``()``.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._elements: Tensor | None = None
        self._copied: tuple[Tensor, Any] | None = None
        self._steps, self._warned = 0, False

    def note(self, verdict: Verdict, *, parts: int, samples: int, processes: int) -> None:
        """Counts a step if it was altered.

        Args:
            verdict: What a step's gradients say.
            parts: Number of parts on this process.
            samples: Number of samples on this process.
            processes: Number of processes.
        """
        self.count.add_(verdict.altered)
        if self._warned:
            return
        report = _Report(parts, samples, processes)
        if verdict.altered.device.type == "cpu":
            if verdict.altered:
                self._warn(_rows(verdict), verdict.unit, report)
            return
        rows = _rows(verdict)
        # The newest altered step's; before there was one it holds nothing of interest.
        self._elements = rows if self._elements is None else self._elements
        self._elements = torch.where(verdict.altered, rows, self._elements)
        self._steps += 1
        if self._steps % _INTERVAL == 1:
            self._look(verdict.unit, report)

    def _look(self, unit: float, report: _Report) -> None:
        """Reads the copy of an interval ago, and makes the next one; waits for neither."""
        assert self._elements is not None
        if self._copied is not None and self._copied[1].query():
            count, *elements = self._copied[0].tolist()
            if count:
                self._warn(torch.tensor(elements).view_as(self._elements), unit, report)
                return
        there = torch.cat([self.count.to(self._elements)[None], self._elements.flatten()])
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
        here.copy_(there, non_blocking=True)
        event = torch.Event(there.device)
        event.record()
        self._copied = here, event

    def _warn(self, elements: Tensor, unit: float, report: _Report) -> None:
        seen, found, scales = elements.tolist()
        cause = likely_cause(seen, found, scales, unit=unit, **report._asdict())
        what, remedy = _CAUSES[cause]
        self._warned = True
        warnings.warn(
            "Expected `.grad` to be the sum of the micro-batches' gradients at noise.step(). "
            f"Found {what}. Such steps are left out, and `noise.altered` counts them. "
            f"Remedy: {remedy}.",
            stacklevel=6,
        )


def _rows(verdict: Verdict) -> Tensor:
    """Elements of the parts, of ``.grad``, and loss scales, with shape ``(3, n)``."""
    scales = torch.zeros_like(verdict.seen) + verdict.scales
    return torch.stack([verdict.seen, verdict.found, scales])
