r"""The critical batch size of a long training, from those of shorter ones.

The critical size is the largest batch that needs at most the tolerated extra samples. It grows with
the length of a training as a power:

.. math:: \log B_k = a + b \log(n_k / N) + \epsilon_k

for the sizes :math:`B_k` over :math:`n_k` samples each, where :math:`a` is the logarithm of the
critical size over :math:`N` samples, and :math:`\epsilon_k` has two parts: the error of
:math:`B_k`, and what a power leaves, which is normal with the deviation :data:`RESIDUAL`. The slope
:math:`b` has a normal prior, and :math:`a` none, so that one length gives an answer, too.

References:
    | Predictable Scale: Part I, Step Law (Li et al., 2025), https://arxiv.org/abs/2503.04715
    | How Does Critical Batch Size Scale in Pre-training? (Zhang et al., 2024),
    | https://arxiv.org/abs/2410.21676
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from steadygrad.studies.advise.schema import WIDTH, Critical, Growth

# Deviation of the logarithm of a critical size from a power of the length. Over all 17 lengths and
# models of Li et al.'s dense table a power of length and model size leaves so much.
RESIDUAL = 0.13


class Slope(NamedTuple):
    """The normal distribution of the slope, as known before any training."""

    mean: float
    deviation: float


# Slopes of Li et al.'s dense models are 0.23 to 0.47, those of their mixtures of experts 0.25 to
# 0.30, and those of noisy quadratics 0.09 to 0.32.
TUNED = Slope(0.35, 0.15)


def predict(
    lengths: Sequence[Critical], samples: int, prior: Slope = TUNED, stand_in: float = 0.0
) -> Growth:
    """The critical batch size over ``samples``, by that of shorter trainings.

    ``stand_in``: deviation of the logarithm of the real model's critical size from that of a model
    that was trained in its place; 0: the real one was trained.
    """
    at = np.array([math.log(one.samples / samples) for one in lengths])
    sizes = np.log([one.batch_size for one in lengths])
    errors = np.hypot([one.error for one in lengths], RESIDUAL)
    # The prior is one more observation, of the slope alone.
    rows = np.vstack([np.column_stack([np.ones_like(at), at]) / errors[:, None], [0, 1 / prior[1]]])
    seen = np.append(sizes / errors, prior.mean / prior.deviation)
    covariance = np.linalg.inv(rows.T @ rows)
    level, slope = covariance @ (rows.T @ seen)
    # By one length it is exact.
    misfit = float(((seen - rows @ (level, slope)) ** 2).sum())
    excess = max(1.0, misfit / max(1, len(lengths) - 1))
    deviation = math.sqrt(excess * covariance[0, 0] + RESIDUAL**2 + stand_in**2)
    size, low, high = (math.exp(level + side * WIDTH * deviation) for side in (0, -1, 1))
    return Growth(
        samples=samples,
        predicted=Critical(samples=samples, batch_size=size, low=low, high=high),
        lengths=tuple(lengths),
        slope=float(slope),
        agree=excess <= WIDTH**2,
    )
