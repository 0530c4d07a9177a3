"""The phases of training, and their parts: what is counted is kept part by part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AFTER", "BEFORE", "PARTS", "SEARCH", "Plan", "make_plan"]

BEFORE, SEARCH, AFTER = "before", "search", "after"
# Of a phase. What is said of it rests on the second half of them, when its scales have settled.
PARTS = 8
# Evaluating a sample is its forward pass: about a third of training on it.
EVALUATION_COST = 1 / 3


@dataclass(frozen=True)
class Plan:
    """All the work of a study.

    Attributes:
        batch_size: The task's, in samples.
        steps: Of each phase, in their order: one loss scale, a scale for each layer found from
            what is measured, and the scales that are proposed.
        valid_size: Samples of one evaluation; there is one after the first phase and the last.
    """

    batch_size: int
    steps: Mapping[str, int]
    valid_size: int

    @property
    def work(self) -> int:
        """Cost of it all, in samples."""
        return sum(self.steps.values()) * self.batch_size + 2 * self.evaluation

    @property
    def evaluation(self) -> int:
        """Cost of one evaluation, in samples."""
        return math.ceil(self.valid_size * EVALUATION_COST)

    def stretch(self, phase: str, part: int) -> tuple[int, int]:
        """First step of a part of a phase, and the one after its last."""
        steps = self.steps[phase]
        return steps * part // PARTS, steps * (part + 1) // PARTS

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record's header."""
        return {
            "batch_size": self.batch_size,
            "steps": dict(self.steps),
            "parts": PARTS,
            "valid_size": self.valid_size,
            "work": self.work,
        }

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> "Plan":
        """Reads what :meth:`as_dict` wrote."""
        return cls(kept["batch_size"], kept["steps"], kept["valid_size"])


def make_plan(steps: int, *, batch_size: int, valid_size: int) -> Plan:
    """Every phase sees the same steps: gradients change as training converges."""
    phases = dict.fromkeys((BEFORE, SEARCH, AFTER), steps)
    return Plan(batch_size, phases, valid_size)
