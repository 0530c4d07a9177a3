"""Which trials come next: a pure function of the results."""

import math
import random

import pytest

from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import BRANCHES, OTHER_RATES, PAIRS
from steadygrad.studies.advise.schema import Branch, Noise, Point, Scratch
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.folder import Results
from steadygrad.studies.sequential import LOOKS
from tests.unit.studies.advise.events import (
    LENGTH,
    law,
    make_header,
    measured,
    scratch,
    seeds,
    slowness,
    studied,
    within_tolerance,
)

HEADER = make_header()
# Whole trainings take most of the time.
ONE_POINT = {"points": (LENGTH,), "repeats": 2, "seeds": 6}


def keys(results, header=HEADER):
    """The trials that come next; of trainings: kind, course, seed, rate and length."""
    return [trial.key for trial in trials_of(header, Results(results))]


def trainings(results):
    return [key for key in keys(results) if key[0] == "scratch"]


def sizes_of(results):
    """Trainings of whole batch sizes at their own rates."""
    return [r for r in results if isinstance(r, Scratch) and r.rate == 1 and "-" not in r.course]


def assert_order_is_no_matter(header, found):
    """Results in any order, and a kill at any moment, change nothing."""
    draw = random.Random(0)
    for count in range(0, len(found), 4):
        assert keys(draw.sample(found[:count], count), header)[0] == found[count].key


@pytest.mark.parametrize(
    ("critical", "visited", "decay"),
    [
        (1e5, ["8", "32", "128", "512"], "none"),
        (400.0, ["8", "32", "128", "64", "96"], "linear"),
        (100.0, ["8", "32", "16", "24"], "none"),
        (3.0, ["8", "32", "16", "12"], "none"),
    ],
)
def test_sizes_are_visited_by_strides_of_four_and_then_between(critical, visited, decay):
    header = make_header(task={"lr_decay": decay}, **ONE_POINT)
    found = studied(header, critical, sigma=2e-4, at_once=1, lengths=1e9)
    assert list(dict.fromkeys(run.course for run in sizes_of(found))) == visited
    # All is decided: the advice is the largest size that is tolerable.
    evidence = Evidence(header, Results(found))
    good = [size for size in evidence.rungs if size <= max(8, within_tolerance(critical))]
    assert evidence.constant == good[-1]
    # Nothing is left, and no size has more seeds than it may.
    assert keys(found, header) == []
    assert max(run.repeat for run in sizes_of(found)) == 5
    assert {len(pairs) for pairs in evidence.sizes.values()} <= {*LOOKS}
    assert_order_is_no_matter(header, found)


@pytest.mark.parametrize(
    ("slower", "size", "seed"),
    [
        ({12: 1.15, 24: 1.18}, 12, 3),
        # None seems to fit: the smallest of them is what bounds the advice.
        ({12: 1.22, 24: 1.25}, 12, 3),
        # The one below was never tried.
        ({16: 1.18, 24: 1.19}, 12, 0),
        ({12: 1.18, 24: 1.22}, 12, 3),
    ],
)
def test_the_smallest_size_that_would_raise_the_advice_comes_first(slower, size, seed):
    # 32 is ruled out, and the branches are done. The smallest batch's trainings come with others'.
    runs = [*measured(HEADER), *seeds(8, 6), *seeds(32, slower=1.5)]
    runs += [run for each, slow in slower.items() for run in seeds(each, slower=slow, spread=0.015)]
    first = next(key for key in trainings(runs) if key[3] == 1)
    assert first == ("scratch", str(size), seed, 1.0, LENGTH)


@pytest.mark.parametrize(("pairs", "size"), [({16: 4, 24: 3}, 24), ({16: 3, 24: 4}, 16)])
def test_the_border_becomes_more_certain_where_it_is_least_so(pairs, size):
    runs = [*measured(HEADER, (9.0,)), *seeds(8, 4)]
    runs += seeds(16, pairs[16], slower=1.1, spread=1e-5)
    runs += seeds(24, pairs[24], slower=1.5, spread=1e-5)
    first = next(key for key in trainings(runs) if key[3] == 1)
    assert first == ("scratch", str(size), 3, 1.0, LENGTH)


def test_results_between_two_looks_decide_nothing():
    runs = measured(HEADER) + [r for b in (8, 32, 16) for r in seeds(b, slower=slowness(b, 100.0))]
    # Four pairs would be a look; one is missing, or its partner is.
    extra = [scratch(24, 0, slower=3.0), scratch(24, 1, slower=3.0), scratch(16, 4, slower=3.0)]
    extra += [scratch(32, 3), scratch(12, 40)]
    told = {run.key for run in extra}
    assert keys(runs + extra) == [key for key in keys(runs) if key not in told]


def test_branches_and_rates_get_their_shares():
    # Sizes that cannot be told apart soon, so that all three searches go on.
    spread = {"sigma": 0.03, "rates": {0.5: 1.05, 2.0: 1.05}}
    fields = {"branch_samples": (2048,) * 3, "samples": LENGTH, "seeds": 64}
    found = studied(
        make_header((1024, 4096, 16384), **fields), 60.0, lengths=60, at_once=1, **spread
    )
    done, passed = {"sizes": 0, "rates": 0, "branches": 0}, 0
    for count, result in enumerate(found):
        if count >= 9:
            rest = sum(done.values()) + passed - 9 * LENGTH
            # One trial ahead or behind.
            assert done["rates"] == pytest.approx(OTHER_RATES * rest, abs=LENGTH)
            assert done["branches"] + passed == pytest.approx(BRANCHES * rest, abs=LENGTH)
        if isinstance(result, Point):
            passed = result.samples  # of one trajectory
        elif isinstance(result, Scratch):
            assert count >= 9 or result.rate == 1
            done["sizes" if result.rate == 1 else "rates"] += result.samples
        else:
            assert count >= 9
            done["branches"] += result.samples


def test_a_larger_batch_warms_up():
    found = Results(seeds(8))
    jobs = [trial.job(found) for trial in trials_of(HEADER, found)][:4]
    told = [(j["course"], j["repeat"], j["rate"], j["warmup_samples"]) for j in jobs]
    assert told == [*(("32", seed, 1.0, 256) for seed in range(3)), ("8", 0, 0.5, 0)]


@pytest.mark.parametrize("decay", ["none", "linear"])
def test_batch_sizes_are_compared_at_their_own_best_learning_rates(decay):
    """At the rule's rates, 32 would need 2.9 times the samples of 8."""
    header = make_header(settings={"tune": True}, task={"lr_decay": decay}, **ONE_POINT)
    best = {8: -0.5} | dict.fromkeys((12, 16, 24, 32, 48, 64, 128), 2.25)
    found = studied(header, 80.0, sigma=2e-4, lengths=1e9, at_once=1, best=best)
    # There are no branches, and no runs at the task's own rate.
    assert {type(result) for result in found} == {Scratch}
    started = [("8", 0.5, 64), ("8", 0.5, 65), ("8", 0.5, 66), ("8", 1.0, 64)]
    assert [(r.course, r.rate, r.repeat) for r in found[:4]] == started
    evidence = Evidence(header, Results(found))
    for size in (8, *evidence.sizes):
        # A quarter of an octave is as fine as they are found.
        assert math.log2(evidence.tuned(str(size))) == pytest.approx(best[size], abs=0.25)
    assert evidence.constant == 24
    # The seeds of the search are no pairs' seeds, and each pair has the best rates.
    assert {run.repeat for run in evidence.sizes[24].runs} == set(range(6))
    assert {run.rate for run in evidence.sizes[24].runs} == {evidence.tuned("24")}
    # Three octaves, and as many more as have a lower loss than those before.
    assert [*evidence.ladder("24")] == [-1, 0, 1, 2, 3]
    assert keys(found, header) == []
    assert_order_is_no_matter(header, found)
    # The rates that were found are the answers.
    summary = summarize(header, Results(found), "complete")
    assert summary.lr == pytest.approx(0.001 * evidence.tuned("8"))
    assert summary.recommendation.lr == pytest.approx(0.001 * 3**0.5 * evidence.tuned("24"))
    assert summary.rates == ()


@pytest.mark.parametrize(
    ("losses", "lost", "tuned"),
    [
        ({-1: 2.0, 0: 1.9, 1: 1.8, 2: math.inf}, False, 1),
        # One of its pairs diverged.
        ({-1: 2.0, 0: 1.9, 1: 1.8, 2: math.inf}, True, 0.75),
        # The end of all octaves.
        ({k: 7.0 - k for k in range(-1, 7)}, False, 6),
        ({k: 7.0 - k for k in range(-1, 6)}, False, None),
        # Of equal losses the rule's rate counts.
        ({-1: 1.0, 0: 1.0, 1: 1.0}, False, 0),
    ],
)
def test_the_best_rate_of_a_ladder(losses, lost, tuned):
    header, runs = make_header(settings={"tune": True}), seeds(8)
    for step, loss in losses.items():
        scaled = {"rate": 2.0**step, "losses": lambda s, loss=loss: loss * law(s)}
        runs += [scratch(8, i, **scaled) for i in range(64, 67)]
        runs += [scratch(8, 0, rate=2.0, losses=lambda s: math.inf)] * lost
    found = Evidence(header, Results(runs)).tuned("8")
    assert found == (tuned if tuned is None else 2.0**tuned)


@pytest.mark.parametrize(
    ("settings", "length", "loss"),
    [({"samples": LENGTH}, LENGTH, 0.0), ({"tune": True}, LENGTH, 2.0), ({}, 512, 2.0)],
)
def test_no_batch_size_is_compared_where_the_loss_does_not_move(settings, length, loss):
    """A length of the user's own stays; else shorter ones would be tried, until there is none."""
    header = make_header((length,), settings=settings, repeats=2, seeds=6)
    found = studied(header, losses=lambda s: loss, sigma=0.0, lengths=30)
    evidence = Evidence(header, Results(found))
    assert (evidence.length, evidence.sizes, evidence.constant) == (0, {}, None)
    runs = {(run.course, run.samples) for run in found if isinstance(run, Scratch)}
    assert runs == {("8", length)}


def test_other_rates_are_tried_at_the_smallest_batch_and_at_the_advised_one():
    # By then the advice is there.
    done = [*measured(HEADER), *seeds(8), *seeds(24, slower=1.1), *seeds(32, slower=1.5)]
    tried = []
    while new := [key for key in trainings(done) if key[3] != 1]:
        slower = {0.5: 1.5, 2.0: 0.7}
        done += [scratch(int(k[1]), k[2], rate=k[3], slower=slower[k[3]]) for k in new]
        tried += new
    # Sure or never at the first look.
    assert sorted(key[1:4] for key in tried) == [
        (size, seed, rate) for size in ("24", "8") for seed in range(3) for rate in (0.5, 2.0)
    ]


def test_a_rate_that_stays_uncertain_beside_a_better_one_is_left():
    done = [*measured(HEADER), *seeds(8), *seeds(24, slower=1.1), *seeds(32, slower=1.5)]
    done += seeds(24, rate=2.0, slower=1.1, spread=0.05)
    done += [run for rate in (0.5, 2.0) for run in seeds(8, rate=rate, slower=1.5)]
    better, worse = (seeds(24, rate=0.5, slower=slower) for slower in (0.8, 1.5))
    assert [key for key in trainings([*done, *better]) if key[3] != 1] == []
    # Alone it decides nothing: the other rate has a look, too.
    assert {key[3] for key in trainings([*seeds(8), *seeds(8, rate=0.5, slower=0.5)])} == {1, 2.0}
    # Without it, the next look takes the own rate's runs with it.
    found = trainings([*done, *worse])
    at = found.index(("scratch", "24", 3, 2.0, LENGTH))
    assert {("scratch", "8", 3, 1.0, LENGTH), ("scratch", "24", 3, 1.0, LENGTH)} <= {*found[:at]}


def test_branches_come_point_by_point_and_the_middle_last():
    """89.6 is tolerable at the second point: 96 is between 64 and 128."""
    every = studied(make_header(seeds=3), at_once=1, lengths=1e9)
    found = [r for r in every if not isinstance(r, Scratch)]
    assert [r.key for r in found[:3]] == [("point", 0), ("noise", 0), ("branch", 0, 0, 8)]
    places = [r.point for r in found]
    assert places == sorted(places)
    assert [r.key for r in found[-3:]] == [("branch", 1, repeat, 96) for repeat in range(3)]
    assert [r.key for r in found[-6:-3]] == [("branch", 1, 2, size) for size in (128, 256, 512)]
    # 96 samples are no whole shares of 64 processes, and samples that depend have no noise scale.
    found = studied(make_header(runtime={"world_size": 64}, task={"dependent": True}))
    assert not [r for r in found if isinstance(r, Noise)]
    assert {r.batch_size for r in found if isinstance(r, Branch)} == {8 * 2**i for i in range(7)}


@pytest.mark.parametrize(
    ("grown", "sigma", "count"), [(1e5, 1e-3, 3), (20.0, 1e-3, 3), (101.5, 0.02, PAIRS)]
)
def test_a_schedule_is_trained_until_it_is_decided_or_has_its_pairs(grown, sigma, count):
    """A growing batch that ends at 32 needs 0.219 more samples where 101.5 is critical."""
    done = [*measured(HEADER), *seeds(8, 16)]
    done += [*seeds(12, 16, slower=1.1), *seeds(16, 16, slower=1.5)]
    draw, tried = random.Random(0), 0
    while new := [key for key in trainings(done) if "-" in key[1]]:
        slower = slowness(32, grown)
        done += [scratch(k[1], k[2], slower=slower, noise=draw.gauss(0, sigma)) for k in new]
        tried += len(new)
    assert tried == count
