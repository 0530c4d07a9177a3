"""Quantiles against scipy, Fieller's set against a search, coverage against 95 %."""

import math

import pytest
import scipy.stats
import torch

from steadygrad.noise.intervals import (
    autocorrelation_time,
    fieller_interval,
    ratio_of_averages,
    t_quantile,
)
from tests.reference.noise_scale import fieller_by_search
from tests.unit.noise.test_equations import SCHEMES, measure

REPLICATES = 2_000


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_t_quantile(level):
    degrees = torch.tensor([3, 4, 5, 7.5, 10, 30, 1e3, 1e6], dtype=torch.float64)
    exact = scipy.stats.t.ppf((1 + level) / 2, degrees.numpy())
    # 1e-5: the expansion's own error at few degrees of freedom.
    assert t_quantile(level, degrees).tolist() == pytest.approx(exact.tolist(), rel=1e-5)
    two = t_quantile(level, torch.tensor(2.0, dtype=torch.float64)).item()
    assert two == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, 2), rel=1e-3)


CASES = {
    "bounded": (2.0, 1.0, 0.01, 0.002, 0.02),
    "strongly correlated": (2.0, 1.0, 0.04, 0.0199, 0.01),
    "no upper end": (2.0, 0.1, 0.01, 0.0, 0.02),
    "everything": (0.1, 0.1, 0.02, 0.0, 0.02),
    "denominator clearly negative": (2.0, -1.0, 0.01, 0.0, 0.02),
    "denominator near zero, below": (2.0, -0.1, 0.01, 0.0, 0.02),
}


def fieller(a, b, v_aa, v_ab, v_bb):
    a, b, q = torch.tensor([a, b, 1.96], dtype=torch.float64)
    cov = torch.tensor([[v_aa, v_ab], [v_ab, v_bb]], dtype=torch.float64)
    low, high = fieller_interval(a, b, cov, q)
    return (low.item(), high.item()), cov


@pytest.mark.parametrize("case", CASES)
def test_fieller_is_the_set_of_ratios_not_contradicted(case):
    got, cov = fieller(*CASES[case])
    expected = fieller_by_search(*CASES[case][:2], cov, 1.96)
    if math.isnan(expected[0]):
        # No positive ratio fits: nothing is claimed rather than an empty set.
        expected = (0.0, math.inf)
    # 2e-5: the spacing of the search's grid.
    assert got == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("bottom", "v_bb", "expected"),
    [(1.0, 1e-4, (0.0, 0.0)), (1.0, 0.0, (0.0, 0.0)), (0.01, 1e-4, (0.0, math.inf))],
    ids=["signal known", "signal exact", "signal not told from zero"],
)
def test_no_noise_at_all_is_a_ratio_of_zero(bottom, v_bb, expected):
    """Every part's gradient is the same: the ratio is zero, and known to be as far as b > 0 is."""
    assert fieller(0.0, bottom, 0.0, 0.0, v_bb)[0] == expected


def replicates(scheme, ratio, steps, seed, **options):
    """Intervals of many histories, and which of them hold the truth."""
    generator = torch.Generator().manual_seed(seed)
    truth = ratio * sum(SCHEMES[scheme])
    signal, noise = measure(scheme, truth, REPLICATES * steps, generator)
    shape = (REPLICATES, steps)
    got = ratio_of_averages(noise.view(shape), signal.view(shape), **options)
    return got, covered(got, truth)


def covered(got, truth):
    return ((got.low <= truth) & (truth <= got.high)).double().mean().item()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("scheme", "ratio", "steps"),
    [
        # With the normal quantile in place of Student's, 88 % would be covered.
        ("equal", 0.5, 5),
        ("equal", 4, 5),
        *(pytest.param("equal", ratio, 100, marks=SLOW) for ratio in (0.5, 4, 16)),
        *(pytest.param(scheme, 4, 60, marks=SLOW) for scheme in SCHEMES if scheme != "equal"),
        pytest.param("equal", 64, 50, marks=SLOW),
    ],
)
def test_interval_covers_in_95_of_100(scheme, ratio, steps, capsys):
    """Three standard errors of a share of 95 % are 1.5 points."""
    got, share = replicates(scheme, ratio, steps, seed=7)
    unbounded = (~got.resolved).double().mean().item()
    with capsys.disabled():
        print(f" [noise scale / batch {ratio}: covered {share:.2%}, unbounded {unbounded:.2%}] ")
    assert 0.93 <= share <= 0.97
    assert ratio < 64 or unbounded > 0.5  # hopeless data


@pytest.mark.slow
def test_decaying_weights_cover():
    weights = 0.97 ** torch.arange(200, dtype=torch.float64)
    got, share = replicates("equal", 1, 200, seed=11, weights=weights)
    assert 0.93 <= share <= 0.97
    assert got.effective.median().item() == pytest.approx((1 + 0.97) / (1 - 0.97), rel=0.05)


@pytest.mark.slow
def test_level_is_the_coverage():
    # Three standard errors of a share of 80 % in 2,000 are 2.7 points.
    assert replicates("equal", 1, 60, seed=13, level=0.8)[1] == pytest.approx(0.8, abs=0.027)


def autoregressive(phi, replicates, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(replicates, steps, generator=generator, dtype=torch.float64)
    x = z.clone()
    x[:, 0] /= (1 - phi**2) ** 0.5
    for t in range(1, steps):
        x[:, t] += phi * x[:, t - 1]
    return x


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_autocorrelation_time_of_a_known_process(phi):
    x = autoregressive(phi, 200, 4_000)
    tau = autocorrelation_time(x - x.mean(-1, keepdim=True), torch.ones(4_000).double())
    # 8 %: the estimator's truncation of the sum; its mean over 200 replicates is much finer.
    assert tau.mean().item() == pytest.approx((1 + phi) / (1 - phi), rel=0.08)


def test_forgotten_values_do_not_count_as_correlated():
    x = torch.cat([autoregressive(0.0, 200, 300), 3 * autoregressive(0.95, 200, 300)], -1)
    weights = torch.ones(600, dtype=torch.float64)
    weights[300:] = 1e-6
    tau = autocorrelation_time(x, weights)
    # Independent values give exactly 1 in 97 of 100; the forgotten half alone would give 39.
    assert tau.median().item() == pytest.approx(1, abs=0.05)
    assert autocorrelation_time(x, torch.ones_like(weights)).median().item() > 10


@pytest.mark.parametrize(("phi", "least"), [(0.5, 0.925), (0.9, 0.88), (0.97, 0.84)])
def test_interval_knows_of_autocorrelation(phi, least, capsys):
    """Autocorrelated measurements: without the effective number, coverage would be far lower."""
    x = autoregressive(phi, REPLICATES, 300)
    noise, signal = 10 + x, 2 + 0.2 * autoregressive(phi, REPLICATES, 300, seed=1)
    share = covered(ratio_of_averages(noise, signal), 5.0)
    with capsys.disabled():
        print(f" [autocorrelation {phi}: covered {share:.2%}] ")
    # Short series of slow processes cannot know their own slowness fully: hence `least`.
    assert least <= share <= 0.97


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_measurements_say_nothing(n):
    top, bottom = torch.tensor([[1.0, 5.0], [1.0, 0.5]], dtype=torch.float64)
    got = ratio_of_averages(top, bottom, (torch.arange(2) < n).double())
    assert (got.low.item(), got.high.item(), got.resolved.item()) == (0.0, math.inf, False)
    # The ratio of averages, and not the average of ratios.
    expected = [math.nan, 1.0, 4.0][n]
    assert got.value.item() == pytest.approx(expected, rel=1e-12, nan_ok=True)
