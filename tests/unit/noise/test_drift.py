"""The present value of a drifting ratio: against a slow reference, and against known truth."""

import math

import pytest
import torch

from steadygrad.noise.intervals import (
    present_ratio,
    ratio_of_averages,
)
from tests.reference import noise_drift as reference
from tests.unit.noise.test_intervals import covered


def ones(n):
    return torch.ones(n, dtype=torch.float64)


def histories(course, strength, replicates=500, seed=0, rho=0.0):
    """Noise and signal, newest first, of 8 parts of 8 samples in 64 dimensions.

    The true signal is 1 over `course`, so that the ratio is `64 * strength * course`.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (replicates, len(course))

    def chi_square(degrees):
        half = torch.full(shape, degrees / 2, dtype=torch.float64)
        return 2 * torch._standard_gamma(half, generator=generator)

    axis = strength / 64
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = 64 * strength * chi_square(448) / 448
    signal = (course**-0.5 + axis**0.5 * normal).square() + axis * chi_square(63) - noise / 64
    return correlated(noise, rho), correlated(signal, rho)


def correlated(x, rho):
    z = x - x.mean()
    for t in range(1, x.shape[-1]) if rho else ():
        z[:, t] = rho * z[:, t - 1] + (1 - rho**2) ** 0.5 * z[:, t]
    return z + x.mean()


def course_of(growth, n, span):
    age = torch.arange(n, dtype=torch.float64)
    return {"none": ones(n), "exponential": 4 ** (-age / span), "linear": 1 - 0.75 * age / n}[
        growth
    ]


def present(growth, strength, decay, n, rho=0.0):
    """The present ratio of many histories, that of the whole ones, and the truth."""
    span = (1 + decay) / (1 - decay) if decay < 1 else n
    noise, signal = histories(course_of(growth, n, span), strength, rho=rho)
    weights = decay ** torch.arange(n, dtype=torch.float64)
    whole = ratio_of_averages(noise, signal, weights)
    return present_ratio(noise, signal, weights), whole, 64 * strength


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


HISTORIES = pytest.mark.parametrize(
    ("decay", "n", "strength"),
    [(0.99, 688, 2.0), (0.99, 200, 16.0), (1.0, 400, 2.0), (1.0, 400, 16.0)],
)


@HISTORIES
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_constant_is_covered_and_raises_no_alarm(decay, n, strength, rho):
    got, whole, truth = present("none", strength, decay, n, rho)
    # Less a standard error of 500 replicates; the test takes next to nothing from the coverage.
    assert covered(got, truth) >= max(0.92, covered(whole, truth) - 0.015)
    # 2 % of false alarms, and two standard errors of 500 replicates.
    assert got.drifting.double().mean() <= 0.032


@HISTORIES
@pytest.mark.parametrize("growth", ["exponential", "linear"])
def test_the_present_value_is_covered_while_it_grows(decay, n, strength, growth, capsys):
    """Growth by 4 over what the weights reach back to. Standard error of a share of 90 %: 1.3."""
    got, whole, truth = present(growth, strength, decay, n)
    with capsys.disabled():
        before, after = covered(whole, truth), covered(got, truth)
        print(f" [{decay} {n} {strength} {growth}: {before:.1%}, now {after:.1%}] ")
    assert after >= 0.9
    if strength == 2.0:
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
    full = present_ratio(noise, signal, ones(200))
    weights = torch.cat([ones(200), space[0]])
    part = present_ratio(torch.cat([noise, space], -1), torch.cat([signal, space], -1), weights)
    assert torch.equal(part.measurements, full.measurements)
    torch.testing.assert_close(part.value, full.value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("n", [1, 31])
def test_few_measurements_do_not_drift(n):
    ramp = torch.arange(1.0, n + 1, dtype=torch.float64)
    got = present_ratio(ramp, ones(n), ones(n))
    assert (got.drifting.item(), got.measurements.item()) == (False, n)
    empty = present_ratio(ramp, ramp, torch.zeros(n).double())
    assert not empty.drifting
    assert empty.age.isnan()
