"""From a time budget to amounts of work, by arithmetic alone.

Work is counted in samples: one sample is one forward and backward pass of it. The same budget,
speed and task always give the same plan, whatever the machine is doing meanwhile.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from steadygrad._checks import InputError

__all__ = [
    "END_MARKS",
    "EVALUATION_COST",
    "FRACTIONS",
    "Plan",
    "Point",
    "make_plan",
    "parse_budget",
]

# Parts of a branch after which the smallest batch is evaluated; the curve through them says how
# many samples another batch size wasted.
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Evaluations at the end of every branch, one step of the largest batch apart: the loss after a
# single optimizer step depends too much on that step's samples.
END_MARKS = 3

# The nominal machine is never quite free; start-up, evaluation and the report also take time.
SHARE_OF_BUDGET = 0.65
# Loading torch and the data, and drawing the report, in seconds.
START_UP = 4.0
MICRO_BATCHES = 8
MAX_MULTIPLE = 512
MAX_POINTS = 4
# Adam's second moment (beta2 = 0.95) needs about that many steps to adapt to another batch size.
MIN_STEPS = 16
# Evaluating a sample is its forward pass: about a third of training on it.
EVALUATION_COST = 1 / 3

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Point:
    """Where the main trajectory stops, and what is measured there.

    Attributes:
        samples: Samples seen by then.
        branch_samples: Samples each branch is trained over.
        multiples: The branches' batch sizes, as multiples of the task's.
        noise_steps: Measurements of the noise scale, each on ``MICRO_BATCHES`` micro-batches.
    """

    samples: int
    branch_samples: int
    multiples: tuple[int, ...]
    noise_steps: int

    def end_marks(self, batch_size: int) -> tuple[int, ...]:
        """Samples of a branch after which it is evaluated, whatever its own batch size."""
        largest = self.multiples[-1] * batch_size
        marks = (self.branch_samples - largest * back for back in range(END_MARKS))
        return tuple(mark for mark in marks if mark > 0)[::-1]


@dataclass(frozen=True)
class Plan:
    """All the work of a study.

    Attributes:
        batch_size: The task's own batch size, in samples.
        points: Points of training, by samples seen.
        repeats: Branches with their own data order at each point and batch size.
        samples_per_second: Training speed that the plan reckons with.
        work: Cost of it all, in samples; 0 until :meth:`priced`.
    """

    batch_size: int
    points: tuple[Point, ...]
    repeats: int
    samples_per_second: float
    work: int = 0

    def ends(self) -> tuple[int, ...]:
        """Work done when each point of training is measured; the last is all of it."""
        before = (0, *(point.samples for point in self.points))
        trained = [
            point.samples - start + self._trained(point)
            for start, point in zip(before, self.points, strict=False)
        ]
        evaluations = [self._evaluations(point) for point in self.points]
        # A record keeps all the work together: what is no training is spread over evaluations.
        each = (self.work - sum(trained)) / sum(evaluations)
        costs = (steps + each * count for steps, count in zip(trained, evaluations, strict=True))
        return tuple(map(round, accumulate(costs)))

    def _trained(self, point: Point) -> int:
        """Samples of training at a point: the branches', and the noise scale's."""
        branches = self.repeats * len(point.multiples) * point.branch_samples
        return branches + point.noise_steps * MICRO_BATCHES * self.batch_size

    def _evaluations(self, point: Point) -> int:
        branches = self.repeats * len(point.multiples)
        return 1 + branches * END_MARKS + self.repeats * len(FRACTIONS)

    def priced(self, valid_size: int) -> "Plan":
        """The same plan, with its cost."""
        work = float(self.points[-1].samples) + sum(map(self._trained, self.points))
        evaluations = sum(map(self._evaluations, self.points))
        return replace(self, work=math.ceil(work + evaluations * valid_size * EVALUATION_COST))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record's header."""
        return {
            "points": [point.samples for point in self.points],
            "branch_samples": [point.branch_samples for point in self.points],
            "multiples": list(self.points[-1].multiples),
            "multiples_by_point": [list(point.multiples) for point in self.points],
            "noise_steps": [point.noise_steps for point in self.points],
            "micro_batches": MICRO_BATCHES,
            "repeats": self.repeats,
            "batch_size": self.batch_size,
            "samples_per_second": self.samples_per_second,
            "work": self.work,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that a record's header holds."""
        columns = ("points", "branch_samples", "multiples_by_point", "noise_steps")
        rows = zip(*(data[name] for name in columns), strict=True)
        points = tuple(Point(n, delta, tuple(ks), steps) for n, delta, ks, steps in rows)
        return cls(
            data["batch_size"], points, data["repeats"], data["samples_per_second"], data["work"]
        )


def parse_budget(text: str) -> float:
    """Reads a duration: ``30s``, ``5m``, ``1.5h``; a bare number is seconds.

    Returns:
        Seconds.

    Raises:
        InputError: If it is not a positive duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not (match and 0 < seconds < 1e9):
        raise InputError(
            f"The budget should be a duration such as 30s, 5m or 2h. Found {text!r}. "
            "Remedy: --budget 5m."
        )
    return seconds


def make_plan(
    budget_seconds: float,
    samples_per_second: float,
    *,
    batch_size: int,
    train_size: int,
    valid_size: int,
) -> Plan:
    """Chooses the longest training whose measurements fit a budget.

    The points of training are a quarter of one another; a branch is half as long as the training
    before it. Three repeats, unless only two leave time for a second point.

    Args:
        budget_seconds: Wall-clock time for the whole study.
        samples_per_second: Training speed.
        batch_size: The task's batch size.
        train_size: Training samples; no batch is larger.
        valid_size: Samples in one evaluation.

    Raises:
        InputError: If not even one point with three batch sizes and two repeats fits.
    """
    work = SHARE_OF_BUDGET * max(0.0, budget_seconds - START_UP) * samples_per_second
    sizes = batch_size, train_size, valid_size
    two, three = (
        max(_plans(repeats, *sizes, samples_per_second, work), key=_horizon, default=None)
        for repeats in (2, 3)
    )
    plan = two
    if three and two and len(three.points) >= min(2, len(two.points)):
        plan = three
    if plan is None:
        raise _too_small(budget_seconds, samples_per_second, *sizes)
    return plan


def _horizon(plan: Plan) -> int:
    return plan.points[-1].samples


def _plans(
    repeats: int, size: int, train_size: int, valid_size: int, speed: float, work: float
) -> Iterator[Plan]:
    """The plans that fit, from short to long."""
    for horizon in _horizons(size):
        points = _points(horizon, size, train_size)
        plan = Plan(size, points, repeats, speed).priced(valid_size)
        # Longer ones may still be cheaper, as their points move, but not by that much.
        if plan.work > 2 * work:
            return
        if plan.work <= work and len(points[-1].multiples) >= 3:
            yield plan


def _too_small(
    budget: float, speed: float, size: int, train_size: int, valid_size: int
) -> InputError:
    points = _points(next(_horizons(size)), size, train_size)
    if len(points[-1].multiples) < 3:
        return InputError(
            f"Expected at least {4 * size} training samples, for branches at 4 times the batch "
            f"size {size}. Found {train_size}. Remedy: a smaller Task.batch_size or more data."
        )
    work = Plan(size, points, 2, speed).priced(valid_size).work
    least = work / (SHARE_OF_BUDGET * speed) + START_UP
    return InputError(
        f"The budget is too small to measure anything: found {budget:g}s, expected at least "
        f"{math.ceil(least)}s for this task at {speed:g} samples a second. "
        f"Remedy: --budget {math.ceil(least)}s or more."
    )


def _horizons(size: int) -> Iterator[int]:
    """Lengths of training to try, in samples: steps of about a fifth."""
    for doubling in range(4, 40):
        yield from (size * quarter << doubling for quarter in (4, 5, 6, 7))


def _points(horizon: int, size: int, train_size: int) -> tuple[Point, ...]:
    """The last point is ``horizon`` samples; each one before it is at a quarter of the next."""
    seen: list[int] = []
    while horizon >= 64 * size and len(seen) < MAX_POINTS:
        seen.append(horizon)
        horizon = horizon // 4 // size * size
    # A single point has no room for 8 multiples in the smallest plans.
    floor = 128 * size if len(seen) > 1 else 64 * size
    return tuple(_point(samples, max(samples // 2, floor), size, train_size) for samples in seen)[
        ::-1
    ]


def _point(samples: int, length: int, size: int, train_size: int) -> Point:
    top = min(length // (MIN_STEPS * size), train_size // size, MAX_MULTIPLE)
    multiples = tuple(1 << power for power in range(max(1, top).bit_length()))
    largest = multiples[-1] * size
    # Every batch size divides it: all branches see exactly the same samples.
    branch = max(1, length // largest) * largest
    # Samples seen twice in one measurement would pass for independent ones.
    most = min(64, train_size // (MICRO_BATCHES * size))
    noise_steps = max(2, min(most, max(8, branch // (MICRO_BATCHES * size))))
    return Point(samples, branch, multiples, noise_steps)
