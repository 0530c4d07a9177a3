r"""From the losses of branches to the critical batch size, with an interval.

The branch at the task's own batch size is the yardstick: a smooth curve through its losses says
after how many samples :math:`s` it was as low as another branch is after all its :math:`\Delta`
samples. That branch then needed an excess of :math:`\Delta/s - 1` samples, and the critical batch
size is the largest one whose excess is within the tolerance.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steadygrad.studies.advise.curves import (
    Decline,
    between,
    crossing,
    fit_tradeoff,
    isotonic,
    relative,
)
from steadygrad.studies.advise.spread import Noise, Yardstick, mean_loss

__all__ = ["CAP", "DRAWS", "Branch", "Critical", "find_critical", "quantile"]

# The curve starts at a quarter of the branch: a loss above it is at least this much excess.
CAP = 3.0
# How far the curve is trusted beyond the end of its branch.
REACH = 1.5
DRAWS = 400
# Share of the draws in which the yardstick must fall: what does not fall measures nothing.
FALLING = 0.975


@dataclass(frozen=True)
class Branch:
    """One branch.

    Attributes:
        batch_size: In samples.
        repeat: Which data order.
        samples: Samples that ``loss`` stands for; the same for all branches of a point.
        loss: Validation loss near its end; not finite if it diverged.
        curve: ``(samples, loss)`` on the way.
    """

    batch_size: int
    repeat: int
    samples: int
    loss: float
    curve: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Critical:
    """The critical batch size at one point of training.

    Attributes:
        sizes: Batch sizes tried, ascending.
        excess: Extra samples each of them needed, as a fraction of what the smallest needed;
            between -1/3 and 3, which stand for "or less" and "or more".
        draws: Excesses as they might have come out with other noise; a row for each draw.
        value: Largest batch size within the tolerance, in samples; NaN when the smallest batch's
            loss did not fall by more than its noise.
        low: Lower end of the 95% interval.
        high: Upper end; infinite when the largest batch size may still be within the tolerance.
        at_edge: ``"above"`` when every batch size is within the tolerance, ``"below"`` when even
            the second smallest is not.
        level: Validation loss that a batch size within the tolerance reaches.
        fitted: Critical batch size of the model ``1 + B/fitted``, in samples.
        fitted_low: Lower end of its interval.
        fitted_high: Upper end of its interval.
    """

    sizes: tuple[int, ...]
    excess: tuple[float, ...]
    draws: tuple[tuple[float, ...], ...]
    value: float
    low: float
    high: float
    at_edge: str
    level: float
    fitted: float
    fitted_low: float
    fitted_high: float

    def event(self) -> dict[str, Any]:
        """The fields of a record's event."""
        names = ["value", "low", "high", "at_edge", "level"]
        names += ["fitted", "fitted_low", "fitted_high"]
        pairs = zip(self.sizes, self.excess, strict=True)
        return {name: getattr(self, name) for name in names} | {
            "excess": {str(size): extra for size, extra in pairs}
        }


def find_critical(branches: Sequence[Branch], tolerance: float, *, seed: int = 0) -> Critical:
    """Finds the critical batch size and its interval.

    The interval redraws every batch size's mean loss from a normal distribution, whose variance is
    what remains of the losses after the means of batch sizes and of repeats are taken out (the
    repeats share their data order across batch sizes, so their common part cancels). With so few
    repeats that variance is itself uncertain, and is redrawn as well. So are the losses that the
    yardstick goes through, and it is fitted again in every draw.

    Where no noise can be estimated, or a batch size diverged, the interval reaches to the
    neighbouring batch sizes.

    Args:
        branches: Every batch size in every repeat; the smallest with a curve.
        tolerance: Extra samples that are acceptable, as a fraction.
        seed: Of the interval's draws.
    """
    losses, level = _table(branches), max(0.0, tolerance)
    sizes = tuple(sorted(losses))
    length = branches[0].samples
    yardstick = Yardstick([b.curve for b in branches if b.batch_size == sizes[0]])
    curve = yardstick.curve
    means = [mean_loss(losses[size]) for size in sizes]
    excess = _excess(curve, means, length)
    noise = Noise.of(losses)
    draws, falling = _draws(yardstick, noise, means, length, level, seed)
    value = _largest(sizes, excess, level)
    low, high = _interval(sizes, excess, draws, level, noise.freedom > 0)
    fits = sorted(fit_tradeoff(sizes, row, CAP) for row in draws[:100])
    falls = curve.fall > 0 and falling >= FALLING
    return Critical(
        sizes=sizes,
        excess=excess,
        draws=draws,
        value=min(value, float(sizes[-1])) if falls else math.nan,
        low=min(low, float(sizes[-1])) if falls else 0.0,
        high=high if falls else math.inf,
        at_edge=_edge(value, sizes, relative(isotonic(excess)), level) if falls else "",
        level=means[0] + curve(length / (1 + level)) - curve(length) if falls else math.nan,
        fitted=fit_tradeoff(sizes, excess, CAP) if falls else math.nan,
        fitted_low=quantile(fits, 0.025) if falls else 0.0,
        fitted_high=quantile(fits, 0.975) if falls else math.inf,
    )


def _table(branches: Sequence[Branch]) -> dict[int, list[float]]:
    """Losses by batch size, in the order of the repeats."""
    losses: dict[int, list[float]] = {}
    for branch in sorted(branches, key=lambda b: (b.batch_size, b.repeat)):
        losses.setdefault(branch.batch_size, []).append(branch.loss)
    return losses


def _excess(curve: Decline, means: Sequence[float], length: int) -> tuple[float, ...]:
    """Excess of each batch size, the first one's being zero by definition.

    Only differences to the first one are laid on the curve: the repeats' data orders raise or
    lower all batch sizes together, which the smooth curve knows nothing of.
    """
    end = curve(length) - means[0]
    rest = (_one_excess(curve, mean + end, length) for mean in means[1:])
    return (0.0, *rest)


def _one_excess(curve: Decline, loss: float, length: int) -> float:
    if not math.isfinite(loss):
        return CAP
    samples = curve.samples_at(loss)
    return length / min(max(samples, length / (1 + CAP)), length * REACH) - 1


def _draws(
    yardstick: Yardstick,
    noise: Noise,
    means: Sequence[float],
    length: int,
    level: float,
    seed: int,
) -> tuple[tuple[tuple[float, ...], ...], float]:
    """Excesses as other noise would have made them, a row for each draw.

    Returns:
        The rows, and the share of draws in which the yardstick falls.
    """
    generator = random.Random(seed)
    rows, falling = [], 0
    for _ in range(DRAWS):
        sigma = noise.draw_sigma(generator)
        drawn = [mean + generator.gauss(0, sigma) for mean in means]
        end = drawn[0] - means[0] + generator.gauss(0, noise.common)
        curve = yardstick.draw(generator, end)
        near = generator.random() < 0.5
        if curve.fall > 0:
            falling += 1
            rows.append(_undecided(_excess(curve, drawn, length), means, level, near))
        else:
            # A loss that stays where it is may stand for any number of samples.
            rows.append((0.0, *[1 / REACH - 1 if near else CAP] * (len(means) - 1)))
    return tuple(rows), falling / DRAWS


def _undecided(
    excess: tuple[float, ...], means: Sequence[float], level: float, near: bool
) -> tuple[float, ...]:
    """Half of the draws let the smallest diverged batch size just exceed the tolerance.

    That it diverged says that it is too large, not where between it and its neighbour that begins.
    """
    lost = next((i for i, mean in enumerate(means) if not math.isfinite(mean)), None)
    if not near or not lost:
        return excess
    least = max(level + 1e-9, *excess[:lost])
    return (*excess[:lost], least, *excess[lost + 1 :])


def _interval(
    sizes: Sequence[int],
    excess: Sequence[float],
    draws: Sequence[Sequence[float]],
    level: float,
    known: bool,
) -> tuple[float, float]:
    """The middle 95% of the draws; the neighbouring sizes where the noise is not known."""
    if not known:
        return between([float(size) for size in sizes], relative(isotonic(excess)), level)
    values = sorted(_largest(sizes, row, level) for row in draws)
    return quantile(values, 0.025), quantile(values, 0.975)


def _largest(sizes: Sequence[int], excess: Sequence[float], level: float) -> float:
    return crossing([float(size) for size in sizes], relative(isotonic(excess)), level)


def _edge(value: float, sizes: Sequence[int], excess: Sequence[float], level: float) -> str:
    if math.isinf(value):
        return "above"
    return "below" if excess[1] > level else ""


def quantile(ordered: Sequence[float], part: float) -> float:
    """The value below which a part of the sorted values lies, without interpolation.

    As many values lie below the one for ``part`` as above the one for ``1 - part``.
    """
    if part > 0.5:
        return ordered[-1 - int((1 - part) * len(ordered) + 1e-9)]
    return ordered[int(part * len(ordered) + 1e-9)]
