"""What is concluded of each batch size, from results whose truth is known and from random ones."""

import json
import math
import random
import re
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from steadygrad.studies.advise import words
from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import lengths_of
from steadygrad.studies.advise.schema import Flat, Larger, Point, Scratch, Summary, Unfinished
from steadygrad.studies.folder import Results, dumps
from steadygrad.studies.sequential import LOOKS
from tests.unit.studies.advise.events import (
    LENGTH,
    branches,
    law,
    make_header,
    measured,
    point,
    scratch,
    seeds,
    studied,
)

POINTS = (1024, LENGTH)
HEADER = make_header(POINTS)


def found(summary, kind):
    """The finding of a kind; None if there is none."""
    return next((finding for finding in summary.findings if isinstance(finding, kind)), None)


def known(slower, *extra, header=HEADER, results=None):
    """Evidence of branches, and of three pairs of sizes that need so many times the samples."""
    runs = [*seeds(8), *(r for size, slow in slower.items() for r in seeds(size, slower=slow))]
    results = measured(header) if results is None else results
    return Evidence(header, Results([*results, *runs, *extra]))


def random_record(seed):
    """Any header, any results that a study may leave, and the summary."""
    draw = random.Random(seed)
    points = tuple(1024 * 4**i for i in range(draw.randint(1, 3)))
    task = {
        "lr_rule": draw.choice(["sqrt", "linear", "constant"]),
        "beta2": draw.choice([None, 0.95, 0.999]),
        "optimizer": draw.choice(["AdamW", "SGD"]),
        "weight_decay": draw.choice([None, 0.0, 0.1]),
        "tokens_per_sample": draw.choice([None, 64]),
        "train_size": draw.choice([1000, 100_000]),
        "lr_decay": "linear" if seed % 9 == 4 else "none",
        "dependent": draw.random() < 0.2,
    }
    settings = {"samples": draw.choice([0, points[-1]]), "tolerance": draw.choice([0.2, 0.5])}
    runtime = {"world_size": draw.choice([1, 4])}
    header = make_header(points, task=task, settings=settings, runtime=runtime)
    stop = draw.choice([400, 2000, 1e9, 1e9, 1e9])
    losses = (lambda s: 1 + s / 1e5) if seed % 25 == 3 else lambda s: law(min(s, stop))
    rates = {rate: 10 ** draw.uniform(-0.4, 0.4) for rate in (0.5, 2.0)}
    made = studied(
        header,
        10 ** draw.uniform(0.5, 4),
        lengths=draw.choice([2, 20, 60, 60]),
        grown=10 ** draw.uniform(1, 5),
        at=tuple(10 ** draw.uniform(0.5, 5) for _ in range(3)),
        # An optimizer that leaves its rate aside.
        rates={} if seed % 11 == 5 else rates,
        sigma=10 ** draw.uniform(-5, -1.5),
        diverging=draw.choice([math.inf, 16, 64, 256]),
        losses=losses,
    )
    # Some are not there, and some of larger batches diverge.
    made = [r for r in made if isinstance(r, Point) or draw.random() < 0.97]
    large = [getattr(r, "batch_size", 8) > 8 and draw.random() < 0.01 for r in made]
    made = [replace(r, loss=math.inf) if lost else r for r, lost in zip(made, large, strict=True)]
    results = Results(made)
    status = draw.choice(("complete", "interrupted", "budget", "failed"))
    return header, results, summarize(header, results, status)


@pytest.mark.few(2)
@pytest.mark.parametrize("first", range(0, 160, 20))
def test_no_finding_contradicts_a_number(first):
    for seed in range(first, first + 20):
        header, results, summary = random_record(seed)
        advised, tolerance = summary.recommendation, summary.tolerance
        evidence, rows = Evidence(header, results), {run.batch_size: run for run in summary.checked}
        assert summary.findings[0] is advised
        assert [*rows] == sorted(rows)
        for run in summary.checked:
            assert run.within == (run.overhead <= tolerance and run.high <= 1.25 * tolerance)
            assert run.beyond == (run.low > tolerance)
            assert run.low <= run.overhead <= run.high
            assert run.seeds in LOOKS
        # Nothing is advised that failed, that diverged, or that is above what did.
        if advised.batch_size not in (None, summary.batch_size):
            run = rows[advised.batch_size]
            assert run.within
            numbers = advised.overhead, advised.low, advised.high
            assert numbers == (run.overhead, run.low, run.high)
            assert advised.batch_size < min((s for s, r in rows.items() if r.beyond), default=1e9)
            assert not math.isinf(run.loss)
        if larger := found(summary, Larger):
            assert not larger.run.within
            assert larger.run.batch_size > (advised.batch_size or summary.batch_size)
        unfinished = summary.status in ("interrupted", "failed")
        assert (found(summary, Unfinished) is not None) == unfinished
        assert (advised.batch_size is None) == (advised.why != "")
        assert (advised.minutes is None) == (advised.why != "undecided")
        assert (advised.why == "flat") == (evidence.length == 0)
        compared = evidence.length == 0 or evidence.sizes
        assert (advised.why == "unmeasured") == (not compared)
        # No stage is larger than what was trained from there on.
        if schedule := summary.schedule:
            stages = [(stage.from_samples, stage.batch_size) for stage in schedule.stages]
            assert all(a < b and b % a == 0 for (_, a), (_, b) in pairwise(stages))
            for start, size in stages:
                later = [p for p in summary.points if p.resolved and p.samples >= start]
                assert all(size <= p.critical.safe for p in later)
                assert start < evidence.length
            assert schedule.steps < evidence.length / evidence.constant
            assert schedule.advised == bool(schedule.check and schedule.check.within)
        going_on = summary.going_on
        assert not going_on or going_on.batch_size < evidence.diverged
        # A summary is a function of the results, and can be written and read.
        text = dumps(summary.to_dict())
        assert text == dumps(summarize(header, results, summary.status).to_dict())
        assert dumps(msgspec.convert(json.loads(text), Summary, strict=False).to_dict()) == text
        assert_words_fit(summary)


def assert_words_fit(summary):
    """One sentence, one table, three remarks, and no number that is not known."""
    size = summary.recommendation.batch_size
    assert len(summary.remarks) <= 3
    said = "\n".join((summary.answer, *summary.remarks))
    assert not re.search(r"\bnan\b|\binf\b|None", said)
    assert summary.answer.count(". ") == 0
    if summary.table:
        advised = [row[0] for row in summary.table.rows if row[3].endswith("advised")]
        assert advised == ([f"{size:,}"] if size else [])
    # Command and doubt do not stand side by side.
    assert ("; until then" in summary.answer) == bool(words.tune_first(summary))
    preliminary = summary.status in ("interrupted", "failed") and size is not None
    assert summary.answer.startswith("Preliminary") == preliminary


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize(
    ("stop", "length"),
    # The first of a length's three losses is that of the length over 1.6.
    [(2700, 4096), (2000, 2048), (500, 512), (200, 0)],
)
def test_the_length_is_halved_until_the_loss_falls_at_its_end(stop, length, decays):
    def losses(place):
        """Falls, and rises a little after ``stop``."""
        return law(min(place, stop)) + 2e-6 * max(0.0, place - stop)

    task = {"lr_decay": "linear" if decays else "none"}

    def length_of(*lengths, count=3, **settings):
        runs = [
            scratch(8, seed, samples, decays=decays, losses=losses)
            for seed in range(count)
            for n in lengths
            for samples in (lengths_of(n, 0.2) if decays else [n])
        ]
        return Evidence(make_header(task=task, settings=settings), Results(runs)).length

    assert length_of(4096, 2048, 1024, 512) == length
    # With the longest alone, the next is wanted.
    assert length_of(4096) == (4096 if length == 4096 else 2048)
    # Two seeds tell nothing yet, and a length that was given stays.
    assert length_of(4096, 2048, 1024, 512, count=2) == length_of(4096, samples=4096) == 4096
    # A plan of fewer steps than any training should have is no loss that does not fall.
    assert Evidence(make_header((32,)), Results([])).length == 32


@pytest.mark.parametrize(
    ("slower", "failed", "constant", "larger"),
    [
        ({}, None, None, None),
        # Luck: one larger than what failed may pass, and counts for nothing.
        ({16: 1.1, 24: 1.3, 32: 1.0}, 24, 16, 24),
        ({32: 1.4}, 32, None, 32),
        ({12: 1.6, 32: 2.0}, 12, 8, 12),
        ({512: 1.1}, None, 512, None),
        # 1.2 is not decided: it is neither, and is told.
        ({12: 1.2, 16: 1.5}, 16, None, 12),
        ({12: 1.1, 16: 1.2, 24: 1.4, 32: 1.5}, 24, 12, 16),
    ],
)
def test_the_largest_that_passed_below_the_smallest_that_failed(slower, failed, constant, larger):
    runs = [*seeds(12, rate=2.0), *seeds("8-16@1024"), *seeds(24, samples=2048)]
    for size, slow in slower.items():
        runs += seeds(size, slower=slow, spread=0.02 if slow == 1.2 else 0.0)
    evidence = known({}, *runs)
    # Other lengths, rates and schedules are no size.
    assert [*evidence.sizes] == sorted(slower)
    assert (evidence.failed, evidence.constant) == (failed, constant)
    summary = summarize(HEADER, evidence.results, "complete")
    advice, said = summary.recommendation, found(summary, Larger)
    assert (advice.batch_size, said and said.run.batch_size) == (constant, larger)
    if constant:
        overhead = slower[constant] - 1 if constant > 8 else None
        assert advice.overhead == (overhead and pytest.approx(overhead, abs=0.01))
        assert advice.warmup_samples == (0 if constant == 8 else 256)
        assert advice.lr == pytest.approx(0.001 * math.sqrt(constant / 8))


LOST = dict.fromkeys((64, 128, 256, 512), 1e9)


@pytest.mark.parametrize(("at", "told"), [((0,), 64), ((1,), None), ((0, 1), None)])
def test_nothing_is_advised_above_what_diverged_at_any_point(at, told):
    results = [point(i, POINTS[i]) for i in (0, 1)]
    for i in (0, 1):
        results += branches(1e5, sigma=5e-4, point=i, diverged=LOST if i in at else ())
    evidence = known({32: 1.0}, results=results)
    assert (evidence.diverged, evidence.constant, evidence.schedule) == (64, 32, ())
    assert [evidence.safe(evidence.criticals[i]) for i in (0, 1)] == [32, 32]
    # At a point where it diverged itself, no other point need say so.
    going_on = summarize(HEADER, evidence.results, "complete").going_on
    assert (going_on.batch_size, going_on.diverged) == (32, told)


@pytest.mark.parametrize(
    ("points", "criticals", "constant", "sizes"),
    [
        # It begins with the constant batch or below, and has to make up for that.
        (POINTS, (20.0, 1e5), 64, []),
        (POINTS, (1e5, 1e5), 64, [64, 512]),
        (POINTS, (120.0, 1e5), 24, [16, 32]),
        ((512, 2048, 4096), (60.0, 120.0, 1e5), 12, [8, 16, 32]),
        ((512, 2048, 4096), (60.0, 120.0, 1e5), 64, []),
    ],
)
def test_a_schedule_takes_fewer_steps_than_the_constant_batch(points, criticals, constant, sizes):
    header = make_header(points)
    evidence = known({constant: 1.0}, header=header, results=measured(header, criticals))
    assert evidence.constant == constant
    assert [size for _, size in evidence.schedule] == sizes


def test_an_evaluation_that_falls_in_no_training_is_not_judged():
    runs = known({16: 1.0}).results
    least = min(run.loss for run in runs if not getattr(run, "repeat", 1))
    runs.add(replace(runs.select(Scratch)[1], repeat=1, loss=least - 1))  # begins elsewhere
    for first, start, rises in [(least, "", 1), (least, "Task.start", 0), (least + 1e-9, "", 0)]:
        task = replace(HEADER.task, provenance={start: ""})
        summary = summarize(replace(HEADER, task=task, first_value=first), runs, "budget")
        assert (summary.answer == summary.rise, summary.checked == ()) == (rises, rises)


def test_points_along_whose_branches_the_loss_does_not_fall():
    second = branches(1e5, sigma=0.5, seed=3, point=1)
    events = [point(0, 1024), *branches(120.0, sigma=1e-3), *second, point(1, LENGTH)]
    header = make_header(task={"train_size": 512})
    summary = summarize(header, Results(events), "complete")
    assert found(summary, Flat) == Flat(points=(LENGTH,), epochs=8.0)
    assert [row.resolved for row in summary.points] == [True, False]
    assert summary.going_on.from_samples == 1024


@pytest.mark.parametrize(("optimizer", "keep"), [("AdamW", False), ("AdamW", True), ("SGD", False)])
def test_half_lives(optimizer, keep):
    task = {"optimizer": optimizer, "weight_decay": 0.1, "beta2": 0.95}
    header = make_header(task=task, settings={"keep_half_life": keep})
    events = Results([*seeds(8), *seeds(32, slower=1.1)])
    advice = summarize(header, events, "complete").recommendation
    assert advice.batch_size == 32
    size = 8 if keep else 32
    assert advice.half_life == pytest.approx(size * math.log(0.5) / math.log(0.95))
    # A step takes lr * 0.1 of each weight: half is left after ln 2 / (lr * 0.1) steps.
    expected = size * math.log(2) / (0.001 * math.sqrt(size / 8) * 0.1)
    decays = optimizer == "AdamW"
    assert advice.decay_half_life == (pytest.approx(expected) if decays else None)
