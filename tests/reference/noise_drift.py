"""The noise scale's present value, one measurement and one test at a time, in float64 numpy.

Series begin with the newest measurement, as in `steadygrad.noise.intervals`.
"""

from typing import NamedTuple

import numpy as np
import scipy.stats

# Of the interval; of the tests for drift, whose fewest measurements are these.
LEVEL, ALARM, HINT, LEAST = 0.95, 0.01, 0.35, 32


class Present(NamedTuple):
    value: float
    low: float
    high: float
    measurements: int
    age: float
    drifting: bool


def correlation_time(series, weights, lags):
    """1 + 2 Σ ρ_k over the leading autocorrelations above 2/√N, and a geometric tail."""
    scaled = series * np.sqrt(weights)
    threshold = 2 / np.sqrt(weights.sum() ** 2 / (weights**2).sum())
    first, total, last = None, 0.0, 0.0
    for lag in range(1, min(lags, len(series) - 1) + 1):
        rho = (scaled[lag:] @ scaled[:-lag]) / max(scaled @ scaled, np.finfo(float).tiny)
        first = rho if first is None else first
        if rho <= threshold:
            break
        total, last = total + rho, rho
    decay = min(max(first, 0.0), 0.999)
    return 1 + 2 * (total + last * decay / (1 - decay))


def fieller(noise, signal, weights, lags):
    """Ratio of the weighted averages, its interval, and their effective number."""
    share = weights / weights.sum()
    a, b = share @ noise, share @ signal
    d = np.stack([noise - a, signal - b])
    count = 1 / (share**2).sum()
    effective = count / correlation_time(d[0] - a / b * d[1], weights, lags)
    cov = (share * d) @ d.T / (1 - 1 / count) / effective
    if effective < 3:
        return a / b, 0.0, np.inf
    q = scipy.stats.t.ppf((1 + LEVEL) / 2, effective - 1)
    # The ratios r with (a - r b)² <= q² (v_aa - 2 r v_ab + r² v_bb): the roots of a parabola.
    A, B, C = b * b - q**2 * cov[1, 1], a * b - q**2 * cov[0, 1], a * a - q**2 * cov[0, 0]
    roots = np.sort(np.roots([A, -2 * B, C]).real)
    if A > 0 and b > 0:
        return a / b, max(roots[0], 0.0), max(roots[1], 0.0)
    return a / b, roots[1] if A < 0 < C and a > 0 else 0.0, np.inf


def short_memory(noise, signal):
    """(1 + ρ) / (1 - ρ) of the autoregression whose differences 1 and 2 apart have these sizes."""
    rest = noise - noise.mean() / signal.mean() * signal
    near = np.mean([(a - b) ** 2 for a, b in zip(rest[1:], rest[:-1], strict=True)])
    far = np.mean([(a - b) ** 2 for a, b in zip(rest[2:], rest[:-2], strict=True)])
    rho = min(max(far / near - 1, 0.0), 0.95)
    return (1 + rho) / (1 - rho)


def halves_differ(noise, signal, tau):
    """Welch's statistic of a1/b1 = a2/b2, the newer half against the older, and its degrees."""
    n = len(noise)
    new = np.arange(n) < n / 2
    ratio = noise.mean() / signal.mean()
    rest = noise - ratio * signal
    half = [rest[new], rest[~new]]
    b = [signal[new].mean(), signal[~new].mean()]
    v = [x.var(ddof=1) / len(x) for x in half]
    degrees = n / tau - 2
    if ratio <= 0 or min(b) <= 0:
        return 0.0, degrees
    # a1/b1 - a2/b2 = (rest1/b1 - rest2/b2), as the common ratio falls out.
    score = half[0].mean() / b[0] - half[1].mean() / b[1]
    return score / np.sqrt(tau * (v[0] / b[0] ** 2 + v[1] / b[1] ** 2)), degrees


def differ_at(noise, signal, alarm, tau):
    score, degrees = halves_differ(noise, signal, tau)
    return abs(score) > scipy.stats.t.ppf(1 - alarm / 2, max(degrees, 2))


def present(noise, signal, weights, capacity):
    """Newest-first series, all of positive weight, to the estimate that `NoiseScale` gives.

    `capacity` is the length of the ring, which sets the number of tests that share the level.
    """
    n, age, lags = len(noise), np.arange(len(noise)), max(capacity // 4, 1)
    tests = 1
    while capacity / 2**tests >= LEAST:
        tests += 1
    steady, drifting = LEAST, False
    tau = short_memory(noise, signal)
    # From the smallest window to the whole: each that shows no drift may stand for the newest.
    for k in reversed(range(tests)):
        inside = age < n / 2**k
        if n / 2**k >= LEAST and not drifting:
            drifting = differ_at(noise[inside], signal[inside], ALARM / tests, tau)
            steady = steady if drifting else n / 2**k
    new = age < steady / 4
    part = fieller(noise[new], signal[new], weights[new], lags)
    if drifting:
        return Present(*part, new.sum(), weights[new] @ age[new] / weights[new].sum(), True)
    value, low, high = fieller(noise, signal, weights, lags)
    if n >= LEAST and differ_at(noise, signal, HINT, tau):
        low, high = min(low, part[1]), max(high, part[2])
    return Present(value, low, high, n, weights @ age / weights.sum(), False)
