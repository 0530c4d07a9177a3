"""What is known of each batch size, from results whose truth is known."""

import math
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import LEAST, lengths_of
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import (
    LENGTH,
    branch,
    branches,
    law,
    make_header,
    measured,
    point,
    scratch,
    within_tolerance,
)

POINTS = (1024, LENGTH)
HEADER = make_header(POINTS)


def three(size, slower=1.0, **more):
    return [scratch(size, seed, slower=slower, **more) for seed in range(3)]


def known(slower, *extra, header=HEADER, results=None, **more):
    """Evidence of branches, and of three pairs of sizes that need so many times the samples."""
    runs = [*three(8), *(run for size, slow in slower.items() for run in three(size, slow))]
    results = measured(header, **more) if results is None else results
    return Evidence(header, Results([*results, *runs, *extra]))


@pytest.mark.parametrize(
    ("most", "base", "world", "expected"),
    [
        (8, 8, 1, [8]),
        (48, 8, 1, [8, 12, 16, 24, 32, 48]),
        (8, 1, 1, [1, 2, 3, 4, 6, 8]),
        (32, 8, 8, [8, 16, 24, 32]),
        (96, 6, 4, [6, 12, 24, 36, 48, 72, 96]),
    ],
)
def test_batch_sizes_that_can_be_tried(most, base, world, expected):
    ladder = {"batch_size": base, "multiples": ((1, most // base),) * 2}
    header = make_header(runtime={"world_size": world}, **ladder)
    assert Evidence(header, Results()).rungs == expected


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize(
    ("stop", "length"),
    # The first of a length's three losses is that of the length over 1.6.
    [(1e9, 4096), (2700, 4096), (2000, 2048), (1000, 1024), (500, 512), (200, 0)],
)
def test_the_length_is_halved_until_the_loss_falls_at_its_end(stop, length, decays):
    def losses(place):
        """Falls, and rises a little after ``stop``."""
        return law(min(place, stop)) + 2e-6 * max(0.0, place - stop)

    lengths = [4096 >> halvings for halvings in range(4)]
    runs = [
        scratch(8, seed, samples, decays=decays, losses=losses)
        for seed in range(3)
        for n in lengths
        for samples in (lengths_of(n, 0.2) if decays else [n])
    ]
    task = {"lr_decay": "linear" if decays else "none"}
    assert lengths[-1] == LEAST * 8
    assert Evidence(make_header(task=task), Results(runs)).length == length
    # With the longest alone, the next is wanted.
    first = [run for run in runs if run.samples in lengths_of(4096, 0.2)]
    found = Evidence(make_header(task=task), Results(first))
    assert found.length == (4096 if length == 4096 else 2048)
    # A length that was given stays.
    given = make_header(task=task, settings={"samples": 4096})
    assert Evidence(given, Results(first)).length == 4096


def test_the_length_stays_where_the_loss_is_noisy_but_falls():
    noise = np.random.default_rng(0).normal(0, 0.3, (3, 3))
    runs = three(8)
    noisy = [
        replace(
            run, curve=tuple((n, loss + e) for (n, loss), e in zip(run.curve, row, strict=True))
        )
        for run, row in zip(runs, noise, strict=True)
    ]
    falls = [run.curve[0][1] - run.curve[-1][1] for run in noisy]
    assert min(falls) < 0 < sum(falls)
    assert Evidence(HEADER, Results(noisy)).length == LENGTH
    # Two seeds tell nothing yet, and a fall within rounding is none.
    assert Evidence(HEADER, Results(three(8, losses=lambda s: s)[:2])).length == LENGTH
    still = three(8, losses=lambda s: 2 - 1e-12 * s)
    assert Evidence(HEADER, Results(still)).length == 2048


def test_critical_batch_sizes_of_every_point():
    found = Evidence(HEADER, Results(measured(HEADER)))
    truth = [within_tolerance(120.0), within_tolerance(400.0)]
    # The noise is a hundredth of what a doubling of the batch changes.
    assert [found.criticals[i].value for i in (0, 1)] == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(
    ("slower", "passed", "failed", "constant"),
    [
        ({}, None, None, None),
        ({24: 1.1, 32: 1.3}, 24, 32, 24),
        ({16: 1.1, 32: 1.3}, 16, 32, 16),
        # Luck: one larger than what failed may pass, and counts for nothing.
        ({16: 1.1, 24: 1.3, 32: 1.0}, 16, 24, 16),
        ({32: 1.4}, None, 32, None),
        ({12: 1.4, 32: 1.4}, None, 12, 8),
        ({512: 1.1}, 512, None, 512),
        ({32: 1.1}, 32, None, 32),
    ],
)
def test_the_largest_that_passed_below_the_smallest_that_failed(slower, passed, failed, constant):
    found = known(slower)
    assert (found.passed, found.failed, found.constant) == (passed, failed, constant)


def test_a_size_that_is_not_decided_is_neither():
    spread = [replace(run, loss=run.loss + 0.02 * (run.repeat - 1)) for run in three(12, 1.15)]
    found = known({16: 1.5}, *spread)
    assert (found.passed, found.failed, found.constant) == (None, 16, None)


def test_other_lengths_rates_and_schedules_are_no_size():
    others = [*three(12, rate=2.0), *three("8-16@1024"), *three(24, samples=2048)]
    assert [*known({16: 1.1}, *others).sizes] == [16]


LOST = dict.fromkeys((64, 128, 256, 512), 1e9)


@pytest.mark.parametrize(("at", "told"), [((0,), 64), ((1,), None), ((0, 1), None)])
def test_nothing_is_advised_above_what_diverged_at_any_point(at, told):
    results = [r for i in (0, 1) for r in (point(i, POINTS[i]),)]
    for i in (0, 1):
        results += branches(1e5, sigma=5e-4, point=i, diverged=LOST if i in at else {})
    found = known({32: 1.0}, results=results)
    assert (found.diverged, found.constant) == (64, 32)
    assert [found.safe(found.criticals[i]) for i in (0, 1)] == [32, 32]
    assert found.schedule == ()
    # At a point where it diverged itself, no other point need say so.
    going_on = summarize(HEADER, found.results, "complete").going_on
    assert (going_on.batch_size, going_on.diverged) == (32, told)


def test_a_size_that_diverged_in_a_training_is_not_safe_in_branches():
    results = measured(HEADER, (1e5, 1e5))
    found = known({16: 1.0}, *three(32, noise=math.inf), results=results)
    assert (found.diverged, found.failed, found.constant) == (32, 32, 16)
    assert [found.safe(found.criticals[i]) for i in (0, 1)] == [16, 16]


def test_a_branch_that_tells_nothing_else_tells_that_it_diverged():
    lost = dict.fromkeys((128, 256, 512), math.inf)
    results = [*branches(1e5, sigma=0.3, point=0, diverged=lost)]
    results += branches(1e5, sigma=0.0005, point=1)
    found = known({}, results=results)
    assert [c.resolved for c in found.criticals.values()] == [False, True]
    assert found.safe(found.criticals[1]) == 64
    alone = Evidence(HEADER, Results([branch(64, 0, math.inf)]))
    assert (alone.criticals, alone.diverged) == ({}, 64)


@pytest.mark.parametrize("criticals", [(120.0, 400.0), (400.0, 120.0), (60.0, 1e5)])
def test_a_schedule_is_never_above_what_was_trained_from_there_on(criticals):
    points = (512, 2048, 4096)
    header = make_header(points)
    found = known({12: 1.0}, header=header, results=measured(header, criticals))
    safe = [found.criticals[i].safe for i in range(3)]
    for (_, a), (start, b) in pairwise(found.schedule):
        assert b % a == 0
        assert a < b <= min(size for n, size in zip(points, safe, strict=True) if n >= start)
    assert all(start < found.length for start, _ in found.schedule)
    assert len(found.schedule) > 1


@pytest.mark.parametrize(
    ("constant", "critical", "sizes"), [(64, 20.0, []), (64, 1e5, [64, 512]), (24, 120.0, [16, 32])]
)
def test_a_schedule_takes_fewer_steps_than_the_constant_batch(constant, critical, sizes):
    """It begins with the constant batch or below, and has to make up for that."""
    found = known({constant: 1.0}, results=measured(HEADER, (critical, 1e5)))
    assert found.constant == constant
    assert [size for _, size in found.schedule] == sizes
    if sizes:
        assert found.steps(found.schedule) < found.length / constant
        assert known({}, results=measured(HEADER, (critical, 1e5))).schedule == ()


def test_a_schedule_that_begins_far_below_takes_too_many_steps():
    header = make_header((512, 2048, 4096))
    results = measured(header, (60.0, 120.0, 1e5))
    sizes = [known({size: 1.0}, header=header, results=results).schedule for size in (12, 64)]
    assert [bool(stages) for stages in sizes] == [True, False]


def test_pairs_that_agree_by_chance_have_a_share_of_the_other_sizes_spread():
    spread = [replace(run, loss=run.loss + 0.02 * (run.repeat - 1)) for run in three(16, 1.1)]
    low, high = known({12: 1.1}).sizes[12].overheads[1:]
    assert high - low < 0.01
    shared = known({12: 1.1}, *spread)
    low, high = shared.sizes[12].overheads[1:]
    assert high - low > 0.02
    # A size's own differences are not counted twice.
    assert [shared.sizes[size].prior.variance < 1e-6 for size in (12, 16)] == [False, True]


@pytest.mark.parametrize(
    ("samples", "rule", "expected"),
    [(4096, "sqrt", 256), (1000, "linear", 56), (4096, "constant", 0)],
)
def test_the_warm_up_is_a_sixteenth_of_the_run_at_most(samples, rule, expected):
    header = make_header(task={"lr_rule": rule}, samples=samples)
    assert Evidence(header, Results()).warmup_samples == expected
