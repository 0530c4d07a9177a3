"""Smooth, falling loss curves, many at a time."""

from dataclasses import dataclass

import numpy as np

from steadygrad.studies.statistics import Floats

__all__ = ["LossCurve", "fit_curves"]

POWERS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class LossCurve:
    r"""Falling curves :math:`L(s) = a - c\,(1 - (1 + s/s_0)^{-p}) / p`, one for each draw.

    With :math:`p = 0` this is :math:`a - c \ln(1 + s/s_0)`: language modelling. A large ``p`` comes
    near an exponential approach to a floor, a large :math:`s_0` near a straight line.

    Attributes:
        start: :math:`a`, shape ``(*)``.
        fall: :math:`c`; not positive where the loss did not fall.
        scale: :math:`s_0`, in samples.
        power: :math:`p`.
    """

    start: Floats
    fall: Floats
    scale: Floats
    power: Floats

    def __call__(self, samples: float) -> Floats:
        """The losses after ``samples``."""
        progress = _progress(np.asarray(samples), self.scale, self.power)
        return np.asarray(self.start - self.fall * progress)

    def samples_at(self, losses: Floats) -> Floats:
        """Samples after which each curve has a loss; infinite where it never has.

        Args:
            losses: Shape ``(*, K)``.
        """
        start, fall, scale, power = (
            np.asarray(value)[..., None]
            for value in (self.start, self.fall, self.scale, self.power)
        )
        with np.errstate(all="ignore"):
            progress = (start - losses) / fall
            rest = 1 - power * progress
            bent = scale * (np.maximum(rest, 0.0) ** (-1 / np.where(power > 0, power, 1.0)) - 1)
            found = np.where(power > 0, bent, scale * np.expm1(np.minimum(progress, 700.0)))
        return np.where((fall > 0) & (rest > 0) & ~np.isnan(found), found, np.inf)


def _progress(samples: Floats, scale: Floats, power: Floats) -> Floats:
    logarithm = np.log1p(samples / scale)
    safe = np.where(power > 0, power, 1.0)
    return np.where(power > 0, -np.expm1(-safe * logarithm) / safe, logarithm)


def fit_curves(places: Floats, losses: Floats, emphasis: float = 0.0) -> LossCurve:
    """The curves with the least squared error through losses at the same places.

    Every shape on a grid is a straight line in its own progress.

    Args:
        places: Samples seen at the losses, shape ``(M,)``.
        losses: Shape ``(*, M)``.
        emphasis: Power of the samples by which a squared error counts: where a curve has none of
            these shapes, its end fits better.
    """
    weights = places**emphasis / (places**emphasis).sum()
    steps = 2.0 ** (np.arange(-8, 13) / 2)
    scale, power = np.tile(places.max() * steps, len(POWERS)), np.repeat(POWERS, len(steps))
    progress = _progress(places, scale[:, None], power[:, None])
    middle = progress @ weights
    centred = progress - middle[:, None]
    spread = centred**2 @ weights
    mean = losses @ weights
    centred *= weights / np.maximum(spread, 1e-300)[:, None]
    slopes = (losses - mean[..., None]) @ centred.T
    # The best line explains most of the squares.
    best = (slopes**2 * spread).argmax(-1)
    slope = np.take_along_axis(slopes, best[..., None], -1)[..., 0]
    return LossCurve(mean - slope * middle[best], -slope, scale[best], power[best])
