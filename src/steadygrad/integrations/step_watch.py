"""A gradient watch that trainers ask once an optimizer step."""

import math
import warnings

from torch import nn

from steadygrad.watch import Finding, GradientWatch

__all__ = ["StepWatch"]


class StepWatch(GradientWatch):
    """Warns once for each run of consecutive steps with non-finite gradients.

    Args:
        model: The model as it is called in training.
        findings: Where the causes are appended.
    """

    def __init__(self, model: nn.Module, findings: list[Finding]) -> None:
        super().__init__(model)
        self._findings, self._broken = findings, False

    def step(self) -> None:
        """Looks at the step's gradients, which waits for the device; every process must call it."""
        broken = not math.isfinite(math.hypot(*self.norms().values()))
        finding = self.report() if broken and not self._broken else None
        self._broken = broken
        if finding is not None:
            self._findings.append(finding)
            warnings.warn(str(finding), stacklevel=2)
