"""From critical batch sizes to one batch size and a schedule."""

import math
import random
from itertools import pairwise

import pytest

from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.studies.advise.critical import Critical
from steadygrad.studies.advise.recommend import schedule, tradeoff_rows, whole_run
from steadygrad.studies.advise.surface import Measured, Surface

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
    # Without noise what is left is what was assumed of the beginning.
    assert run.low == run.value < run.high
    assert run.assumed == pytest.approx((1024 + 256) / end)


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


def test_the_headline_is_no_more_than_the_schedule_ends_at():
    """Even where a run is so short that first steps, which cost nothing, are most of it."""
    points = [measured(64, 128.0)]
    run = whole_run(points, 0.2)
    assert run.value == pytest.approx(128, rel=1e-12)
    assert run.batch_size == stages(points)[-1][1] == 128


def stages(points, tolerance=0.2) -> list[tuple[int, int]]:
    rows = schedule(points, tolerance, 0.001, "sqrt")
    assert BatchSizeSchedule(rows).stages[0].from_samples == 0
    return [(row["from_samples"], row["batch_size"]) for row in rows]


def test_a_constant_critical_batch_is_where_the_schedule_ends():
    points = [measured(n, 128.0) for n in (1024, 4096, 16384)]
    found = stages(points)
    assert found[0] == (0, 8)
    assert found[-1][1] == 128 >= whole_run(points, 0.2).batch_size
    # Excess is 0.2 / 120 (B c/s - 8) at s < c, where c = 1280 is the middle of the first branch;
    # relative to 8 it is 0.2 at B = (120 - 1.6) s/c + 9.6: 128 at c itself.
    assert found[-1][0] == 1280
    # 30 steps of 8, and then what is tolerable after 240, when 31.8 is.
    assert found[1] == (pytest.approx(1280 * (32 - 9.6) / 118.4, rel=0.02), 32)
    assert len(found) == 3


def test_a_growing_critical_batch_is_followed():
    points = [measured(1024, 48.0), measured(4096, 100.0), measured(16384, 300.0)]
    found = stages(points)
    assert [size for _, size in found] == [8, 16, 32, 64, 128, 256]
    # What the last branches bear they bear from their start.
    assert found[-1][0] == 16384
    surface = Surface(points)
    for start, size in found[1:-1]:
        extra = (1 + surface.excess(size, start)) / (1 + surface.excess(8, start)) - 1
        # Never before it is tolerable, nor much after: the fit is drawn through the grid's nodes.
        assert 0.18 < extra < 0.201


def test_stages_follow_each_other_at_30_steps_or_more():
    points = [measured(n, c) for n, c in ((256, 20.0), (1024, 60.0), (4096, 150.0), (16384, 900.0))]
    found = stages(points)
    assert len(found) == 6
    for (start, size), (end, _) in pairwise(found):
        assert end - start >= 30 * size
    # Otherwise there would be one for every size of the grid: 14 up to 768.
    assert found[-1] == (16384, 768)


def test_the_first_stage_has_30_steps_too():
    """24 would be tolerable when 8 has had 8 steps, and stay for more than 30."""
    found = stages([measured(1024, 300.0), measured(16384, 300.0)])
    assert found[:2] == [(0, 8), (240, 24)]
    # (256 - 9.6) / 290.4 of 1,280, up to the curve between two nodes.
    assert found[2:] == [(pytest.approx(1086, rel=0.01), 256)]


def test_noisy_points_are_pooled():
    """A critical batch size that falls counts neither as it was nor as it came out last."""
    high, low = 300.0, 40.0
    points = [measured(1024, high), measured(4096, low), measured(16384, low)]
    last = stages(points)[-1][1]
    assert low < last < 0.5 * high
    # A running maximum would end at 256; so would each of the two without the other.
    assert stages(points[:1])[-1][1] == 256
    # Noise that averages out does not matter much.
    even = stages([measured(n, 110.0) for n in (1024, 4096, 16384)])[-1][1]
    assert 0.5 * even <= last <= even


def test_one_point():
    assert stages([measured(512, 70.0)])[-1] == (512, 64)


def test_no_tolerance():
    points = [measured(1024, 40.0), measured(16384, 120.0)]
    assert whole_run(points, 0.0).value == 8
    assert stages(points, 0.0) == [(0, 8)]


def test_a_large_tolerance_begins_above_the_smallest_batch():
    """Twice the samples at twice the batch: no step lost even where nothing can be gained."""
    assert stages([measured(512, 70.0)], 1.0)[0] == (0, 16)


@pytest.mark.parametrize("critical", [1e6, math.inf])
def test_nothing_is_too_large(critical):
    assert stages([measured(1024, critical), measured(4096, critical)]) == [(0, SIZES[-1])]


def test_never_more_than_was_tried():
    points = [measured(1024, 200.0, sizes=SIZES[:4]), measured(4096, 2000.0, sizes=SIZES[:5])]
    assert stages(points)[-1][1] == whole_run(points, 0.2).value == SIZES[4]


def random_points(seed: int) -> tuple[list[Measured], float]:
    """Excesses of any monotone shape that fall with training, and a tolerance."""
    draw = random.Random(seed)
    row, samples, points = [0.0], draw.choice([64, 256, 1024]), []
    for _ in SIZES[1:]:
        row.append(row[-1] + draw.random() ** 3 * draw.choice([0.02, 0.2, 1.0]))
    for _ in range(draw.randint(1, 5)):
        excess = tuple(row)
        found = Critical(SIZES, excess, (excess,), 1.0, 1.0, 1.0, "", 1.0, 1.0, 1.0, 1.0)
        points.append(Measured(samples, draw.choice([samples // 4, 2 * samples]), found))
        factor, samples = draw.random(), 4 * samples
        row = [extra * factor for extra in row]
    return points, draw.choice([0.0, 0.05, 0.2, 0.5])


@pytest.mark.parametrize("seed", range(100))
def test_the_headline_lies_between_the_first_stage_and_the_last(seed):
    points, tolerance = random_points(seed)
    sizes = [size for _, size in stages(points, tolerance)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] <= whole_run(points, tolerance).batch_size <= sizes[-1] <= SIZES[-1]


def test_twice_everything_is_twice_the_batch_size():
    def scaled(factor: int) -> list[Measured]:
        sizes = tuple(factor * size for size in SIZES)
        known = [(1024, 48.0), (4096, 30.0), (16384, 300.0)]
        return [measured(factor * n, factor * c, sizes=sizes) for n, c in known]

    once, twice = (schedule(scaled(k), 0.2, 0.001, "sqrt") for k in (1, 2))
    assert [row["batch_size"] for row in twice] == [2 * row["batch_size"] for row in once]
    assert [row["lr"] for row in twice] == [row["lr"] for row in once]
    for row, double in zip(once, twice, strict=True):
        # Beginnings are rounded up to whole samples.
        assert abs(double["from_samples"] - 2 * row["from_samples"]) <= 1
    value = whole_run(scaled(1), 0.2).value
    assert whole_run(scaled(2), 0.2).value == pytest.approx(2 * value, rel=1e-12)


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 8**0.5), ("linear", 8), ("constant", 1)])
def test_the_learning_rate_follows_its_rule(rule, factor):
    rows = schedule([measured(512, 70.0)], 0.2, 0.01, rule)
    assert rows[0] == {"from_samples": 0, "batch_size": 8, "lr": 0.01}
    assert (rows[-1]["batch_size"], rows[-1]["lr"]) == (64, pytest.approx(0.01 * factor))


def test_rows_lie_on_the_trade_off():
    for row in tradeoff_rows(100.0, SIZES):
        product = (row["steps_ratio"] - 1) * (row["samples_ratio"] - 1)
        assert product == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("critical", [100.0, 300.0])
def test_the_interval_covers_a_critical_batch_that_never_changed(count, critical):
    """Nothing is measured before the first point: the interval must allow for it."""
    points = [measured(n, critical) for n in (1024, 4096, 16384)[-count:]]
    run = whole_run(points, 0.2)
    assert run.low < critical
    assert run.high == pytest.approx(critical)
