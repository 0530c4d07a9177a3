"""From results to the next trial and to the recommendation."""

import math
from itertools import pairwise

import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.analysis import Chooser, Evidence
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import RUN_ENDS, end_marks, run_marks
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import (
    SIZES,
    branches,
    law,
    make_header,
    point,
    relabelled,
    scratch,
    slowness,
    within_tolerance,
)

POINTS = (1024, 4096)


def results(*extra, critical=(120.0, 400.0), sigma=0.0005, diverged=({}, {})):
    """Points, branches with their critical batch sizes, and further events."""
    events = []
    for i, samples in enumerate(POINTS):
        events.append(point(i, samples))
        events += branches(critical[i], sigma=sigma, seed=i, point=i, diverged=diverged[i])
    return Results([*events, *extra])


def runs(size, critical, seeds=3, **more):
    """Runs from scratch that obey the trade-off."""
    slower = slowness(size, critical)
    return [scratch(size, seed, POINTS[-1], slower=slower, **more) for seed in range(seeds)]


def base_runs():
    return [scratch(8, seed, POINTS[-1]) for seed in (1, 2)]


def weighed(*extra, **more):
    """Evidence of branches and runs of the smallest batch, and of further events."""
    return Evidence(make_header(POINTS), results(*base_runs(), *extra, **more))


@pytest.mark.parametrize(
    ("most", "base", "world", "expected"),
    [
        (8, 8, 1, [8]),
        (50, 8, 1, [8, 12, 16, 24, 32, 48]),
        (64, 8, 1, [8, 12, 16, 24, 32, 48, 64]),
        (5, 8, 1, [8]),
        (10, 1, 1, [1, 2, 3, 4, 6, 8]),
        (50, 8, 8, [8, 16, 24, 32, 48]),
        (100, 6, 4, [6, 12, 24, 36, 48, 72, 96]),
    ],
)
def test_candidates(most, base, world, expected):
    header = make_header(runtime={"world_size": world}, batch_size=base)
    assert Evidence(header, Results()).rungs(most) == expected


def test_critical_batch_sizes_of_every_point():
    evidence = Evidence(make_header(POINTS), results())
    found = [evidence.criticals[i].value for i in (0, 1)]
    truth = [within_tolerance(120.0), within_tolerance(400.0)]
    # The noise is a hundredth of what a doubling of the batch changes.
    assert found == pytest.approx(truth, rel=0.1)
    assert evidence.end == 1
    assert evidence.length == POINTS[-1]


def evidence_of(losses, points=POINTS, sigma=0.001, shared=0.0):
    """Evidence of a main trajectory with given losses, and of branches that all fall."""
    events = [point(i, samples, losses=losses) for i, samples in enumerate(points)]
    for i in range(len(points)):
        events += branches(1e5, sigma=sigma, shared=shared, seed=i, point=i)
    return Evidence(make_header(points), Results(events))


def second_half(samples, fall, wave=0.0):
    """Losses that fall by so much, at a steady rate over the logarithm, and waver."""
    marks = run_marks(samples, SIZES[0])

    def losses(place):
        part = math.log(place / (samples / 2)) / math.log(end / (samples / 2))
        sign = (-1) ** marks.index(place) if place < end_marks(samples, SIZES[0])[0] else 0
        return 2 - fall * part + wave * sign

    end = sum(end_marks(samples, SIZES[0])) / RUN_ENDS
    return losses


@pytest.mark.parametrize(("deviations", "falls"), [(0.0, False), (2.9, False), (3.1, True)])
@pytest.mark.parametrize("shared", [0.0, 0.005])
def test_the_loss_still_falls_by_three_deviations_of_a_run(deviations, falls, shared):
    samples = 4096
    spread = evidence_of(law, (samples,), shared=shared).criticals[0].spread
    # A repeat's own data order counts: a single run has it, too.
    assert spread == pytest.approx(math.hypot(0.001, shared), rel=0.6)
    found = evidence_of(second_half(samples, deviations * spread), (samples,), shared=shared)
    assert found.end == (0 if falls else None)
    assert found.length == (samples if falls else 0)


@pytest.mark.parametrize(("wave", "falls"), [(0.0, True), (0.004, True), (0.01, False)])
def test_the_loss_still_falls_by_three_standard_errors_of_its_slope(wave, falls):
    """The first loss of the second half is high by chance, and the last an average."""
    found = evidence_of(second_half(4096, 0.03, wave), (4096,))
    assert 3 * found.criticals[0].spread < 0.03
    assert found.end == (0 if falls else None)


def test_runs_end_at_the_last_point_where_the_loss_falls():
    points = (1024, 4096, 16384)
    # The whole run up to a point falls, its second half does not.
    ends = [evidence_of(lambda s, stop=stop: law(min(s, stop)), points).end for stop in points]
    assert ends == [0, 1, 2]
    assert evidence_of(lambda s: law(min(s, 400)), points).end is None
    # A level stretch between two falls ends nothing.
    assert evidence_of(lambda s: law(s if s > 4096 else min(s, 1024)), points).end == 2


def test_runs_do_not_end_where_the_loss_is_constant():
    """The error rate of few samples may be the same number all along, without any spread."""
    falling = [point(0, 1024), *branches(120.0, sigma=0.0005, point=0)]
    level = [relabelled(b, lambda s: 0.5) for b in branches(120.0, point=1)]
    events = [*falling, point(1, 4096, losses=lambda s: 0.5), *level]
    evidence = Evidence(make_header(POINTS), Results(events))
    assert evidence.criticals[1].spread == 0.0
    assert (evidence.end, len(evidence.measured)) == (0, 1)


def test_a_prediction_is_called_one_until_it_is_trained():
    evidence = Evidence(make_header(POINTS), results())
    assert evidence.checked == []
    assert evidence.constant is not None
    trained = {size for c in evidence.criticals.values() for size in c.sizes}
    assert evidence.constant in trained
    assert evidence.constant <= evidence.predicted


def test_runs_from_scratch_overrule_the_prediction():
    evidence = weighed(*runs(48, 60.0))
    ((run),) = evidence.checked
    # The curve's fit is coarse; the truth is (1 + 48/60) / (1 + 8/60) - 1 = 0.588.
    assert run.overhead == pytest.approx(slowness(48, 60.0) - 1, rel=0.1)
    # Without noise the interval is a point, but for the order in which sums are made.
    assert (run.low, run.high) == pytest.approx((run.overhead, run.overhead), rel=1e-12)
    assert evidence.constant == 8
    assert evidence.failed is run
    assert evidence.passed is None


def test_the_largest_that_passed_below_the_smallest_that_failed():
    # Luck: one larger than those that failed may pass, and counts for nothing.
    sizes = {16: 100.0, 24: 100.0, 48: 100.0, 96: 1e5}
    evidence = weighed(*(run for size, critical in sizes.items() for run in runs(size, critical)))
    assert slowness(24, 100.0) - 1 < 0.2 < slowness(48, 100.0) - 1
    assert (evidence.passed.batch_size, evidence.failed.batch_size) == (24, 48)
    assert evidence.constant == 24


def test_noise_over_seeds_widens_the_interval_and_can_refuse():
    loud = [replace(run, loss=run.loss + 0.2 * (run.repeat - 1)) for run in runs(24, 100.0)]
    quiet, noisy = weighed(*runs(24, 100.0)), weighed(*loud)
    (a,), (b,) = quiet.checked, noisy.checked
    assert a.overhead == pytest.approx(b.overhead)
    assert b.high - b.low > 10 * (a.high - a.low)
    assert (quiet.constant, noisy.constant) == (24, 8)


def search(critical, candidates=3, results_of=results, **header):
    """Sizes that are trained from scratch where the trade-off has this critical size."""
    head = make_header(POINTS, candidates=candidates, **header)
    chooser, events, sizes = Chooser(head), list(results_of(*base_runs())), []
    for number in range(candidates):
        job = chooser(("candidate", number, 0), Results(events))
        if job is not None:
            sizes.append(job["batch_size"])
            events += runs(job["batch_size"], critical)
    return sizes, Evidence(head, Results(events))


@pytest.mark.parametrize("critical", [12.0, 30.0, 60.0, 100.0, 200.0, 400.0])
def test_candidates_close_in_on_the_tolerance(critical):
    sizes, evidence = search(critical)
    assert len(set(sizes)) == len(sizes) <= 3
    truth = within_tolerance(critical)
    assert evidence.constant <= truth
    # Three candidates reach within a factor of two, one of them aimed below the tolerance.
    assert evidence.constant * 2 >= min(truth, 160)


LOST = dict.fromkeys((64, 128, 256, 512), 1e9)


@pytest.mark.parametrize("diverged", [(LOST, {}), ({}, LOST), (LOST, LOST)])
def test_nothing_is_advised_above_what_diverged_at_any_point(diverged):
    def diverging(*extra):
        return results(*extra, critical=(1e5, 1e5), diverged=diverged)

    sizes, evidence = search(1e5, results_of=diverging)
    assert max(sizes) == 32
    assert (evidence.diverged, evidence.ceiling, evidence.constant) == (64, 32, 32)
    assert [evidence.safe(evidence.criticals[i]) for i in (0, 1)] == [32, 32]
    going_on = summarize(evidence.header, evidence.results, "complete").going_on
    assert (going_on.batch_size, going_on.diverged) == (32, 64 if diverged == (LOST, {}) else None)


def test_a_schedule_stays_below_what_diverged_at_an_earlier_point():
    points = (1024, 4096, 16384)
    events = [point(i, samples) for i, samples in enumerate(points)]
    for i in range(3):
        events += branches(1e5, sigma=0.0005, point=i, diverged={} if i else LOST)
    events += [scratch(8, seed, points[-1]) for seed in (1, 2)]
    events += [scratch(12, seed, points[-1]) for seed in range(3)]
    evidence = Evidence(make_header(points), Results(events))
    assert evidence.criticals[1].safe == 512
    assert evidence.schedule == ((0, 8), (1024, 32))


def test_nothing_is_advised_above_what_diverged_at_a_point_that_tells_nothing():
    lost = dict.fromkeys((128, 256, 512), math.inf)
    events = [point(i, samples) for i, samples in enumerate(POINTS)]
    events += branches(1e5, sigma=0.3, point=0, diverged=lost)
    events += branches(1e5, sigma=0.0005, point=1)
    evidence = Evidence(make_header(POINTS), Results(events))
    assert [c.resolved for c in evidence.criticals.values()] == [False, True]
    assert (evidence.ceiling, evidence.predicted) == (64, 64)
    assert evidence.safe(evidence.criticals[1]) == 64


@pytest.mark.parametrize("seeds", [1, 3])
def test_nothing_is_advised_above_what_diverged_from_scratch(seeds):
    """One seed that diverged is enough, whether the others were trained or not."""
    evidence = weighed(*runs(12, 1e5, seeds, noise=math.inf))
    assert [run.diverged for run in evidence.checked] == [True] * (seeds == 3)
    assert (evidence.constant, evidence.ceiling, evidence.schedule) == (8, 8, ())


def test_a_larger_candidate_that_failed_leaves_the_smaller_ones_unknown():
    evidence = weighed(*runs(32, 20.0))
    assert evidence.failed.low > 0.2
    assert (evidence.constant, evidence.known) == (8, False)
    assert weighed(*runs(32, 20.0), *runs(12, 5.0)).known


def test_a_run_whose_loss_falls_no_more_has_no_batch_size():
    """Its branches tell what to do next all the same."""
    header = make_header(POINTS, task={"train_size": 100})
    events = evidence_of(lambda s: law(400)).results
    found = summarize(header, events, "complete")
    assert (found.recommendation.batch_size, found.recommendation.why) == (None, "runs")
    assert found.going_on.from_samples == 4096


def test_a_schedule_is_never_above_what_was_trained_from_there_on():
    good = [*base_runs(), *runs(12, 1e5)]
    rising = Evidence(make_header(POINTS), results(*good))
    safe = [rising.criticals[i].safe for i in (0, 1)]
    assert safe[0] < safe[1]
    stages = rising.schedule
    assert stages[0][0] == 0
    for (_, a), (start, b) in pairwise(stages):
        assert b % a == 0
        assert a < b <= min(safe[i] for i in (0, 1) if POINTS[i] >= start)
    falling = Evidence(make_header(POINTS), results(*good, critical=(400.0, 120.0)))
    assert all(size <= falling.criticals[1].safe for _, size in falling.schedule)


@pytest.mark.parametrize(
    ("constant", "critical", "sizes"),
    [(64, 20.0, []), (64, 1e5, [64, 512]), (24, 120.0, [16, 32])],
)
def test_a_schedule_takes_fewer_steps_than_the_constant_batch(constant, critical, sizes):
    """It begins with the constant batch or below, and has to make up for that."""
    events = [*base_runs(), *runs(constant, 1e5)]
    evidence = Evidence(make_header(POINTS), results(*events, critical=(critical, 1e5)))
    assert evidence.constant == constant
    assert [size for _, size in evidence.schedule] == sizes
    if sizes:
        assert evidence.steps(evidence.schedule) < evidence.length / constant


@pytest.mark.parametrize(
    ("losses", "end", "candidate"),
    [
        (lambda s: 2.0 + 0.01 * math.sin(s), None, None),
        # Where no branch tells, runs begin next to the smallest batch.
        (lambda s: 20 - 2 * math.log(s), 1, 12),
    ],
)
def test_where_no_branch_tells_nothing_is_recommended(losses, end, candidate):
    evidence = evidence_of(losses, sigma=0.2)
    assert not any(critical.resolved for critical in evidence.criticals.values())
    assert (evidence.end, evidence.length) == (end, 0 if end is None else POINTS[end])
    assert (evidence.predicted, evidence.constant, evidence.schedule) == (None, None, ())
    assert evidence.next_candidate() == candidate
    job = Chooser(evidence.header)(("baseline", 1), evidence.results)
    assert (job is None) == (end is None)


def test_a_run_whose_loss_falls_by_a_rounding_does_not_fall():
    events = [point(i, n, losses=lambda s: 2.0 - 1e-15 * s) for i, n in enumerate(POINTS)]
    events += [relabelled(b, lambda s: 2.0) for i in (0, 1) for b in branches(1e5, point=i)]
    evidence = Evidence(make_header(POINTS), Results(events))
    assert (evidence.end, evidence.constant, evidence.measured) == (None, None, [])


@pytest.mark.parametrize(("slower", "known"), [((1.0, 1.2, 1.7), False), ((1.5, 1.51, 1.52), True)])
def test_a_batch_that_may_be_tolerable_is_not_known(slower, known):
    tried = [scratch(12, seed, POINTS[-1], slower=s) for seed, s in enumerate(slower)]
    evidence = weighed(*tried)
    (run,) = evidence.checked
    assert not run.within
    assert (run.low > 0.2) == known
    assert (evidence.constant, evidence.known) == (8, known)


@pytest.mark.parametrize(
    ("points", "rule", "expected"),
    [
        ((1024, 4096), "sqrt", 1024),
        ((640,), "linear", 160),
        ((1048, 4104), "linear", 1024),
        ((1024, 4096), "constant", 0),
    ],
)
def test_the_warm_up_is_a_quarter_of_the_run_at_most(points, rule, expected):
    made = [e for i, n in enumerate(points) for e in (point(i, n), *branches(1e5, point=i))]
    header = make_header(points, task={"lr_rule": rule})
    evidence = Evidence(header, Results(made))
    assert (evidence.length, evidence.warmup_samples) == (points[-1], expected)
    if len(points) > 1:
        job = Chooser(header)(("candidate", 0, 0), evidence.results)
        assert job["warmup_samples"] == expected
