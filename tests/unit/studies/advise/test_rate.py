"""Whether the learning rate suits a batch size."""

import math

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.pairs import better
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import LENGTH, make_header, scratch

HEADER = make_header((LENGTH,))


def runs(rate, slower=1.0, spread=0.0, *, size=8, count=3):
    """Trainings at a rate that need so many times the samples; infinitely many: they diverge."""
    noise = [spread * (i - (count - 1) / 2) for i in range(count)]
    noise = [math.inf] * count if math.isinf(slower) else noise
    return [scratch(size, i, rate=rate, slower=slower, noise=e) for i, e in enumerate(noise)]


@pytest.mark.parametrize(
    ("half", "twice", "spread", "verdict"),
    [
        (1.5, 0.6, 0.0, "low"),
        (0.6, 1.5, 0.0, "high"),
        (1.5, 1.5, 0.0, "fits"),
        # Better by less than the tolerated samples are worth, but not surely better.
        (1.5, 0.97, 0.003, "fits"),
        (1.0, 1.0, 0.0, "fits"),
        (1.5, 0.6, 0.05, ""),
        (1.5, 1.0, 0.05, ""),
        (30.0, 1.0, 0.05, ""),  # half of it is not better, for sure
        # Where both are better, nothing is known of the best.
        (0.6, 0.6, 0.0, ""),
        (1.5, math.inf, 0.0, "fits"),
        (0.6, math.inf, 0.0, "high"),
    ],
)
def test_half_and_twice_the_rate(half, twice, spread, verdict):
    events = [*runs(1.0), *runs(0.5, half, spread), *runs(2.0, twice, spread)]
    (found,) = summarize(HEADER, Results(events), "budget").rates
    assert found.verdict == verdict
    assert [other.lr for other in found.others] == [0.0005, 0.002]
    assert (found.batch_size, found.lr, found.samples) == (8, 0.001, LENGTH)
    best = {"low": 0.002, "high": 0.0005}.get(verdict)
    assert (found.better and found.better.lr) == best
    assert math.isinf(found.others[1].mean) == math.isinf(twice)


def test_differences_are_paired_by_seed_and_wait_for_a_look():
    own, twice = runs(1.0, count=5), runs(2.0, 0.8, count=5)
    base = {run.repeat: run.curve for run in own}
    # What a seed adds to both losses is no noise.
    apart = [
        [replace(run, loss=run.loss + run.repeat) for run in rows] for rows in (own, twice[::-1])
    ]
    found = better(apart[1], apart[0], base)
    assert found.pairs == 4
    gain = twice[0].loss - own[0].loss
    assert (found.mean, found.low, found.high) == pytest.approx((gain,) * 3)
    assert found.sure
    assert better(twice[:2], own, base) is None
    assert better(twice[3:], own[:4], base) is None


@pytest.mark.parametrize(("part", "never"), [(0.9, True), (1.1, False)])
def test_a_rate_fits_unless_another_is_worth_the_tolerated_samples(part, never):
    own = runs(1.0)
    base = {run.repeat: run.curve for run in own}
    worth = own[0].curve[-2][1] - own[0].curve[-1][1]
    other = [replace(run, rate=2.0, loss=run.loss - part * worth) for run in own]
    found = better(other, own, base)
    assert (found.sure, found.never, found.decided) == (True, never, True)
    noisy = [replace(run, loss=run.loss + 0.2 * (run.repeat - 1)) for run in other]
    assert not better(noisy, own, base).decided


def test_verdicts_at_the_smallest_batch_and_at_the_advised_one():
    sizes = [*runs(1.0, size=8), *runs(1.0, 1.1, size=12), *runs(1.0, 1.5, size=16)]
    at_8 = [*runs(0.5, 1.5), *runs(2.0, 1.5)]
    at_12 = [*runs(0.5, 1.6, size=12), *runs(2.0, 0.8, size=12)]
    # Those of a size that is not advised, and half of a verdict, are none.
    at_16 = [*runs(0.5, 1.0, size=16), *runs(2.0, 1.0, size=16)]
    summary = summarize(HEADER, Results([*sizes, *at_8, *at_12, *at_16]), "budget")
    assert [(rate.batch_size, rate.verdict) for rate in summary.rates] == [(8, "fits"), (12, "low")]
    summary = summarize(HEADER, Results([*sizes, *at_8, *runs(0.5, size=12)]), "budget")
    assert [rate.batch_size for rate in summary.rates] == [8]
