"""A ratio of averages with its interval, and its present value where the truth moves.

The noise scale is a ratio whose denominator, the gradient signal, may be hard to tell from zero.
Intervals from a variance of the ratio (delta method, jackknife) then cover far too rarely, and
Fieller's set as often as it should; it is unbounded exactly when it should be.

An average lags behind what grows. So the newer half of the measurements is tested against the
older one, in the whole history and in every half of a half, and what the averages reach back to
is cut short where a test finds a difference.
"""

from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Ratio", "present_ratio", "ratio_of_averages"]

# Probability of a false alarm, over all the tests of one estimate, if measurements are independent.
ALARM = 0.01
# Level of a hint: the halves differ enough to widen the interval, but not enough to report drift.
HINT = 0.35
# Fewest measurements in a test; averages of drifting ratios are of a quarter of these, at least.
LEAST = 32


class Ratio(NamedTuple):
    """A ratio with its interval, as :class:`~steadygrad.noise.NoiseEstimate` begins."""

    value: Tensor
    low: Tensor
    high: Tensor
    grad_sq_norm: Tensor
    noise_trace: Tensor
    resolved: Tensor
    measurements: Tensor
    effective: Tensor
    drifting: Tensor
    age: Tensor


def ratio_of_averages(
    top: Tensor, bottom: Tensor, weights: Tensor | None = None, *, level: float = 0.95
) -> Ratio:
    r"""Averages two series first, divides once, and gives the ratio's interval.

    The mean of ratios is biased by about the squared relative error of the denominator;
    the ratio of means only by that of its average. The interval is Fieller's, with the effective
    number :math:`N_\mathrm{eff} = (\sum w)^2 / \sum w^2 / \tau` in place of N, where :math:`\tau`
    is the autocorrelation time of the residuals :math:`a_t - r b_t`.

    Numerators and denominators have shape ``(*, N)``, weights (default: equal) ``(N)`` or
    ``(*, N)``. The interval covers the truth with the probability ``level``.

    Returns:
        The ratio, whose ``age`` counts places from the first of the series; nothing drifts. With
        fewer than three measurements nothing is resolved: the interval is everything.
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
    low, high = torch.where(known, low, 0.0), torch.where(known, high, torch.inf)
    value = torch.where((b > 0) & (a >= 0), ratio, torch.nan)
    resolved = torch.isfinite(high) & torch.isfinite(value)
    age = (w * torch.arange(w.shape[-1], device=w.device)).sum(-1) / w.sum(-1)
    return Ratio(
        value=value,
        low=low,
        high=high,
        grad_sq_norm=b,
        noise_trace=a,
        resolved=resolved,
        measurements=(w > 0).sum(-1).expand_as(value),
        effective=effective,
        drifting=torch.zeros_like(resolved),
        age=age.expand_as(value),
    )


def fieller_interval(
    top: Tensor, bottom: Tensor, covariance: Tensor, quantile: Tensor
) -> tuple[Tensor, Tensor]:
    r"""The values of ``top / bottom`` that the data do not contradict, cut to :math:`[0, \infty)`.

    .. math:: \{ r : (a - r b)^2 \le q^2\,(v_{aa} - 2 r v_{ab} + r^2 v_{bb}) \}

    As :math:`a - r b` has mean zero at the true ratio, the set covers the truth with the
    probability that belongs to :math:`q`. When :math:`b` is not clearly positive, the set has no
    upper end, or is everything. The averages' covariance has the shape ``(*, 2, 2)``.

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

    bounded = (A > 0) & (bottom > 0)
    # A < 0: everything outside (low, high) fits. With C > 0 that leaves [high, inf) among the
    # positive ratios; with C <= 0 zero itself fits, and so does every ratio.
    no_end = torch.where((A < 0) & (C > 0) & (top > 0), high, 0.0)
    low = torch.where(bounded, low.clamp(min=0), no_end)
    high = torch.where(bounded, high.clamp(min=0), torch.inf)
    return torch.where(low.isnan(), 0.0, low), torch.where(high.isnan(), torch.inf, high)


def t_quantile(level: float, degrees: Tensor) -> Tensor:
    r"""Two-sided quantile of Student's t: :math:`P(|t_\nu| < q) =` ``level``; waits for no device.

    Hill's expansion around the normal quantile (Algorithm 396, 1970, 10.1145/355598.355600). Its
    relative error is below 6e-4 at :math:`\nu = 2`, as which fewer degrees of freedom count, and
    below 1e-5 from 3 on, for levels of 0.8 to 0.99. Degrees need not be whole.
    """
    n = degrees.clamp(min=2.0)
    p = 1 - level
    a = 1 / (n - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * torch.sqrt(a * torch.pi / 2) * n
    y = (d * p) ** (2 / n)
    far = (
        (1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1
    ) * ((n + 1) / (n + 2)) + 1 / y

    x = torch.full_like(n, NormalDist().inv_cdf(p / 2))
    z = x * x
    c = torch.where(n < 5, c + 0.3 * (n - 4.5) * (x + 0.6), c)
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    z = (((((0.4 * z + 6.3) * z + 36) * z + 94.5) / c - z - 3) / b + 1) * x
    near = torch.expm1(a * z * z)
    return torch.sqrt(n * torch.where(y > 0.05 + a, near, far))


def autocorrelation_time(series: Tensor, weights: Tensor) -> Tensor:
    r"""The number of successive values, with mean zero, that are worth one independent value.

    :math:`\tau = 1 + 2 \sum_{k=1}^{K} \rho_k` over the leading autocorrelations that stand out from
    chance (:math:`\rho_k > 2/\sqrt N`), with a geometric tail for the rest, so that independent
    values give :math:`\tau = 1` in 97 % of the cases. On windows for this sum: Practical Markov
    Chain Monte Carlo (Geyer, 1992), https://doi.org/10.1214/ss/1177011137.
    """
    n = series.shape[-1]
    count = weights.sum(-1, keepdim=True) ** 2 / (weights * weights).sum(-1, keepdim=True)
    scaled = series * torch.sqrt(weights)
    # All lags at once, through the spectrum: zero padding avoids circular correlation.
    spectrum = torch.fft.rfft(scaled, 2 * n)
    covariance = torch.fft.irfft(spectrum.abs() ** 2, 2 * n)[..., : max(n // 4, 1) + 1]
    rho = covariance[..., 1:] / covariance[..., :1].clamp(min=torch.finfo(series.dtype).tiny)
    leading = (rho > 2 / torch.sqrt(count)).long().cumprod(-1)
    index = (leading.sum(-1, keepdim=True) - 1).clamp(min=0)
    last = (rho * leading).gather(-1, index).squeeze(-1)
    decay = rho[..., 0].clamp(0, 0.999)
    tau: Tensor = 1 + 2 * ((rho * leading).sum(-1) + last * decay / (1 - decay))
    return tau


def present_ratio(top: Tensor, bottom: Tensor, weights: Tensor, *, level: float = 0.95) -> Ratio:
    """The ratio of averages over the whole history, or over its newest part where it drifts.

    Arguments and results are those of :func:`ratio_of_averages`, the newest measurement first, with
    weights of shape ``(N)``, 0 where there is none. Where a test finds drift, the averages are of
    the newest quarter of the largest window that shows none: one at the edge of showing it lags by
    more than its interval. Where the halves of the whole differ at a level of 35 % only, the
    interval takes in the newest quarter's.

    The tests together raise a false alarm in 1 to 2 % of the cases, also with an autocorrelation of
    0.5, and none with fewer than 32 measurements. They weigh the measurements equally.
    """
    there = weights > 0
    position = torch.where(there, there.cumsum(-1) - 1, len(weights))
    steady, drifting, hint = _steady_size(top, bottom, position)
    newest = weights * (position < steady.unsqueeze(-1) / 4)
    whole = ratio_of_averages(top, bottom, weights, level=level)
    part = ratio_of_averages(top, bottom, newest, level=level)

    found = Ratio(*(torch.where(drifting, x, y) for x, y in zip(part, whole, strict=True)))
    wide = hint & ~drifting
    low = torch.where(wide, torch.minimum(whole.low, part.low), found.low)
    high = torch.where(wide, torch.maximum(whole.high, part.high), found.high)
    resolved = torch.isfinite(high) & torch.isfinite(found.value)
    return found._replace(low=low, high=high, resolved=resolved, drifting=drifting)


def _steady_size(top: Tensor, bottom: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Size of the largest window without drift, whether any drifts, and whether the whole may.

    Windows are the whole, its newer half, the newer half of that, and so on.
    """
    n = (position < position.shape[-1]).sum()
    tests = 1
    while position.shape[-1] / 2**tests >= LEAST:
        tests += 1
    size = n / 2 ** (tests - 1)
    steady = torch.zeros_like(top[..., 0])
    drifting = hint = torch.zeros_like(steady, dtype=torch.bool)
    tau = short_memory(top, bottom, position < position.shape[-1])
    for _ in range(tests):
        score, degrees = halves_differ(top, bottom, position, size, tau)
        differ = (score.abs() > t_quantile(1 - ALARM / tests, degrees)) & (size >= LEAST)
        drifting = drifting | differ
        steady = torch.where(drifting, steady, size)
        hint = (score.abs() > t_quantile(1 - HINT, degrees)) & (size >= LEAST)
        size = size * 2
    # The last window was the whole.
    return steady.clamp(min=LEAST), drifting, hint


def halves_differ(
    top: Tensor, bottom: Tensor, position: Tensor, size: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Student's t (Welch, 1947) of the newer against the older half, and its degrees of freedom.

    .. math:: \frac{a_1 b_2 - a_2 b_1}{\sqrt{\tau\,(b_2^2 v_1 + b_1^2 v_2)}}

    with the halves' averages :math:`a_i` and :math:`b_i`, the variances :math:`v_i` of their
    averaged residuals :math:`a_t - r b_t`, and their autocorrelation time :math:`\tau`. As in
    Fieller's interval, the numerator has mean zero where the ratios are equal, however weak the
    denominators. It is 0 where an average is not positive: there is no ratio to compare. The window
    is of the measurements whose ``position``, 0 for the newest, is below ``size``.
    """
    new, inside = position < size / 2, position < size
    halves = torch.stack([new, inside & ~new]).to(top.dtype)
    counts = halves.sum(-1)
    a, b = top @ halves.mT / counts, bottom @ halves.mT / counts
    ratio = (a @ counts / (b @ counts)).nan_to_num(0.0, 0.0, 0.0)
    rest = top - ratio.unsqueeze(-1) * bottom
    means = rest @ halves.mT / counts
    deviation = (rest - means @ halves) * inside
    variance = deviation.square() @ halves.mT / (counts - 1)

    crossed = b.flip(-1)
    spread = tau * (crossed.square() * variance / counts).sum(-1)
    score = (means * crossed).diff(dim=-1).squeeze(-1).neg() / spread.sqrt()
    sensible = (ratio > 0) & (b > 0).all(-1)
    return torch.where(sensible, score, 0.0), counts.sum() / tau - 2


def short_memory(top: Tensor, bottom: Tensor, there: Tensor) -> Tensor:
    r"""Number of successive measurements worth one independent one, also while the ratio drifts.

    .. math:: \tau = \frac{1 + \rho}{1 - \rho}, \qquad \rho = \frac{D_2}{D_1} - 1

    where :math:`D_k` is the mean squared difference of residuals :math:`a_t - r b_t` that lie
    :math:`k` apart, as in an autoregression of first order. Drift hardly changes these differences;
    ordinary autocorrelations would take it for slow noise, and no test would find it.
    """
    ratio = (top * there).sum(-1, keepdim=True) / (bottom * there).sum(-1, keepdim=True)
    rest = top - ratio.nan_to_num(0.0, 0.0, 0.0) * bottom

    def apart(k: int) -> Tensor:
        both = there[k:] & there[:-k]
        return ((rest[..., k:] - rest[..., :-k]).square() * both).sum(-1) / both.sum()

    rho = (apart(2) / apart(1) - 1).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 0.95)
    return (1 + rho) / (1 - rho)
