"""Small statistics that the studies share, vectorised over draws."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def isotonic(values: Floats) -> Floats:
    r"""The nearest non-decreasing rows, by the min-max formula.

    .. math:: \hat y_k = \max_{i \le k} \min_{j \ge k} \mathrm{mean}(y_i, \ldots, y_j)

    Args:
        values: Rows of values, shape ``(*, K)``.
    """
    count = values.shape[-1]
    if not count:
        return values
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1)], -1)
    lengths = np.arange(count)[None, :] - np.arange(count)[:, None] + 1
    means = sums[..., None, 1:] - sums[..., :-1, None]
    means = np.where(lengths > 0, means / np.maximum(lengths, 1), np.inf)
    # The least mean from i to any j >= k, then the greatest of those over i <= k.
    least = np.minimum.accumulate(means[..., ::-1], -1)[..., ::-1]
    least = np.where(lengths > 0, least, -np.inf)
    found: Floats = least.max(-2)
    return found


def unimodal(values: Floats) -> Floats:
    """The nearest rows that rise to one mode and then fall, with shape ``(*, K)``."""
    fits = []
    for split in range(1, values.shape[-1] + 1):
        fall = isotonic(values[..., : split - 1 : -1])[..., ::-1]
        fits.append(np.concatenate([isotonic(values[..., :split]), fall], -1))
    stack = np.stack(fits)
    best = ((stack - values) ** 2).sum(-1).argmin(0)
    found: Floats = np.take_along_axis(stack, best[None, ..., None], 0)[0]
    return found


def quantile(values: Floats, part: float) -> float:
    """The value below which a part of the values lies, without interpolation.

    As many values lie below the one for ``part`` as above the one for ``1 - part``.
    """
    ordered, beyond = np.sort(values), int(min(part, 1 - part) * len(values) + 1e-9)
    return float(ordered[beyond if part <= 0.5 else -1 - beyond])


def redraw(means: Floats, residuals: Floats, generator: np.random.Generator, count: int) -> Floats:
    """Random draws of the mean curves from their estimated distribution, shape ``(count, M)``.

    All places have one variance, which is redrawn as well: a scaled inverse chi-square.

    Args:
        means: Means over the repeats, shape ``(M,)``.
        residuals: Deviations of the repeats from the means, shape ``(m, repeats)``.
        generator: The source of randomness.
        count: Number of draws.
    """
    repeats = residuals.shape[1]
    freedom = max(1, (len(means) - 1) * (repeats - 1))
    scale = (residuals**2).sum() / generator.chisquare(freedom, (count, 1)) / repeats
    return np.asarray(means + generator.normal(size=(count, len(means))) * np.sqrt(scale))


@dataclass(frozen=True)
class Variances:
    """Residual variances of a table of losses, rows by repeats.

    Attributes:
        rows: Variance of one loss of each row, shape ``(K,)``.
        freedom: Degrees of freedom of each; 0 where nothing can be estimated.
        common: Variance of a repeat's effect on the mean of all rows, over the repeats.
    """

    rows: Floats
    freedom: float
    common: float

    def draw(self, generator: np.random.Generator, count: int, repeats: int) -> Floats:
        """Random draws of the errors of the rows' means, shape ``(count, K)``.

        The variances are redrawn as well: a scaled inverse chi-square.
        """
        if not self.freedom:
            return np.zeros((count, len(self.rows)))
        shape = (count, len(self.rows))
        scale = self.freedom / generator.chisquare(self.freedom, shape)
        errors = generator.normal(size=shape) * np.sqrt(self.rows * scale / repeats)
        return np.asarray(errors)


# Degrees of freedom that the mean variance of all rows counts for beside a row's own.
PRIOR_FREEDOM = 1.0


def residual_variances(table: Floats) -> Variances:
    """Variance of a table's rows after the repeats' common effects are taken out.

    The rows of one repeat share their data order, so that its effect cancels in differences. Each
    row's own variance is shrunk towards the mean of all.

    Args:
        table: Losses, shape ``(K, repeats)``.

    References:
        | Linear Models and Empirical Bayes Methods for Assessing Differential Expression
        | (Smyth, 2004), https://doi.org/10.2202/1544-6115.1027
    """
    count, repeats = table.shape
    if count < 2 or repeats < 2:
        return Variances(np.zeros(count), 0.0, 0.0)
    centred = table - table.mean(1, keepdims=True)
    columns = centred.mean(0)
    own = ((centred - columns) ** 2).sum(1) / ((repeats - 1) * (1 - 1 / count))
    pooled = float(own.mean())
    freedom = repeats - 1 + PRIOR_FREEDOM
    rows = ((repeats - 1) * own + PRIOR_FREEDOM * pooled) / freedom
    most = float((count - 1) * (repeats - 1))
    common = float((columns**2).sum() / (repeats - 1))
    return Variances(rows, min(freedom, most), common)
