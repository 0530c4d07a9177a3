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
from tests.unit.noise.test_equations import SCHEMES, batch_of, measure

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


@pytest.mark.parametrize("case", CASES)
def test_fieller_is_the_set_of_ratios_not_contradicted(case):
    a, b, v_aa, v_ab, v_bb = CASES[case]
    cov = torch.tensor([[v_aa, v_ab], [v_ab, v_bb]], dtype=torch.float64)
    low, high = fieller_interval(
        torch.tensor(a, dtype=torch.float64),
        torch.tensor(b, dtype=torch.float64),
        cov,
        torch.tensor(1.96, dtype=torch.float64),
    )
    expected = fieller_by_search(a, b, cov, 1.96)
    if math.isnan(expected[0]):
        # No positive ratio fits: nothing is claimed rather than an empty set.
        assert (low.item(), high.item()) == (0.0, math.inf)
        return
    # 2e-5: the spacing of the search's grid.
    assert (low.item(), high.item()) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("bottom", "v_bb", "expected"),
    [(1.0, 1e-4, (0.0, 0.0)), (1.0, 0.0, (0.0, 0.0)), (0.01, 1e-4, (0.0, math.inf))],
    ids=["signal known", "signal exact", "signal not told from zero"],
)
def test_no_noise_at_all_is_a_ratio_of_zero(bottom, v_bb, expected):
    """Every part's gradient is the same: the ratio is zero, and known to be as far as b > 0 is."""
    cov = torch.tensor([[0.0, 0.0], [0.0, v_bb]], dtype=torch.float64)
    a, b, q = torch.tensor([0.0, bottom, 1.96], dtype=torch.float64)
    low, high = fieller_interval(a, b, cov, q)
    assert (low.item(), high.item()) == expected


def series(scheme, ratio, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    signal, noise = measure(scheme, ratio * batch_of(scheme), REPLICATES * steps, generator)
    return noise.view(REPLICATES, steps), signal.view(REPLICATES, steps)


def coverage(noise, signal, truth):
    got = ratio_of_averages(noise, signal)
    covered = (got.low <= truth) & (truth <= got.high)
    unbounded = ~got.resolved
    return covered.double().mean().item(), unbounded.double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.5, 4, 16])
def test_interval_covers_in_95_of_100(ratio, capsys):
    """2,000 replicates of 100 steps. Three standard errors of a share of 95 % are 1.5 points."""
    covered, unbounded = coverage(*series("equal", ratio, 100, seed=7), truth=ratio * 64)
    with capsys.disabled():
        print(f" [noise scale / batch {ratio}: covered {covered:.2%}, unbounded {unbounded:.2%}] ")
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("ratio", [0.5, 4])
def test_few_measurements_cover_as_well(ratio):
    """Five steps: with the normal quantile in place of Student's, 88 % would be covered."""
    covered, _ = coverage(*series("equal", ratio, 5, seed=2), truth=ratio * 64)
    assert 0.93 <= covered <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "equal"])
def test_every_source_covers(scheme):
    covered, _ = coverage(*series(scheme, 4, 60, seed=3), truth=4 * batch_of(scheme))
    assert 0.93 <= covered <= 0.97


@pytest.mark.slow
def test_hopeless_data_are_mostly_unbounded_and_still_covered():
    covered, unbounded = coverage(*series("equal", 64, 50, seed=5), truth=64 * 64)
    assert unbounded > 0.5
    assert 0.93 <= covered <= 0.97


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
    covered, _ = coverage(noise, signal, truth=5.0)
    with capsys.disabled():
        print(f" [autocorrelation {phi}: covered {covered:.2%}] ")
    # Short series of slow processes cannot know their own slowness fully: hence `least`.
    assert least <= covered <= 0.97


@pytest.mark.slow
def test_decaying_weights_cover():
    noise, signal = series("equal", 1, 200, seed=11)
    weights = 0.97 ** torch.arange(200, dtype=torch.float64)
    got = ratio_of_averages(noise, signal, weights)
    share = ((got.low <= 64) & (got.high >= 64)).double().mean().item()
    assert 0.93 <= share <= 0.97
    assert got.effective.median().item() == pytest.approx((1 + 0.97) / (1 - 0.97), rel=0.05)


def test_ratio_of_averages_not_average_of_ratios():
    noise = torch.tensor([1.0, 5.0], dtype=torch.float64)
    signal = torch.tensor([1.0, 0.5], dtype=torch.float64)
    assert ratio_of_averages(noise, signal).value.item() == pytest.approx(4.0)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_measurements_say_nothing(n):
    ones = torch.ones(max(n, 1), dtype=torch.float64)
    got = ratio_of_averages(ones, ones, torch.ones(max(n, 1)).double() * (n > 0))
    assert (got.low.item(), got.high.item(), got.resolved.item()) == (0.0, math.inf, False)
    assert math.isnan(got.value.item()) == (n == 0)


@pytest.mark.slow
def test_level_is_the_coverage():
    noise, signal = series("equal", 1, 60, seed=13)
    got = ratio_of_averages(noise, signal, level=0.8)
    share = ((got.low <= 64) & (got.high >= 64)).double().mean().item()
    # Three standard errors of a share of 80 % in 2,000 are 2.7 points.
    assert share == pytest.approx(0.8, abs=0.027)
