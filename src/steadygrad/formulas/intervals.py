r"""Fieller's interval for a ratio of averages, with correct coverage near a zero divisor.

The noise scale is a ratio whose denominator, the gradient signal, may be hard to tell from
zero. Intervals from a variance of the ratio (delta method, jackknife) then cover far too rarely;
Fieller's set has the right coverage, and is unbounded exactly when it should be.
"""

from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "RatioInterval",
    "autocorrelation_time",
    "fieller_interval",
    "ratio_of_averages",
    "t_quantile",
]


class RatioInterval(NamedTuple):
    """A ratio of averages with its interval, each with shape ``(*)``.

    Attributes:
        value: Ratio of the averages; NaN where the denominator's average is not positive, or the
            numerator's is negative.
        low: Lower end, at least 0.
        high: Upper end; infinite where the data do not bound the ratio.
        numerator: Average of the numerators.
        denominator: Average of the denominators.
        effective: Number of independent measurements the averages are worth.
        resolved: True where the interval is bounded and there is a value.
    """

    value: Tensor
    low: Tensor
    high: Tensor
    numerator: Tensor
    denominator: Tensor
    effective: Tensor
    resolved: Tensor


def t_quantile(level: float, degrees: Tensor) -> Tensor:
    r"""Two-sided quantile of Student's t: :math:`P(|t_\nu| < q) =` ``level``.

    Hill's asymptotic expansion around the normal quantile. Its relative error is below 6e-4
    at :math:`\nu = 2` and below 1e-5 from 3 on, for levels of 0.8 to 0.99. Degrees need not be
    whole.

    Args:
        level: Probability inside, in (0, 1).
        degrees: Degrees of freedom :math:`\nu`, with shape ``(*)``; less than 2 counts as 2.

    Returns:
        The quantile, with shape ``(*)``.

    References:
        | Algorithm 396: Student's t-quantiles (Hill, 1970)
        | https://doi.org/10.1145/355598.355600
    """
    n = degrees.clamp(min=2.0)
    p = 1 - level
    a = 1 / (n - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * torch.sqrt(a * torch.pi / 2) * n
    y = (d * p) ** (2 / n)
    x = torch.full_like(n, NormalDist().inv_cdf(p / 2))
    near = _hill_body(x, n, a, b, c, d)
    far = (
        (1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1
    ) * ((n + 1) / (n + 2)) + 1 / y
    return torch.sqrt(n * torch.where(y > 0.05 + a, near, far))


def _hill_body(x: Tensor, n: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    y = x * x
    c = torch.where(n < 5, c + 0.3 * (n - 4.5) * (x + 0.6), c)
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
    body: Tensor = torch.expm1(a * y * y)
    return body


def autocorrelation_time(series: Tensor, weights: Tensor) -> Tensor:
    r"""The number of successive values that are worth one independent value.

    .. math:: \tau = 1 + 2 \sum_{k=1}^{K} \rho_k

    The sum runs over the leading autocorrelations that stand out from chance
    (:math:`\rho_k > 2/\sqrt N`) and takes a geometric tail for the rest, so that independent
    values give :math:`\tau = 1` in 97 % of the cases instead of a random number near it.

    Args:
        series: Values with weighted mean zero, with shape ``(*, N)``.
        weights: Weight of each value, with shape ``(N)`` or ``(*, N)``.

    Returns:
        :math:`\tau \ge 1`, with shape ``(*)``.

    References:
        | Practical Markov Chain Monte Carlo (Geyer, 1992), on windows for this sum
        | https://doi.org/10.1214/ss/1177011137
    """
    n = series.shape[-1]
    count = weights.sum(-1, keepdim=True) ** 2 / (weights * weights).sum(-1, keepdim=True)
    threshold = 2 / torch.sqrt(count)
    scaled = series * torch.sqrt(weights)
    # All lags at once, through the spectrum: zero padding avoids circular correlation.
    spectrum = torch.fft.rfft(scaled, 2 * n)
    covariance = torch.fft.irfft(spectrum.abs() ** 2, 2 * n)[..., : max(n // 4, 1) + 1]
    rho = covariance[..., 1:] / covariance[..., :1].clamp(min=torch.finfo(series.dtype).tiny)
    leading = (rho > threshold).long().cumprod(-1)
    index = (leading.sum(-1, keepdim=True) - 1).clamp(min=0)
    last = (rho * leading).gather(-1, index).squeeze(-1)
    decay = rho[..., 0].clamp(0, 0.999)
    tau: Tensor = 1 + 2 * ((rho * leading).sum(-1) + last * decay / (1 - decay))
    return tau


def fieller_interval(
    top: Tensor, bottom: Tensor, covariance: Tensor, quantile: Tensor
) -> tuple[Tensor, Tensor]:
    r"""The values of ``top / bottom`` that the data do not contradict, cut to :math:`[0, \infty)`.

    .. math:: \{ r : (a - r b)^2 \le q^2\,(v_{aa} - 2 r v_{ab} + r^2 v_{bb}) \}

    As :math:`a - r b` has mean zero at the true ratio, the set covers the truth with the
    probability that belongs to :math:`q`. When ``bottom`` is not clearly positive, the set has
    no upper end, or is everything.

    Args:
        top: Average :math:`a`, with shape ``(*)``.
        bottom: Average :math:`b`, with shape ``(*)``.
        covariance: Covariance matrix of the two averages, with shape ``(*, 2, 2)``.
        quantile: Two-sided quantile :math:`q`, with shape ``(*)``.

    Returns:
        The lower and upper end, each with shape ``(*)``; the upper may be infinite.

    References:
        | Some Problems in Interval Estimation (Fieller, 1954)
        | https://doi.org/10.1111/j.2517-6161.1954.tb00159.x
    """
    q2 = quantile * quantile
    v_aa, v_ab, v_bb = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
    # The set is where A r^2 - 2 B r + C <= 0.
    A = bottom * bottom - q2 * v_bb
    B = top * bottom - q2 * v_ab
    C = top * top - q2 * v_aa
    root = torch.sqrt((B * B - A * C).clamp(min=0))
    # B + sign(B) root avoids the cancellation of the schoolbook formula.
    stable = B + torch.where(B >= 0, root, -root)
    first = stable / A
    # A vanishing sum means that zero is a double end, as where nothing holds any noise.
    second = torch.where(stable == 0, first, C / stable)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    zero, inf = torch.zeros_like(low), torch.full_like(low, torch.inf)

    bounded = (A > 0) & (bottom > 0)
    # A < 0: everything outside (low, high) fits. With C > 0 that leaves [high, inf) among the
    # positive ratios; with C <= 0 zero itself fits, and so does every ratio.
    no_end = torch.where((A < 0) & (C > 0) & (top > 0), high, zero)
    low = torch.where(bounded, low.clamp(min=0), no_end)
    high = torch.where(bounded, high.clamp(min=0), inf)
    return torch.where(low.isnan(), zero, low), torch.where(high.isnan(), inf, high)


def ratio_of_averages(
    top: Tensor, bottom: Tensor, weights: Tensor | None = None, *, level: float = 0.95
) -> RatioInterval:
    r"""Averages two series first, divides once, and gives the ratio's interval.

    The mean of ratios is biased by about the squared relative error of the denominator;
    the ratio of means only by that of its average. The interval is Fieller's, with the effective
    number :math:`N_\mathrm{eff} = (\sum w)^2 / \sum w^2 / \tau` in place of N, where :math:`\tau`
    is the autocorrelation time of the residuals :math:`a_t - r b_t`.

    Args:
        top: Numerators, with shape ``(*, N)``.
        bottom: Denominators, with shape ``(*, N)``.
        weights: Weight of each measurement, at least 0, with shape ``(N)`` or ``(*, N)``.
            Default: equal.
        level: Probability with which the interval should cover the truth.

    Returns:
        The ratio and its interval, each with shape ``(*)``. With fewer than three measurements
        nothing is resolved: the interval is everything.
    """
    w = top.new_ones(top.shape[-1]) if weights is None else weights.to(top.dtype)
    share = w / w.sum(-1, keepdim=True)
    a, b = (share * top).sum(-1), (share * bottom).sum(-1)
    ratio = a / b
    d_a, d_b = top - a.unsqueeze(-1), bottom - b.unsqueeze(-1)

    residual = d_a - ratio.nan_to_num(0.0, 0.0, 0.0).unsqueeze(-1) * d_b
    count = 1 / (share * share).sum(-1)
    effective = count / autocorrelation_time(residual, w)
    pairs = torch.stack([d_a, d_b], -2)
    unbiased = (1 - 1 / count).clamp(min=1e-9)[..., None, None]
    spread = (share.unsqueeze(-2) * pairs) @ pairs.mT / unbiased
    quantile = t_quantile(level, effective - 1)
    low, high = fieller_interval(a, b, spread / effective[..., None, None], quantile)

    known = effective >= 3
    low = torch.where(known, low, torch.zeros_like(low))
    high = torch.where(known, high, torch.full_like(high, torch.inf))
    value = torch.where((b > 0) & (a >= 0), ratio, torch.full_like(ratio, torch.nan))
    resolved = torch.isfinite(high) & torch.isfinite(value)
    return RatioInterval(value, low, high, a, b, effective, resolved)
