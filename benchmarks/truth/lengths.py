"""Critical batch sizes of trainings of any length in a world, and trainings without an end of data.

Beside SGD and Adam there are ``normalized`` steps: each weight's gradient is divided by its root
mean square, as it is expected at that step. They are near to Adam's, and as exact as SGD's.
"""

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from benchmarks.truth.compiled import CompiledTrainer
from benchmarks.truth.exact import steps_curve
from benchmarks.truth.worlds import World
from numba import njit

from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise.plan import end_marks, sizes_of, warmup_samples
from steadygrad.studies.course import Rate

__all__ = ["FreshTrainer", "Lengths", "LongWorld", "best_of"]

# Fewest steps of a training that is looked at.
FEWEST = 16
# Steps of the rates that are tried, to the octave.
FINE = 4
# Largest overhead that is looked at; beyond it a size is not followed further.
MOST = 2.0
# Overheads whose lengths the smallest batch is trained over where rates decay.
DECAYED = (0.0, 0.1, 0.2, 0.35, 0.6, 1.0, 1.5, 2.2)
# Adam's replicas at the smallest batch.
REPLICAS = 192


@dataclass(frozen=True, kw_only=True)
class LongWorld(World):
    """A world with trainings of many lengths.

    Attributes:
        normalized: Whether gradients are divided by their expected root mean squares.
        decays: Whether the rate falls linearly to zero over each training.
    """

    normalized: bool = False
    decays: bool = False

    @property
    def simulated(self) -> bool:
        """Whether expected losses are means over replicas."""
        return self.optimizer == "adam" and not self.normalized


@njit(cache=True, fastmath={"contract", "reassoc", "arcp", "nsz"})
def losses_of(squares, h, covariance, variance, multiplicative, normalized, share, rates):
    """Expected losses after each step of one size, whose inverse is ``share``, as in ``exact``."""
    squares, losses = squares.copy(), np.empty(len(rates) + 1)
    total, count = 0.0, len(h)
    for j in range(count):
        total += h[j] * squares[j]
    losses[0] = (variance + total) / 2
    for t in range(len(rates)):
        noise, own = variance, 1.0
        if multiplicative:
            noise, own = 2 * losses[t], 1 + share
        total = 0.0
        for j in range(count):
            rate = rates[t]
            spread = share * noise * covariance[j]
            if normalized:
                rate /= np.sqrt(own * h[j] ** 2 * squares[j] + spread)
            kept = (1 - rate * h[j]) ** 2 + (own - 1) * (rate * h[j]) ** 2
            squares[j] = squares[j] * kept + rate**2 * spread
            total += h[j] * squares[j]
        losses[t + 1] = (variance + total) / 2
    return losses


@njit(cache=True)
def _normalized_step(weights, squares, rows, h, covariance, variance, multiplicative, lr):
    """One step on a batch of rows, and of the expected squares of the weights, in place."""
    count, size = rows.shape[0], len(weights)
    gradient, share, own, noise = np.zeros(size), 1.0 / rows.shape[0], 1.0, variance
    if multiplicative:
        own, noise = 1 + share, variance + (h * squares).sum()
    for i in range(count):
        factor = 1.0
        if multiplicative:
            factor = rows[i, size]
            for j in range(size):
                factor += rows[i, j] * weights[j]
        for j in range(size):
            gradient[j] += factor * rows[i, j]
    for j in range(size):
        mean = gradient[j] / count + (0.0 if multiplicative else h[j] * weights[j])
        spread = share * noise * covariance[j]
        rate = lr / np.sqrt(own * h[j] ** 2 * squares[j] + spread)
        weights[j] -= rate * mean
        kept = (1 - rate * h[j]) ** 2 + (own - 1) * (rate * h[j]) ** 2
        squares[j] = squares[j] * kept + rate**2 * spread


class FreshTrainer(CompiledTrainer):
    """Draws each seed's samples anew, so that the expected losses are those of the formulas.

    A table of data has a mean of its own, and with it another best point.
    """

    drawn: tuple[int, np.ndarray] = (-1, np.zeros((0, 0)))

    def __init__(self, world: LongWorld, seed: int) -> None:
        super().__init__(world, seed)
        self.task.lr_decay = "linear" if world.decays else "none"

    def course(self, seen: float, rate: Rate) -> float:
        return 1 - seen / rate.total if self.world.decays else 1.0

    def make_table(self) -> np.ndarray:
        return np.zeros((4 * self.world.horizon, 0))

    def restart(self, repeat: int = 0) -> None:
        super().restart(repeat)
        self.repeat, self.squares = repeat, self.weights**2

    def rows(self, order, start: int, count: int) -> np.ndarray:
        world = self.world
        if self.drawn[0] != self.repeat:
            generator, extra = np.random.default_rng([self.seed, self.repeat]), 0
            extra = int(world.kind == "regression")
            table = generator.standard_normal((world.horizon, world.size + extra))
            table[:, : world.size] *= np.sqrt(world.covariance)
            table[:, world.size if extra else 0 :] *= world.noise
            self.drawn = self.repeat, table
        return self.drawn[1][start : start + count]

    def step(self, rows: np.ndarray, lr: float) -> None:
        world = self.world
        if not world.normalized:
            super().step(rows, lr)
            return
        _normalized_step(
            self.weights, self.squares, rows, self._curvatures, self._covariance, world.noise**2,
            self._kinds[0], lr,
        )  # fmt: skip

    @property
    def _covariance(self) -> np.ndarray:
        return np.minimum(self._curvatures, 1.0)


@dataclass(frozen=True)
class Lengths:
    """The truth of a world over one length.

    Attributes:
        samples: The length.
        rates: By batch size, the best rate's quarter octaves above the rule's.
        tuned: By batch size, the overhead where each has its best rate.
        ruled: By batch size, that where each has the rate by the rule from the smallest's best.
    """

    samples: int
    rates: dict[int, int] = field(default_factory=dict)
    tuned: dict[int, float] = field(default_factory=dict)
    ruled: dict[int, float] = field(default_factory=dict)

    @classmethod
    @cache
    def of(cls, world: LongWorld, samples: int) -> "Lengths":
        """The truth by expected losses; sizes ascend until they are far beyond the tolerance."""
        found, base = cls(samples), world.batch_size
        best, reference = best_of(world, base, samples, 0)
        first, ends = best, reference_of(world, samples, best, reference)
        for size in sizes_of(base, samples // FEWEST, 1):
            best, curve = best_of(world, size, samples, best)
            found.rates[size] = best
            found.tuned[size] = overhead_of(ends, window(world, curve, samples, size))
            if best != first:
                curve = curve_of(world, size, samples, first)
            found.ruled[size] = overhead_of(ends, window(world, curve, samples, size))
            if min(found.tuned[size], found.ruled[size]) > MOST:
                break
        return found

    def critical(self, tolerance: float = 0.2, *, by_rule: bool = False) -> float:
        """Where the overhead crosses the tolerance for the last time; infinite if it does not."""
        table = self.ruled if by_rule else self.tuned
        sizes, overheads = np.log([*table]), np.array([*table.values()])
        last = int(np.flatnonzero(overheads <= tolerance)[-1])
        if last == len(sizes) - 1:
            return math.inf
        part = (tolerance - overheads[last]) / (overheads[last + 1] - overheads[last])
        return float(np.exp(sizes[last] + part * (sizes[last + 1] - sizes[last])))

    def at(self, size: int) -> float:
        """The overhead of a size at its best rate; the largest known one beyond those."""
        return float(np.interp(np.log(size), np.log([*self.tuned]), [*self.tuned.values()]))


def curve_of(world: LongWorld, size: int, samples: int, octaves: int) -> np.ndarray:
    """Expected losses after each step of a training as the study's, by its own number of steps."""
    steps = samples // size
    warmup = warmup_samples(_AsTask(world), samples, size)
    middles = size * (np.arange(steps) + 0.5)
    parts = np.minimum(1.0, middles / warmup) if warmup else np.ones(steps)
    own = world.lr * 2.0 ** (octaves / FINE)
    rates = own + (learning_rate(own, size, world.batch_size, world.rule) - own) * parts
    rates = rates * ((1 - middles / samples) if world.decays else 1.0)
    if world.simulated:
        more = REPLICAS * min(4, size // world.batch_size)
        return steps_curve(world, np.full(steps, size), rates, more).loss
    kinds = world.kind == "regression", world.normalized
    state = world.initial**2, world.curvatures, world.covariance, world.noise**2
    return losses_of(*state, *kinds, 1.0 / size, rates)


@dataclass(frozen=True)
class _AsTask:
    """What the plan asks of a task."""

    world: LongWorld
    lr_rule = "linear"

    @property
    def batch_size(self) -> int:
        return self.world.batch_size


def best_of(world: LongWorld, size: int, samples: int, near: int) -> tuple[int, np.ndarray]:
    """The rate with the lowest loss, in quarter octaves above the rule's, and its losses."""
    curves: dict[int, np.ndarray] = {}

    def loss(octaves: int) -> float:
        if octaves not in curves:
            with np.errstate(all="ignore"):
                curves[octaves] = curve_of(world, size, samples, octaves)
        value = window(world, curves[octaves], samples, size)[1]
        return value if math.isfinite(value) else math.inf

    best = near
    for stride in (FINE, FINE // 2, 1):
        while True:
            around = min((best, best - stride, best + stride), key=loss)
            if around == best or abs(around) > 12 * FINE:
                break
            best = around
            if math.isinf(loss(best)):  # diverged: lower
                best -= stride
    return best, curves[best]


def window(world: LongWorld, losses: np.ndarray, length: float, size: int) -> tuple[float, float]:
    """Mean place and mean loss of the evaluations at the end of a length."""
    marks = end_marks(round(length), decays=world.decays)
    steps = sorted({min(math.ceil(mark / size), len(losses) - 1) for mark in marks})
    return size * float(np.mean(steps)), float(losses[steps].mean())


def reference_of(world: LongWorld, samples: int, octaves: int, whole: np.ndarray) -> np.ndarray:
    """Places and losses, as rows, of the smallest batch's trainings, the longest first."""
    size, ends = world.batch_size, []
    for time in DECAYED if world.decays else np.linspace(0.0, 1.1 * MOST, 111):
        length = round(samples / (1 + time))
        curve = curve_of(world, size, length, octaves) if world.decays else whole
        ends.append(window(world, curve, length, size))
    return np.array(ends).T


def overhead_of(reference: np.ndarray, end: tuple[float, float]) -> float:
    """Extra samples of a training beside the smallest batch's: from 0 to somewhat over MOST."""
    (places, losses), (place, loss) = reference, end
    first = int(np.argmax(losses >= loss)) if (losses >= loss).any() else len(losses) - 1
    reached = np.log(places[first])
    if first and losses[first] >= loss:
        part = (losses[first] - loss) / (losses[first] - losses[first - 1])
        reached += part * (np.log(places[first - 1]) - reached)
    return float(max(0.0, place / np.exp(reached) - 1))
