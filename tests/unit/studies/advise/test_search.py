"""Which trials come next: a pure function of the results."""

import math
import random

import pytest

from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.plan import BRANCHES, OTHER_RATES, PAIRS, lengths_of
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
    slowness,
    studied,
    within_tolerance,
)

HEADER = make_header()
# Whole trainings take most of the time.
ONE_POINT = {"points": (LENGTH,), "repeats": 2, "seeds": 6}


def keys(header, results):
    return [trial.key for trial in trials_of(header, Results(results))]


def sizes_of(results):
    """Trainings of whole batch sizes at their own rates."""
    return [r for r in results if isinstance(r, Scratch) and r.rate == 1 and "-" not in r.course]


@pytest.mark.parametrize(
    ("critical", "visited"),
    [
        (1e5, ["8", "32", "128", "512"]),
        (400.0, ["8", "32", "128", "64", "96"]),
        (100.0, ["8", "32", "16", "24"]),
        (28.0, ["8", "32", "16", "12"]),
        (3.0, ["8", "32", "16", "12"]),
    ],
)
@pytest.mark.parametrize("decay", ["none", "linear"])
def test_sizes_are_visited_by_strides_of_four_and_then_between(critical, visited, decay):
    header = make_header(task={"lr_decay": decay}, **ONE_POINT)
    found = studied(header, critical, sigma=2e-4, at_once=1, lengths=1e9)
    order = list(dict.fromkeys(run.course for run in sizes_of(found)))
    assert order == visited
    # All is decided: the advice is the largest size that is tolerable.
    evidence = Evidence(header, Results(found))
    good = [size for size in evidence.rungs if size <= max(8, within_tolerance(critical))]
    assert evidence.constant == good[-1]
    # Nothing is left, and no size has more seeds than it may.
    assert trials_of(header, Results(found)) == []
    assert max(run.repeat for run in sizes_of(found)) == 5
    assert {len(pairs) for pairs in evidence.sizes.values()} <= {*LOOKS}


def undecided(slower, spread):
    """Three pairs of each size; 32 is ruled out, and the branches are done."""
    runs = [scratch(8, seed) for seed in range(3)]
    for size, slow in slower.items():
        runs += [scratch(size, i, slower=slow, noise=spread * (i - 1)) for i in range(3)]
    runs += [scratch(32, i, slower=1.5) for i in range(3)]
    return [*measured(HEADER), *runs]


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
    found = undecided(slower, 0.015)
    # The smallest batch's trainings come with it.
    found += [scratch(8, i) for i in range(3, 6)]
    course = next(k for k in keys(HEADER, found) if k[0] == "scratch" and k[3] == 1)
    assert course == ("scratch", str(size), seed, 1.0, LENGTH)


@pytest.mark.parametrize("critical", [30.0, 100.0, 400.0])
def test_results_in_any_order_and_a_kill_at_any_moment_change_nothing(critical):
    found = studied(HEADER, critical, sigma=0.003, lengths=50, at_once=1)
    draw = random.Random(0)
    for count in range(0, len(found), 3):
        assert keys(HEADER, draw.sample(found[:count], count))[0] == found[count].key


@pytest.mark.parametrize("critical", [30.0, 100.0, 400.0])
def test_workers_visit_and_decide_the_same_sizes(critical):
    header = make_header(**ONE_POINT)
    one, many = (
        studied(header, critical, sigma=0.003, lengths=1e9, at_once=count) for count in (1, 8)
    )
    assert {run.key for run in sizes_of(one)} == {run.key for run in sizes_of(many)}


def test_results_between_two_looks_decide_nothing():
    found = measured(HEADER)
    runs = [scratch(b, i, slower=slowness(b, 100.0)) for b in (8, 32, 16) for i in range(3)]
    plain = keys(HEADER, found + runs)
    # Four pairs would be a look; one is missing, or its partner is.
    extra = [scratch(24, 0, slower=3.0), scratch(24, 1, slower=3.0), scratch(16, 4, slower=3.0)]
    extra += [scratch(32, 3), scratch(12, 40)]
    told = {run.key for run in extra}
    assert keys(HEADER, found + runs + extra) == [key for key in plain if key not in told]


def samples(results, kind):
    if kind == "rates":
        return sum(r.samples for r in results if isinstance(r, Scratch) and r.rate != 1)
    branches = sum(r.samples for r in results if isinstance(r, Branch | Noise))
    return branches + max((r.samples for r in results if isinstance(r, Point)), default=0)


def test_branches_and_rates_get_their_shares():
    # Sizes that cannot be told apart soon, so that all three searches go on.
    spread = {"sigma": 0.03, "rates": {0.5: 1.05, 2.0: 1.05}}
    fields = {"branch_samples": (2048,) * 3, "samples": LENGTH, "seeds": 64}
    header = make_header((1024, 4096, 16384), **fields)
    found = studied(header, 60.0, lengths=60, at_once=1, **spread)
    assert {type(r) for r in found[:9]} == {Scratch}
    assert {r.rate for r in found[:9]} == {1.0}
    for count in range(9, len(found)):
        rates, branches = (samples(found[:count], kind) for kind in ("rates", "branches"))
        sizes = sum(r.samples for r in found[:count] if isinstance(r, Scratch) and r.rate == 1)
        rest = rates + branches + sizes - 9 * LENGTH
        # One trial ahead or behind.
        assert rates == pytest.approx(OTHER_RATES * rest, abs=LENGTH)
        assert branches == pytest.approx(BRANCHES * rest, abs=LENGTH)


def test_a_look_of_a_decaying_rate_trains_each_length():
    header = make_header(task={"lr_decay": "linear"})
    expected = [("8", seed, n) for seed in range(3) for n in lengths_of(LENGTH, 0.2)]
    jobs = [trial.job(Results()) for trial in trials_of(header, Results())]
    runs = [(j["course"], j["repeat"], j["samples"]) for j in jobs if j["kind"] == "scratch"]
    assert runs == expected
    plain = [t.job(Results()) for t in trials_of(HEADER, Results())]
    runs = [(j["course"], j["samples"], j["warmup_samples"]) for j in plain[:3]]
    assert runs == [("8", LENGTH, 0)] * 3


@pytest.mark.parametrize("decay", ["none", "linear"])
def test_batch_sizes_are_compared_at_their_own_best_learning_rates(decay):
    """At the rule's rates, 32 would need 2.9 times the samples of 8."""
    header = make_header(settings={"tune": True}, task={"lr_decay": decay}, **ONE_POINT)
    best = {8: -0.5} | dict.fromkeys((12, 16, 24, 32, 48, 64, 128), 2.25)
    found = studied(header, 80.0, sigma=2e-4, lengths=1e9, at_once=1, best=best)
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
    assert trials_of(header, Results(found)) == []
    draw = random.Random(0)
    for count in range(0, len(found), 5):
        assert keys(header, draw.sample(found[:count], count))[0] == found[count].key


def test_a_best_rate_at_the_end_of_all_octaves_is_taken_and_one_that_diverges_is_not():
    header = make_header(settings={"tune": True})
    seeds, losses = range(64, 67), {-1: 2.0, 0: 1.9, 1: 1.8, 2: math.inf}
    runs = [
        scratch(8, i, rate=2.0**k, losses=lambda s, v=v: v * law(s))
        for i in seeds
        for k, v in losses.items()
    ]
    known = [scratch(8, i) for i in range(3)]
    assert Evidence(header, Results([*known, *runs])).tuned("8") == 2.0
    # One of its pairs diverged.
    lost = scratch(8, 0, rate=2.0, losses=lambda s: math.inf)
    assert Evidence(header, Results([*known, *runs, lost])).tuned("8") == 2.0**0.75
    falling = [
        scratch(8, i, rate=2.0**k, losses=lambda s, k=k: (7 - k) * law(s))
        for i in seeds
        for k in range(-1, 7)
    ]
    assert Evidence(header, Results([*known, *falling])).tuned("8") == 2.0**6
    assert Evidence(header, Results([*known, *falling[:-1]])).tuned("8") is None


def test_where_rates_are_searched_there_are_no_branches_and_no_runs_at_the_tasks_own_rate():
    found = studied(make_header(settings={"tune": True}, **ONE_POINT), lengths=40, at_once=1)
    assert {type(result) for result in found} == {Scratch}
    assert [(r.course, r.rate, r.repeat) for r in found[:4]] == [
        *(("8", 0.5, seed) for seed in (64, 65, 66)),
        ("8", 1.0, 64),
    ]


@pytest.mark.parametrize("settings", [{"samples": LENGTH}, {"tune": True}])
@pytest.mark.parametrize("loss", [0.0, 2.0])
def test_no_batch_size_is_compared_where_the_loss_does_not_move(settings, loss):
    header = make_header(settings=settings, **ONE_POINT)
    found = studied(header, losses=lambda s: loss, sigma=0.0, lengths=30)
    evidence = Evidence(header, Results(found))
    assert (evidence.length, evidence.sizes, evidence.constant) == (0, {}, None)
    # It is not shorter first, as without a length of the user's own.
    assert {run.samples for run in found if isinstance(run, Scratch)} == {LENGTH}


def test_of_equal_losses_the_rules_rate_counts():
    header = make_header(settings={"tune": True})
    runs = [scratch(8, i, rate=2.0**k) for i in range(64, 67) for k in (-1, 0, 1)]
    assert Evidence(header, Results(runs)).tuned("8") == 1.0


def test_sizes_below_those_whose_seeds_are_used_up_are_tried():
    header = make_header(**ONE_POINT | {"seeds": 3})
    found = studied(header, 400.0, sigma=0.05, lengths=1e9, at_once=1)
    assert {"12", "16"} <= {run.course for run in sizes_of(found)}


def test_jobs_of_a_larger_batch_warm_up():
    runs = [scratch(8, seed) for seed in range(3)]
    jobs = [t.job(Results(runs)) for t in trials_of(HEADER, Results(runs))]
    assert [(j["course"], j["repeat"], j["rate"], j["warmup_samples"]) for j in jobs[:4]] == [
        *(("32", seed, 1.0, 256) for seed in range(3)),
        ("8", 0, 0.5, 0),
    ]


@pytest.mark.parametrize(
    ("rates", "pairs"),
    [
        # Sure or never at the first look.
        ({0.5: 1.5, 2.0: 1.5}, {(8, 0.5): 3, (8, 2.0): 3, (24, 0.5): 3, (24, 2.0): 3}),
        ({0.5: 1.5, 2.0: 0.7}, {(8, 0.5): 3, (8, 2.0): 3, (24, 0.5): 3, (24, 2.0): 3}),
    ],
)
def test_other_rates_are_tried_at_the_smallest_batch_and_at_the_advised_one(rates, pairs):
    # By then the advice is there.
    runs = [scratch(b, i, slower=slowness(b, 100.0)) for b in (8, 24, 32) for i in range(3)]
    done = [*measured(HEADER), *runs]
    while True:
        new = [k for k in keys(HEADER, done) if k[0] == "scratch" and k[3] != 1]
        if not new:
            break
        done += [scratch(int(k[1]), k[2], rate=k[3], slower=rates[k[3]]) for k in new]
    tried = [(r.batch_size, r.rate) for r in done if isinstance(r, Scratch) and r.rate != 1]
    assert {key: tried.count(key) for key in tried} == pairs


def test_the_other_rate_has_a_look_although_the_first_is_surely_better():
    runs = [scratch(8, i) for i in range(3)]
    runs += [scratch(8, i, rate=0.5, slower=0.5) for i in range(3)]
    tried = {key[3] for key in keys(HEADER, runs) if key[:2] == ("scratch", "8") and key[3] != 1}
    assert tried == {2.0}
    runs += [scratch(8, i, rate=2.0, slower=2.0) for i in range(3)]
    assert not [key for key in keys(HEADER, runs) if key[:2] == ("scratch", "8") and key[3] != 1]


def test_rates_that_stay_uncertain_stop_after_the_pairs_reckoned_with():
    header = make_header(**ONE_POINT | {"seeds": 16})
    found = studied(header, 100.0, lengths=1e9, rates={0.5: 1.05, 2.0: 1.05}, sigma=0.05)
    tried = [r.repeat for r in found if isinstance(r, Scratch) and r.rate != 1]
    assert max(tried) == PAIRS - 1


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
    other = make_header(runtime={"world_size": 64}, task={"dependent": True})
    found = studied(other)
    assert not [r for r in found if isinstance(r, Noise)]
    assert {r.batch_size for r in found if isinstance(r, Branch)} == {8 * 2**i for i in range(7)}
    # Where all sizes are tolerable, there is nothing between.
    found = studied(HEADER, at=(1e5,))
    assert {r.batch_size for r in found if isinstance(r, Branch)} == {8 * 2**i for i in range(7)}


def test_where_the_loss_does_not_fall_nothing_is_trained_from_the_initial_weights():
    flat = make_header((512,))
    found = studied(flat, losses=lambda s: 2.0, sigma=0.0, lengths=1e9)
    runs = [r for r in found if isinstance(r, Scratch)]
    assert [(r.course, r.samples) for r in runs] == [("8", 512)] * 3
    assert Evidence(flat, Results(found)).length == 0


def test_a_size_that_diverges_is_decided_at_once():
    header = make_header(**ONE_POINT)
    found = studied(header, 1e5, at_once=1, lengths=1e9, diverging=32)
    assert [r.course for r in sizes_of(found)][3:6] == ["32"] * 3
    evidence = Evidence(header, Results(found))
    assert (evidence.failed, evidence.constant) == (32, 24)
    assert evidence.sizes[32].overheads[0] == math.inf


@pytest.mark.parametrize(("pairs", "size"), [({16: 4, 24: 3}, 24), ({16: 3, 24: 4}, 16)])
def test_the_border_becomes_more_certain_where_it_is_least_so(pairs, size):
    runs = [scratch(8, i) for i in range(4)]
    for each, count in pairs.items():
        slower = 1.1 if each == 16 else 1.5
        runs += [scratch(each, i, slower=slower, noise=1e-5 * (i % 2)) for i in range(count)]
    wanted = next(k for k in keys(HEADER, [*measured(HEADER, (9.0,)), *runs]) if k[3] == 1)
    assert wanted == ("scratch", str(size), 3, 1.0, LENGTH)


def test_sizes_between_are_whole_shares_of_all_ranks():
    header = make_header(runtime={"world_size": 8}, **ONE_POINT)
    found = studied(header, 100.0, sigma=2e-4, at_once=1, lengths=1e9)
    assert list(dict.fromkeys(run.course for run in sizes_of(found))) == ["8", "32", "16", "24"]


@pytest.mark.parametrize(
    ("grown", "sigma", "seeds"), [(1e5, 1e-3, 3), (20.0, 1e-3, 3), (101.5, 0.02, PAIRS)]
)
def test_a_schedule_is_trained_until_it_is_decided_or_has_its_pairs(grown, sigma, seeds):
    """A growing batch that ends at 32 needs 0.219 more samples where 101.5 is critical."""
    runs = [scratch(8, i) for i in range(16)]
    runs += [scratch(b, i, slower=s) for b, s in ((12, 1.1), (16, 1.5)) for i in range(16)]
    header, done = make_header(), [*measured(HEADER), *runs]
    draw = random.Random(0)
    while True:
        new = [k for k in keys(header, done) if k[0] == "scratch" and "-" in k[1]]
        if not new:
            break
        slow = slowness(32, grown)
        done += [scratch(k[1], k[2], slower=slow, noise=draw.gauss(0, sigma)) for k in new]
    assert len([r for r in done if isinstance(r, Scratch) and "-" in r.course]) == seeds


def test_a_rate_that_stays_uncertain_beside_a_better_one_is_left():
    runs = [scratch(b, i, slower=s) for b, s in ((8, 1), (24, 1.1), (32, 1.5)) for i in range(3)]
    runs += [scratch(24, i, rate=2.0, slower=1.1, noise=0.05 * (i - 1)) for i in range(3)]
    runs += [scratch(24, i, rate=0.5, slower=0.8) for i in range(3)]
    runs += [scratch(8, i, rate=rate, slower=1.5) for rate in (0.5, 2.0) for i in range(3)]
    done = [*measured(HEADER), *runs]
    assert [k for k in keys(HEADER, done) if k[0] == "scratch" and k[3] != 1] == []
    # Without it, the next look takes the own rate's runs with it.
    less = [r for r in done if getattr(r, "rate", 1) != 0.5 or r.batch_size == 8]
    less += [scratch(24, i, rate=0.5, slower=1.5) for i in range(3)]
    found = [k for k in keys(HEADER, less) if k[0] == "scratch"]
    at = found.index(("scratch", "24", 3, 2.0, LENGTH))
    assert {("scratch", "8", 3, 1.0, LENGTH), ("scratch", "24", 3, 1.0, LENGTH)} <= {*found[:at]}
