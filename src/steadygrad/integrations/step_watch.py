"""A gradient watch that trainers ask once an optimizer step."""

import math
import warnings
from typing import Any

import torch
from torch import nn

from steadygrad.watch import Finding, GradientWatch

__all__ = ["BatchWatch", "StepWatch"]


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
        broken = not math.isfinite(self.norms().total)
        found = self.report() if broken and not self._broken else None
        self._broken = broken
        if found is not None:
            self._findings.append(found)
            warnings.warn(str(found), stacklevel=2)


class BatchWatch(StepWatch):
    """A watch whose passes begin with :meth:`begin_batch`, as Lightning may not call the module."""

    def begin(self, inputs: Any) -> None:
        """Ends the pass when the model is called without gradients, to be evaluated."""
        if not torch.is_grad_enabled():
            super().begin(inputs)

    def begin_batch(self, batch: Any) -> None:
        """Begins a pass."""
        super().begin(batch)
