"""The critical batch size of branches whose truth is known."""

import math
import random

import pytest

from steadygrad.studies.advise.critical import CAP, Branch, find_critical
from steadygrad.studies.advise.plan import FRACTIONS

LENGTH = 4096
SIZES = [8 * 2**i for i in range(7)]


def law(samples: float) -> float:
    return 3 - 0.3 * math.log(1 + samples / 1000)


def branches(critical: float, *, sigma=0.0, shared=0.0, repeats=3, seed=0, sizes=SIZES):
    """Branches that obey the trade-off with a critical batch size, and noise of two kinds.

    ``sigma`` is every branch's own; ``shared`` is that of a repeat's data order.
    """
    noise = random.Random(seed)
    made = []
    for repeat in range(repeats):
        common = noise.gauss(0, shared) if shared else 0.0
        for size in sizes:
            slower = (1 + size / critical) / (1 + sizes[0] / critical)
            marks = (*FRACTIONS, 1.0) if size == sizes[0] else (1.0,)
            curve = [
                (part * LENGTH, law(part * LENGTH / slower) + noise.gauss(0, sigma))
                for part in marks
            ]
            # What the last batches of an order do to the loss, they do to all batch sizes.
            curve[-1] = (LENGTH, curve[-1][1] + common)
            made.append(Branch(size, repeat, LENGTH, curve[-1][1], curve))
    return made


def within_tolerance(critical: float, tolerance: float) -> float:
    """The batch size that needs just the tolerated extra samples."""
    return (1 + tolerance) * (critical + SIZES[0]) - critical


@pytest.mark.parametrize("critical", [64.0, 120.0, 250.0, 600.0])
def test_known_truth_without_noise(critical):
    found = find_critical(branches(critical), 0.2)
    truth = within_tolerance(critical, 0.2)
    # What is left is the yardstick's coarse grid of shapes; interpolated in the logarithm it is 6%.
    assert found.value == pytest.approx(truth, rel=0.01)
    assert found.fitted == pytest.approx(critical, rel=0.02)
    assert found.low == pytest.approx(found.value)
    assert found.high == pytest.approx(found.value)
    expected = [min(CAP, (1 + b / critical) / (1 + 8 / critical) - 1) for b in SIZES]
    assert found.excess == pytest.approx(expected, rel=0.02, abs=1e-3)
    assert found.at_edge == ""


def covered(critical: float, sigma: float, shared: float, replicates: int) -> int:
    truth = within_tolerance(critical, 0.2)
    runs = [
        find_critical(branches(critical, sigma=sigma, shared=shared, seed=seed), 0.2)
        for seed in range(replicates)
    ]
    return sum(run.low <= truth <= run.high for run in runs)


def test_the_interval_covers_the_truth():
    # 95% nominal: fewer than 27 of 30 has a chance of 6%, at 75% of 98%; the seeds are fixed.
    assert covered(64.0, 0.006, 0.0, 30) >= 27


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critical", "sigma", "shared"),
    [(64.0, 0.002, 0.0), (64.0, 0.006, 0.006), (250.0, 0.002, 0.006), (250.0, 0.006, 0.0)],
)
def test_the_interval_covers_the_truth_in_many_replicates(critical, sigma, shared):
    # 95% nominal; at a true 93% fewer than 180 of 200 has a chance of 4%, at 85% of 97%.
    assert covered(critical, sigma, shared, 200) >= 180


def test_the_yardsticks_own_noise_widens_the_interval():
    """Noise on the way of the smallest batch's branches, none at any branch's end."""
    noise, made = random.Random(0), []
    for b in branches(250.0, sigma=0.0005, seed=2):
        *way, end = b.curve
        way = [(samples, loss + noise.gauss(0, 0.01)) for samples, loss in way]
        made.append(Branch(b.batch_size, b.repeat, b.samples, b.loss, [*way, end]))
    quiet, loud = (
        find_critical(branches(250.0, sigma=0.0005, seed=2), 0.2),
        find_critical(made, 0.2),
    )
    assert math.log(loud.high / loud.low) > 2 * math.log(quiet.high / quiet.low)


@pytest.mark.parametrize("good", [1, 2])
def test_between_a_good_size_and_a_diverged_one_anything_is_possible(good):
    """With one good size there is nothing to estimate the noise from, with two there is."""
    made = [
        b
        if b.batch_size in SIZES[:good]
        else Branch(b.batch_size, b.repeat, LENGTH, math.inf, [(LENGTH, math.inf)])
        for b in branches(1e5, sigma=0.001)
    ]
    found = find_critical(made, 0.2)
    neighbours = SIZES[good - 1], SIZES[good]
    assert neighbours[0] <= found.low <= found.value <= found.high <= neighbours[1]
    # A draw's lower end is the excess laid on the line to the cap: a tenth of the way.
    assert found.low < neighbours[0] * 1.15
    # The upper quantile is one of the draws, a hair below the diverged size.
    assert found.high == pytest.approx(neighbours[1], rel=1e-3)
    if good == 1:
        assert (found.low, found.high) == neighbours


def test_what_a_data_order_adds_to_all_batch_sizes_does_not_matter():
    quiet = find_critical(branches(250.0, sigma=0.002, seed=1), 0.2)
    loud = find_critical(branches(250.0, sigma=0.002, shared=0.05, seed=1), 0.2)
    # The smooth curve is bent a little by its own last point.
    assert loud.value == pytest.approx(quiet.value, rel=0.35)
    assert loud.high / loud.low < 3


def test_more_noise_means_a_wider_interval():
    widths = []
    for sigma in (0.001, 0.004):
        found = find_critical(branches(250.0, sigma=sigma, seed=3), 0.2)
        widths.append(math.log(found.high / found.low))
    assert widths[1] > 2 * widths[0] > 0


def test_every_size_within_the_tolerance():
    found = find_critical(branches(1e5), 0.2)
    assert (found.value, found.high, found.at_edge) == (SIZES[-1], math.inf, "above")


def test_even_the_second_size_beyond_it():
    found = find_critical(branches(10.0), 0.2)
    assert found.at_edge == "below"
    assert SIZES[0] < found.value < SIZES[1]


def test_a_loss_that_does_not_fall_gives_no_number():
    flat = [
        Branch(b.batch_size, b.repeat, LENGTH, 2.0, [(s, 2.0 + s * 1e-6) for s, _ in b.curve])
        for b in branches(250.0)
    ]
    found = find_critical(flat, 0.2)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0.0, math.inf)


def test_a_diverged_branch_is_beyond_the_tolerance():
    made = [
        Branch(b.batch_size, b.repeat, LENGTH, math.inf, [(LENGTH, math.inf)])
        if b.batch_size == SIZES[-1] and b.repeat == 1
        else b
        for b in branches(1e5, sigma=0.001)
    ]
    found = find_critical(made, 0.2)
    assert found.excess[-1] == CAP
    assert SIZES[-2] <= found.value < SIZES[-1]
    assert math.isfinite(found.high)


def test_the_same_branches_give_the_same_interval():
    made = branches(250.0, sigma=0.004)
    assert find_critical(made, 0.2, seed=7) == find_critical(made, 0.2, seed=7)
    assert find_critical(made, 0.2, seed=7).draws != find_critical(made, 0.2, seed=8).draws


def test_a_wider_tolerance_takes_a_larger_batch():
    values = [find_critical(branches(250.0), tolerance).value for tolerance in (0.1, 0.2, 0.4)]
    assert values == sorted(values)
    assert values[2] > 2 * values[0]


def test_a_loss_that_only_wavers_measures_nothing():
    """A fall within the noise is none: most seeds must say so."""
    unknown = 0
    for seed in range(40):
        draw = random.Random(seed)
        marks = [LENGTH * part / 8 for part in range(2, 9)]
        flat = [
            Branch(size, repeat, LENGTH, 2 + draw.gauss(0, 0.002), curve)
            for size in SIZES
            for repeat in range(3)
            for curve in [[(mark, 2 + draw.gauss(0, 0.002)) for mark in marks]]
        ]
        unknown += math.isnan(find_critical(flat, 0.2, seed=seed).value)
    # The fall is tested at 2.5 % on one side, over the best of many curves: some slip through.
    assert unknown >= 34


def test_draws_beside_a_diverged_size_are_in_every_part_of_the_draws():
    """Whoever takes every other draw must find both: those near the good size and those far."""
    made = [
        b
        if b.batch_size in SIZES[:2]
        else Branch(b.batch_size, b.repeat, LENGTH, math.inf, [(LENGTH, math.inf)])
        for b in branches(1e5, sigma=0.001)
    ]
    for part in (0, 1):
        beside = [row[2] < 1 for row in find_critical(made, 0.2).draws[part::2]]
        # 200 fair coins.
        assert 70 < sum(beside) < 130
