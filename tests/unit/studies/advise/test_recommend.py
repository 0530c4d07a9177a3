"""From critical batch sizes to one batch size and a schedule."""

import math

import pytest

from steadygrad.studies.advise.critical import Critical
from steadygrad.studies.advise.recommend import Measured, schedule, tradeoff_rows, whole_run

SIZES = tuple(8 * 2**i for i in range(8))


def measured(samples, critical, *, value=None, sizes=SIZES, spread=0.0) -> Measured:
    """A point with excesses proportional to the batch size: 20% at ``critical``."""
    excess = tuple(0.2 * (size - sizes[0]) / (critical - sizes[0]) for size in sizes)
    draws = tuple(tuple(x * math.exp(spread * (i - 200) / 200) for x in excess) for i in range(400))
    value = critical if value is None else value
    found = Critical(
        sizes, excess, draws, value, value, value, "", 1.5, 5 * critical, 0.0, math.inf
    )
    return Measured(samples, samples // 2, found)


def test_constant_critical_batch_is_the_answer():
    """With one critical batch size from the start on, the whole run has it too."""
    run = whole_run([measured(8, 128.0), measured(4096, 128.0), measured(16384, 128.0)], 0.2)
    # Linear interpolation of a straight line over the logarithm, and the first 12 samples.
    assert run.value == pytest.approx(128, rel=0.05)
    assert run.samples == 16384 + 8192
    assert run.batch_size in (64, 128)


def test_a_critical_batch_that_grows_in_proportion():
    """Then the mean excess is an integral of 1/n, from the first batch to the end."""
    points = [measured(n, 8 + 0.01 * 1.25 * n) for n in (1024, 4096, 16384)]
    run = whole_run(points, 0.2)
    end = 16384 + 8192

    def mean_excess(size: float) -> float:
        return 0.2 * (size - 8) / 0.01 * math.log(end / size) / end

    # Sizes are a factor of 2 apart, and in between the excess is interpolated.
    assert mean_excess(run.value) == pytest.approx(0.2, rel=0.1)
    assert run.batch_size == 48
    assert run.low == run.high == run.value


def test_the_start_costs_something():
    """What happens before the first point counts, at a critical batch size nearer to nothing."""
    late = whole_run([measured(16384, 128.0)], 0.2)
    early = whole_run([measured(64, 128.0), measured(16384, 128.0)], 0.2)
    assert late.value < 0.9 * early.value


def test_sizes_that_a_point_did_not_try_are_extrapolated():
    full = whole_run([measured(1024, 40.0), measured(16384, 120.0)], 0.2)
    few = whole_run([measured(1024, 40.0, sizes=SIZES[:4]), measured(16384, 120.0)], 0.2)
    assert few.value == pytest.approx(full.value, rel=0.1)


def test_the_interval_comes_from_the_draws():
    run = whole_run([measured(4096, 100.0, spread=0.5)], 0.2)
    assert run.low < run.value < run.high
    # Excess e^0.5 times as large: the tolerance is reached at 1/e^0.5 of the size, about.
    assert run.low == pytest.approx(run.value * math.exp(-0.25), rel=0.2)


def test_all_sizes_within_the_tolerance():
    run = whole_run([measured(4096, 1e6)], 0.2)
    assert (run.value, run.high, run.batch_size) == (SIZES[-1], math.inf, SIZES[-1])


def test_a_schedule_never_decreases():
    known = [(512, 20.0), (2048, 70.0), (8192, 40.0), (32768, 300.0)]
    rows = schedule([measured(*pair) for pair in known], 0.001, "sqrt")
    changes = [(row["from_samples"], row["batch_size"]) for row in rows]
    assert changes == [(0, 16), (2048, 64), (32768, 256)]
    assert [row["lr"] for row in rows] == pytest.approx(
        [0.001 * (b / 8) ** 0.5 for _, b in changes]
    )


def test_the_linear_rule():
    assert schedule([measured(512, 70.0)], 0.01, "linear")[0]["lr"] == pytest.approx(0.08)


def test_rows_lie_on_the_trade_off():
    for row in tradeoff_rows(100.0, SIZES):
        product = (row["steps_ratio"] - 1) * (row["samples_ratio"] - 1)
        assert product == pytest.approx(1, rel=1e-12)
