"""Intervals against 95 % on gradients of known noise, also while the noise drifts."""

import math

import pytest
import scipy.stats
import torch

from steadygrad.noise.equations import from_halves, from_nested, from_part_sums, is_altered
from steadygrad.noise.intervals import (
    autocorrelation_time,
    fieller_interval,
    present_ratio,
    ratio_of_averages,
    t_quantile,
)
from tests.reference import noise_drift as reference
from tests.reference.noise_scale import fieller_by_search
from tests.unit.noise.training_loop import course_of, histories

DIM = 64


SCHEMES = {
    "equal": [8] * 8,
    "unequal": [2, 4, 6, 8, 8, 10, 12, 14],
    "odd halves": [31, 33],
    "examples": [1] * 16,
    "nested": [8, 56],
}


def measure(scheme, noise_scale, draws, generator):
    """Signal and noise of many batches; unequal standard deviations with tr(Σ) = noise_scale."""
    counts = torch.tensor(SCHEMES[scheme]).double()
    variance = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64)
    sigma = (variance * (noise_scale / variance.sum())).sqrt()
    z = torch.randn(draws, len(counts), DIM, generator=generator)
    # The true gradient's direction does not matter.
    g = DIM**-0.5 + sigma * z.double() / counts.sqrt().view(-1, 1)
    total = counts.sum()
    sq_parts, sq_mean = g.square().sum(-1), (counts @ g / total).square().sum(-1)
    if scheme == "nested":
        return from_nested(sq_parts[:, 0], sq_mean, b_small=8, b_big=64)
    if scheme == "odd halves":
        a, b = g.unbind(1)
        return from_halves((a * b).sum(-1), (a - b).square().sum(-1), n_1=31, n_2=33)
    return from_part_sums(sq_parts @ counts / total, sq_mean, len(counts) / total, 1 / total)


def test_between_processes_any_order_of_additions_is_allowed():
    """Where a gradient is looked at, whether it is the sum of its parts."""
    for seed in range(200):
        draw = torch.Generator().manual_seed(seed)
        own = (torch.randn(8, 40, generator=draw, dtype=torch.float64) + seed % 3).bfloat16()
        order = torch.randperm(8, generator=draw).tolist()
        found = sum(own[i] for i in order).double()
        squares = sum(part.double().square().sum() for part in own)
        seen = own.double().sum(0)
        assert not is_altered(seen, found, squares, 2**-8, processes=8)
        assert is_altered(seen, found / 2, squares, 2**-8, processes=8)


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
        ("nested", 4, 5),
        *(pytest.param(scheme, 4, 60, marks=SLOW) for scheme in SCHEMES),
        pytest.param("equal", 64, 50, marks=SLOW),
    ],
)
def test_interval_covers_in_95_of_100(scheme, ratio, steps):
    """Three standard errors of a share of 95 % are 1.5 points."""
    got, share = replicates(scheme, ratio, steps, seed=7)
    assert 0.93 <= share <= 0.97
    assert ratio < 64 or got.resolved.double().mean() < 0.5  # hopeless data


def autoregressive(phi, replicates, steps):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(replicates, steps, generator=generator, dtype=torch.float64)
    x = z.clone()
    x[:, 0] /= (1 - phi**2) ** 0.5
    for t in range(1, steps):
        x[:, t] += phi * x[:, t - 1]
    return x


def test_forgotten_values_do_not_count_as_correlated():
    x = torch.cat([autoregressive(0.0, 200, 300), 3 * autoregressive(0.95, 200, 300)], -1)
    weights = torch.ones(600, dtype=torch.float64)
    weights[300:] = 1e-6
    tau = autocorrelation_time(x, weights)
    # Independent values give exactly 1 in 97 of 100; the forgotten half alone would give 39.
    assert tau.median().item() == pytest.approx(1, abs=0.05)
    assert autocorrelation_time(x, torch.ones_like(weights)).median().item() > 10


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_measurements_say_nothing(n):
    top, bottom = torch.tensor([[1.0, 5.0], [1.0, 0.5]], dtype=torch.float64)
    got = ratio_of_averages(top, bottom, (torch.arange(2) < n).double())
    assert (got.low.item(), got.high.item(), got.resolved.item()) == (0.0, math.inf, False)
    # The ratio of averages, and not the average of ratios.
    expected = [math.nan, 1.0, 4.0][n]
    assert got.value.item() == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("growth", "strength", "n", "decay", "rho"),
    [
        ("none", 2.0, 200, 1.0, 0.0),
        ("none", 40.0, 200, 0.98, 0.0),
        ("none", 1e9, 200, 1.0, 0.0),  # without a signal
        ("none", 2.0, 200, 0.98, 0.6),
        ("exponential", 2.0, 150, 0.99, 0.0),
        ("linear", 8.0, 300, 1.0, 0.0),  # some drift, some do not
        ("exponential", 0.5, 83, 0.99, 0.0),  # a size between powers of two
        ("exponential", 0.5, 31, 0.99, 0.0),  # too few to tell
    ],
)
def test_agrees_with_the_reference(growth, strength, n, decay, rho):
    noise, signal = histories(course_of(growth, n, n), strength, 12, seed=3, rho=rho)
    weights = decay ** torch.arange(n, dtype=torch.float64)
    got = present_ratio(noise, signal, weights)
    for i in range(len(noise)):
        expected = reference.present(noise[i].numpy(), signal[i].numpy(), weights.numpy(), n)
        ours = [x[i].item() for x in (got.value, got.low, got.high)]
        if not math.isnan(ours[0]):
            assert ours[0] == pytest.approx(expected.value, rel=1e-12)
        # The expansion of Student's quantile: 6e-4 at 2 degrees of freedom, 1e-5 from 3 on.
        loose = 1e-3 if got.effective[i] < 4 else 1e-5
        assert ours[1:] == pytest.approx([expected.low, expected.high], rel=loose)
        assert got.drifting[i].item() == expected.drifting
        assert got.measurements[i].item() == expected.measurements
        assert got.age[i].item() == pytest.approx(expected.age, rel=1e-12)


@pytest.mark.parametrize("growth", ["none", "exponential", "linear"])
@pytest.mark.parametrize(
    ("decay", "n", "strength"),
    [(0.99, 688, 2.0), (0.99, 200, 16.0), (1.0, 400, 2.0), (1.0, 400, 16.0)],
)
def test_the_present_value_is_covered(decay, n, strength, growth):
    """While nothing moves, and while it grows by 4 over what the weights reach back to."""
    span = (1 + decay) / (1 - decay) if decay < 1 else n
    noise, signal = histories(course_of(growth, n, span), strength)
    weights, truth = decay ** torch.arange(n, dtype=torch.float64), 64 * strength
    got, whole = present_ratio(noise, signal, weights), ratio_of_averages(noise, signal, weights)
    share = covered(got, truth)
    if growth == "none":
        # Less a standard error of 500 replicates; the test takes next to nothing from the coverage.
        assert share >= max(0.92, covered(whole, truth) - 0.015)
        # 2 % of false alarms, and two standard errors of 500 replicates.
        assert got.drifting.double().mean() <= 0.032
    else:
        assert share >= 0.9  # with a standard error of 1.3 %
    if growth != "none" and strength == 2.0:
        assert got.drifting.all()
        # The whole history is older, and where it is bounded it tells of the past.
        assert got.age.max() < 40
        # Of six measurements, the fewest here, one in a hundred cannot bound the noise scale.
        assert got.resolved.double().mean() >= 0.98


def test_what_lies_where_there_is_no_measurement_does_not_matter():
    noise, signal = histories(course_of("exponential", 200, 200), 1.0, 20)
    there = torch.arange(200) % 7 != 3
    rubbish = torch.where(there, 0.0, 1e3)
    got = present_ratio(noise, signal, there.double())
    other = present_ratio(noise + rubbish, signal + rubbish, there.double())
    assert got.drifting.any()
    torch.testing.assert_close(other, got, rtol=1e-9, atol=0, equal_nan=True)
    # A ring that is not full: as many tests share the level, as 250 / 2 / 2 / 2 is below 32 too.
    space = torch.zeros(20, 50, dtype=torch.float64)
    weights = torch.cat([torch.ones(200).double(), space[0]])
    full = present_ratio(noise, signal, weights[:200])
    part = present_ratio(torch.cat([noise, space], -1), torch.cat([signal, space], -1), weights)
    assert torch.equal(part.measurements, full.measurements)
    torch.testing.assert_close(part.value, full.value, rtol=1e-12, atol=0)
