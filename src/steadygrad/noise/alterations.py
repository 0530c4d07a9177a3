"""Steps whose gradients differ from the parts seen: a count, and one warning with its cause."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.formulas.summed_parts import likely_cause
from steadygrad.noise.parts import PartSums
from steadygrad.noise.witness import WIDTH, Verdict

__all__ = ["Alterations"]

# Steps between two reads on an accelerator; each reads the copy that was started at the one before.
_INTERVAL = 16

# What `.grad` seems to hold, and the remedy.
_CAUSES = {
    "clipping": (
        "gradients that are smaller, as after clipping",
        "call noise.step() before gradients are clipped or normalised",
    ),
    "loss scale": (
        "gradients that carry another loss scale",
        "make NoiseScale(model, scaler=scaler); noise.step(grad_scale=1.0) after unscale_()",
    ),
    "accumulation": (
        "gradients that were divided after the backward passes, by their number or the samples'",
        "call noise.step() before the division, with the `accumulation` of the undivided losses",
    ),
    "leftover": (
        "gradients of an earlier step, of a backward pass that was not announced, or of too few",
        "call zero_grad() before the first, announce all, and call noise.drop_step() if dropped",
    ),
    "cleared": ("no gradients", "call noise.step() before zero_grad()"),
    "unseen": (
        "gradients of backward passes that were not announced",
        "make NoiseScale(model, samples=...), or call `noise.samples(n)` before every pass",
    ),
    "summed": (
        "gradients that were added up over the processes, not averaged",
        "call noise.step(grad_scale=number of processes), times the loss scale if there is one",
    ),
}


class Alterations:
    """Counts steps left out because ``.grad`` was not the sum of the parts, and warns once.

    Attributes:
        count: Number of such steps, with shape ``()``.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._on_host = device.type == "cpu"
        self._newest: Tensor | None = None
        self._copied: tuple[Tensor, Any] | None = None
        self._steps, self._warned = 0, False

    def note(self, verdict: Verdict, sums: PartSums, processes: int) -> None:
        """Counts a step if it was altered."""
        self.count.add_(verdict.altered)
        if self._warned:
            return
        report = {
            "parts": sums.parts,
            "samples": sums.samples,
            "processes": processes,
            "unit": verdict.unit,
        }
        if self._on_host:
            if verdict.altered:
                self._warn(_flagged(verdict).tolist(), report)
            return
        # The newest altered step's; zeros before there was one.
        rows = _flagged(verdict)
        newest = torch.zeros_like(rows) if self._newest is None else self._newest
        self._newest = torch.where(verdict.altered, rows, newest)
        self._steps += 1
        if self._steps % _INTERVAL == 1:
            self._look(self._newest, report)

    def _look(self, newest: Tensor, report: dict[str, Any]) -> None:
        """Reads the copy of an interval ago, and starts the next one; waits for neither."""
        if self._copied is not None and self._copied[1].query():
            numbers = self._copied[0].tolist()
            if numbers[0]:
                self._warn(numbers, report)
                return
        self._copied = self._copy(newest)

    @staticmethod
    def _copy(newest: Tensor) -> tuple[Tensor, Any]:
        """A copy on the host, and the event after which it is there."""
        here = torch.empty(newest.shape, dtype=newest.dtype, pin_memory=newest.is_cuda)
        here.copy_(newest, non_blocking=True)
        event = torch.Event(newest.device)
        event.record()
        return here, event

    def _warn(self, flagged: Sequence[float], report: dict[str, Any]) -> None:
        rows = [flagged[1 + i : 1 + i + WIDTH] for i in range(0, 3 * WIDTH, WIDTH)]
        seen, found, scales = zip(*(row for row in zip(*rows, strict=True) if row[2]), strict=True)
        what, remedy = _CAUSES[likely_cause(seen, found, scales, **report)]
        self._warned = True
        warnings.warn(
            "Expected `.grad` to be the sum of the micro-batches' gradients at noise.step(). "
            f"Found {what}. Such steps are left out, and `noise.altered` counts them. "
            f"Remedy: {remedy}.",
            stacklevel=6,
        )


def _flagged(verdict: Verdict) -> Tensor:
    """Whether the step was altered, then elements of the parts and ``.grad``, and loss scales."""
    scales = torch.zeros_like(verdict.seen) + verdict.scales
    rows = torch.stack([verdict.seen, verdict.found, scales])
    # Padded to one width, as steps compare different parameters; a scale of zero marks padding.
    rows = nn.functional.pad(rows, (0, WIDTH - rows.shape[1]))
    return torch.cat([verdict.altered.to(rows).view(1), rows.flatten()])
