"""Which trials come next: a pure function of the results."""

import math
import random

import pytest

from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import OTHER_RATES
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.folder import Results, dumps
from steadygrad.studies.ladder import SEEDS, Ladder
from steadygrad.studies.paired import looked
from steadygrad.studies.schema import Training
from tests.unit.studies.advise.events import (
    ARM,
    LENGTH,
    SIZES,
    law,
    make_header,
    seeds,
    slowness,
    studied,
    training,
    within_tolerance,
)

HEADER = make_header()


def keys(results, header=HEADER):
    """The trials that come next; of trainings: kind, arm, length, octaves and seed."""
    found = Results(results)
    return [trial.key for trial in trials_of(header, found) if trial.key not in found]


def first_size(results, header=HEADER):
    """Size and seed of the first training of a larger batch at its own rate."""
    found = (key for key in keys(results, header) if key[0] == "training")
    key = next(key for key in found if key[1] and not key[3])
    return SIZES[key[1]], key[4]


def sizes_of(results):
    """Trainings at the rule's rates."""
    return [run for run in results if isinstance(run, Training) and not run.step]


def assert_order_is_no_matter(header, found):
    """Results in any order, and a kill at any moment, change nothing."""
    draw = random.Random(0)
    for count in range(0, len(found), 4):
        assert keys(draw.sample(found[:count], count), header)[0] == found[count].key


@pytest.mark.parametrize(
    ("critical", "visited", "decay"),
    [
        (1e5, [8, 32, 128, 512], "none"),
        (400.0, [8, 32, 128, 64, 96], "linear"),
        (100.0, [8, 32, 16, 24], "none"),
        (3.0, [8, 32, 16, 12], "none"),
    ],
)
def test_sizes_are_visited_by_strides_of_four_and_then_between(critical, visited, decay):
    header = make_header(task={"lr_decay": decay}, seeds=6)
    found = studied(header, critical, sigma=2e-4, at_once=1, lengths=1e9)
    runs = sizes_of(found)
    assert list(dict.fromkeys(SIZES[run.arm] for run in runs)) == visited
    # All is decided: the advice is the largest size that is tolerable.
    evidence = BatchSizes(header, Results(found))
    good = [size for size in SIZES if size <= max(8, within_tolerance(critical))]
    assert SIZES[evidence.advised] == good[-1]
    # Nothing is left, and no size has more seeds than it may.
    assert keys(found, header) == []
    assert max(run.seed for run in runs) == 5
    assert all(looked(len(pairs)) == len(pairs) for pairs in evidence.pairs.values())
    assert_order_is_no_matter(header, found)


@pytest.mark.parametrize(
    ("slower", "size", "seed"),
    [
        ({12: 1.15, 24: 1.18}, 12, 4),
        # None seems to fit: the smallest of them is what bounds the advice.
        ({12: 1.22, 24: 1.25}, 12, 4),
        # The one below was never tried.
        ({16: 1.18, 24: 1.19}, 12, 0),
        ({12: 1.18, 24: 1.22}, 12, 4),
    ],
)
def test_the_smallest_size_that_would_raise_the_advice_comes_first(slower, size, seed):
    # 32 is ruled out. The smallest batch's trainings come with others'.
    runs = [*seeds(8, 6), *seeds(32, slower=1.5)]
    runs += [run for each, slow in slower.items() for run in seeds(each, slower=slow, spread=0.015)]
    assert first_size(runs) == (size, seed)


@pytest.mark.parametrize(("pairs", "size"), [({16: 5, 24: 4}, 24), ({16: 4, 24: 5}, 16)])
def test_the_border_becomes_more_certain_where_it_is_least_so(pairs, size):
    runs = seeds(8, 5)
    runs += seeds(16, pairs[16], slower=1.1, spread=1e-5)
    runs += seeds(24, pairs[24], slower=1.5, spread=1e-5)
    assert first_size(runs) == (size, 4)


def test_results_between_two_looks_decide_nothing():
    runs = [r for b in (8, 32, 16) for r in seeds(b, 8, slower=slowness(b, 100.0))]
    # Ten pairs would be a look; one is missing, or its partner is.
    extra = [training(24, 0, slower=3.0), training(24, 1, slower=3.0)]
    extra += [training(16, 9, slower=3.0), training(32, 8), training(12, 40)]
    told = {run.key for run in extra}
    assert keys(runs + extra) == [key for key in keys(runs) if key not in told]


def test_rates_get_their_share():
    # Sizes that cannot be told apart soon, so that both searches go on.
    found = studied(
        make_header(seeds=64), 60.0, lengths=60, at_once=1, sigma=0.03, rates={-1.0: 1.05}
    )
    done = {True: 0, False: 0}
    for count, run in enumerate(r for r in found if isinstance(r, Training)):
        if count > 12:
            # One trial ahead or behind.
            rest = sum(done.values()) - 9 * LENGTH
            assert done[True] == pytest.approx(OTHER_RATES * rest, abs=2 * LENGTH)
        done[bool(run.step)] += run.samples


def test_the_noise_scale_is_measured_once_sizes_are_compared():
    runs = [*seeds(8), *seeds(32, slower=1.5)]
    assert keys(runs)[0] == ("noise", LENGTH)
    assert keys(seeds(8))[0][0] == "training"
    # Samples that depend on one another have none.
    assert keys(runs, make_header(task={"dependent": True}))[0][0] == "training"


@pytest.mark.parametrize("decay", ["none", "linear"])
def test_batch_sizes_are_compared_at_their_own_best_learning_rates(decay):
    """At the rule's rates, 32 would need 2.9 times the samples of 8."""
    header = make_header(settings={"tune": True}, task={"lr_decay": decay}, seeds=6)
    best = {8: -0.5} | dict.fromkeys((12, 16, 24, 32, 48, 64, 128), 2.25)
    made = studied(header, 80.0, sigma=2e-4, lengths=1e9, at_once=1, best=best)
    found = [result for result in made if isinstance(result, Training)]
    started = [(0, -1.0, 64), (0, -1.0, 65), (0, 0.0, 64), (0, 0.0, 65), (0, 1.0, 64)]
    assert [(r.arm, r.step, r.seed) for r in found[:5]] == started
    evidence = BatchSizes(header, Results(found))
    for arm in (0, *evidence.pairs):
        # A quarter of an octave is as fine as they are found.
        assert evidence.tuned(arm) == pytest.approx(best[SIZES[arm]], abs=0.25)
    assert evidence.advised == ARM[24]
    # The seeds of the search are no pairs' seeds, and each pair has the best rates.
    runs = evidence.pairs[ARM[24]].runs
    assert {run.seed for run in runs} == set(range(6))
    assert {run.step for run in runs} == {evidence.tuned(ARM[24])}
    # Three octaves, and as many more as have a lower loss than those before.
    assert [*Ladder(evidence, ARM[24], LENGTH).losses] == [-1, 0, 1, 2, 3]
    assert keys(made, header) == []
    assert_order_is_no_matter(header, made)
    # The rates that were found are the answers.
    summary = summarize(header, Results(found), "complete")
    assert summary.lr == pytest.approx(0.001 * 2 ** evidence.tuned(0))
    expected = 0.001 * 3**0.5 * 2 ** evidence.tuned(ARM[24])
    assert summary.recommendation.lr == pytest.approx(expected)
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
        scaled = {"step": float(step), "losses": lambda s, loss=loss: loss * law(s)}
        runs += [training(8, seed, **scaled) for seed in SEEDS]
    runs += [training(8, 0, step=1.0, losses=lambda s: math.inf)] * lost
    assert BatchSizes(header, Results(runs)).tuned(0) == tuned


@pytest.mark.parametrize(
    ("settings", "length", "loss"),
    [({"samples": LENGTH}, LENGTH, 0.0), ({"tune": True}, LENGTH, 2.0), ({}, 512, 2.0)],
)
def test_no_batch_size_is_compared_where_the_loss_does_not_move(settings, length, loss):
    """A length of the user's own stays; else shorter ones would be tried, until there is none."""
    header = make_header(length, settings=settings, seeds=6)
    found = studied(header, losses=lambda s: loss, sigma=0.0, lengths=30)
    evidence = BatchSizes(header, Results(found))
    assert (evidence.length, evidence.pairs, evidence.advised) == (0, {}, None)
    assert {(run.arm, run.samples) for run in sizes_of(found)} == {(0, length)}


DONE = [*seeds(8), *seeds(24, slower=1.1, spread=1e-5), *seeds(32, slower=1.5, spread=1e-5)]


def test_other_rates_are_tried_at_the_smallest_batch_and_at_the_advised_one():
    # By then the advice is there.
    done, tried = [*DONE], []
    while new := [key for key in keys(done) if key[0] == "training" and key[3]]:
        slower = {-1.0: 1.5, 1.0: 0.7}
        for _, arm, _, step, seed in new:
            noise = 1e-6 * seed
            done.append(training(SIZES[arm], seed, step=step, slower=slower[step], noise=noise))
        tried += new
    # Sure or never as soon as one can be.
    assert sorted((SIZES[key[1]], key[4], key[3]) for key in tried) == [
        (size, seed, step) for size in (8, 24) for seed in range(4) for step in (-1.0, 1.0)
    ]


def test_a_rate_that_stays_uncertain_beside_a_better_one_is_left():
    done = [*DONE, *seeds(24, step=1.0, slower=1.1, spread=0.05)]
    done += [run for step in (-1.0, 1.0) for run in seeds(8, step=step, slower=1.5, spread=1e-5)]
    better, worse = (seeds(24, step=-1.0, slower=slower, spread=1e-5) for slower in (0.8, 1.5))
    assert [key for key in keys([*done, *better]) if key[0] == "training" and key[3]] == []
    # Without it there is a next look, once the search for the size has so many pairs.
    found, following = [*done, *worse], ("training", ARM[24], LENGTH, 1.0, 4)
    assert following not in keys(found)
    assert following in keys([*found, training(8, 4), training(24, 4, slower=1.1)])


@pytest.mark.parametrize("decay", ["none", "linear"])
@pytest.mark.parametrize("critical", [20.0, 45.0, 100.0])
def test_any_number_of_workers_comes_to_the_same_end(critical, decay):
    """Trainings that run ahead change nothing, in studies that are hard to decide."""
    header = make_header(seeds=12, task={"lr_decay": decay})
    ends = set()
    for at_once in (1, 2, 5, 16):
        made = studied(header, critical, at_once=at_once, sigma=0.02, lengths=1e9)
        ends.add(dumps(summarize(header, Results(made), "complete").to_dict()))
    assert len(ends) == 1


def test_a_size_whose_seeds_are_used_up_is_no_end():
    """Between one that fits and the smallest, one is bad: what is above it is still open."""
    header = make_header(seeds=6)
    runs = [*seeds(8, 6), *seeds(12, 6, slower=1.25, spread=0.05), *seeds(16, 4, spread=0.05)]
    runs += seeds(32, 4, slower=1.02, spread=0.05)
    assert first_size(runs, header)[0] in (16, 32)


def test_a_ladder_goes_down_where_all_diverge_and_has_an_end():
    header = make_header(settings={"tune": True})

    def ladder(stable):
        tried = {}
        while True:
            evidence = BatchSizes(header, Results(tried.values()))
            found = Ladder(evidence, 0, LENGTH)
            new = [*found.missing]
            if not new:
                return found
            for step, seed in new:
                loss = 2.0 - 0.1 * step if step <= stable else math.inf
                one = training(8, seed, step=float(step), losses=lambda s, loss=loss: loss)
                tried[step, seed] = one

    assert ladder(stable=-4).best == -4
    lost = ladder(stable=-9)
    assert (lost.best, lost.tuned) == (-6, -6.0)
