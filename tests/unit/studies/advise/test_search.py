"""Which trials come next: a pure function of the results."""

import math
import random
from types import SimpleNamespace

import pytest

from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.search import trials_of
from steadygrad.studies.folder import Results, dumps
from steadygrad.studies.paired import SEEDS, Ladder, looked
from steadygrad.studies.schema import Training
from tests.unit.studies.advise.events import (
    ARM,
    LENGTH,
    SEARCHED,
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
    """Size and seed of the first training of a larger batch."""
    key = next(key for key in keys(results, header) if key[0] == "training" and key[1])
    return SIZES[key[1]], key[4]


def sizes_of(results):
    """Trainings in pairs, without those of a search."""
    return [run for run in results if isinstance(run, Training) and run.seed not in SEEDS]


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
    runs = [*SEARCHED, *seeds(8, 6), *seeds(32, slower=1.5)]
    runs += [run for each, slow in slower.items() for run in seeds(each, slower=slow, spread=0.015)]
    assert first_size(runs) == (size, seed)


@pytest.mark.parametrize(("pairs", "size"), [({16: 5, 24: 4}, 24), ({16: 4, 24: 5}, 16)])
def test_the_border_becomes_more_certain_where_it_is_least_so(pairs, size):
    runs = [*SEARCHED, *seeds(8, 5)]
    runs += seeds(16, pairs[16], slower=1.1, spread=1e-5)
    runs += seeds(24, pairs[24], slower=1.5, spread=1e-5)
    assert first_size(runs) == (size, 4)


def test_results_between_two_looks_decide_nothing():
    runs = [r for b in (8, 32, 16) for r in seeds(b, 8, slower=slowness(b, 100.0))] + SEARCHED
    # Ten pairs would be a look; one is missing, or its partner is.
    extra = [training(24, 0, slower=3.0), training(24, 1, slower=3.0)]
    extra += [training(16, 9, slower=3.0), training(32, 8), training(12, 40)]
    told = {run.key for run in extra}
    assert keys(runs + extra) == [key for key in keys(runs) if key not in told]


def test_the_noise_scale_is_measured_once_sizes_are_compared():
    runs = [*SEARCHED, *seeds(8), *seeds(32, slower=1.5)]
    assert keys(runs)[0] == ("noise", LENGTH)
    assert keys([*SEARCHED, *seeds(8)])[0][0] == "training"
    # Samples that depend on one another have none.
    assert keys(runs, make_header(task={"dependent": True}))[0][0] == "training"


@pytest.mark.parametrize("decay", ["none", "linear"])
def test_batch_sizes_are_compared_at_the_best_rate_of_the_smallest(decay):
    """The others' follow by the task's rule."""
    header = make_header(task={"lr_decay": decay}, seeds=6)
    best = dict.fromkeys(SIZES, 1.75)
    made = studied(header, 80.0, sigma=2e-4, lengths=1e9, at_once=1, best=best)
    found = [result for result in made if isinstance(result, Training)]
    started = [(0, -1.0, 64), (0, -1.0, 65), (0, 0.0, 64), (0, 0.0, 65), (0, 1.0, 64)]
    assert [(r.arm, r.step, r.seed) for r in found[:5]] == started
    evidence = BatchSizes(header, Results(found))
    # A quarter of an octave is as fine as rates are found; none of other sizes is searched.
    assert evidence.tuned == pytest.approx(1.75, abs=0.25)
    assert {run.arm for run in found if run.seed in SEEDS} == {0}
    assert evidence.advised == ARM[24]
    # The seeds of the search are no pairs' seeds, and each pair has the best rate.
    runs = evidence.pairs[ARM[24]].runs
    assert {run.seed for run in runs} == set(range(6))
    assert {run.step for run in runs} == {evidence.tuned}
    # Three octaves, and as many more as have a lower loss than those before.
    assert [*evidence.ladder.losses] == [-1, 0, 1, 2, 3]
    assert keys(made, header) == []
    assert_order_is_no_matter(header, made)
    # The rate that was found is the answer's.
    summary = summarize(header, Results(found), "complete")
    assert summary.lr == pytest.approx(0.001 * 2**evidence.tuned)
    assert summary.recommendation.lr == pytest.approx(0.001 * 3**0.5 * 2**evidence.tuned)


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
    runs = seeds(8)
    for step, loss in losses.items():
        scaled = {"step": float(step), "losses": lambda s, loss=loss: loss * law(s)}
        runs += [training(8, seed, **scaled) for seed in SEEDS]
    runs += [training(8, 0, step=1.0, losses=lambda s: math.inf)] * lost
    assert BatchSizes(HEADER, Results(runs)).tuned == tuned


@pytest.mark.parametrize("loss", [0.0, 2.0])
def test_no_batch_size_is_compared_where_the_loss_does_not_move(loss):
    header = make_header(seeds=6)
    found = studied(header, losses=lambda s: loss, sigma=0.0, lengths=30)
    evidence = BatchSizes(header, Results(found))
    assert (evidence.is_flat, evidence.pairs, evidence.advised) == (True, {}, None)
    assert keys(found, header) == []


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
    runs = [*SEARCHED, *seeds(8, 6), *seeds(12, 6, slower=1.25, spread=0.05)]
    runs += seeds(16, 4, spread=0.05) + seeds(32, 4, slower=1.02, spread=0.05)
    assert first_size(runs, header)[0] in (16, 32)


def test_a_ladder_goes_down_where_all_diverge_and_has_an_end():

    def ladder(stable):
        tried = {}
        while True:
            evidence = BatchSizes(HEADER, Results(tried.values()))
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


@pytest.mark.parametrize("end", [-6.0, 6.0])
def test_no_rate_is_more_than_six_octaves_away(end):
    below = SimpleNamespace(tuned=end)
    assert max(map(abs, BatchSizes(HEADER, Results(), below=below).ladder.losses)) == 6
