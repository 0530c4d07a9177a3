"""Findings as structs: what they say of the results, and what they may never say."""

import json
import math
import subprocess
import sys

import msgspec
import pytest

from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import lengths_of
from steadygrad.studies.advise.schema import Flat, Larger, Summary, Unfinished
from steadygrad.studies.folder import Results
from steadygrad.studies.sequential import LOOKS
from steadygrad.studies.strict_json import dumps
from tests.unit.studies.advise.events import (
    LENGTH,
    branches,
    make_header,
    measured,
    point,
    relabelled,
    scratch,
    studied,
)
from tests.unit.studies.advise.random_records import random_record

HEADER = make_header()


def found(summary, kind):
    """The finding of a kind; None if there is none."""
    return next((finding for finding in summary.findings if isinstance(finding, kind)), None)


def three(size, slower=1.0, spread=0.0, **more):
    return [
        scratch(size, i, slower=slower, noise=spread * (i - 1), samples=LENGTH, **more)
        for i in range(3)
    ]


@pytest.mark.parametrize("first", range(0, 120, 20))
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
            assert (advised.overhead, advised.low, advised.high) == (
                run.overhead,
                run.low,
                run.high,
            )
            assert advised.batch_size < min((s for s, r in rows.items() if r.beyond), default=1e9)
            assert not math.isinf(run.loss)
        larger = found(summary, Larger)
        if larger:
            assert not larger.run.within
            assert larger.run.batch_size > (advised.batch_size or summary.batch_size)
        unfinished = summary.status in ("interrupted", "failed")
        assert (found(summary, Unfinished) is not None) == unfinished
        assert (advised.batch_size is None) == (advised.why != "")
        assert (advised.minutes is None) == (advised.why != "undecided")
        assert (advised.why == "flat") == (evidence.length == 0)
        schedule = summary.schedule
        for stage in schedule.stages if schedule else ():
            later = [p for p in summary.points if p.resolved and p.samples >= stage.from_samples]
            assert all(stage.batch_size <= p.critical.safe for p in later)
        assert not schedule or schedule.advised == bool(schedule.check and schedule.check.within)
        going_on = summary.going_on
        assert not going_on or going_on.batch_size < evidence.diverged
        # A summary is a function of the results, and can be written and read.
        text = dumps(summary.to_dict())
        assert text == dumps(summarize(header, results, summary.status).to_dict())
        assert dumps(msgspec.convert(json.loads(text), Summary, strict=False).to_dict()) == text


@pytest.mark.parametrize(
    ("slower", "advised", "larger"),
    [
        ({12: (1.1, 0), 24: (1.5, 0)}, 12, 24),
        ({32: (2.0, 0), 12: (1.6, 0)}, 8, 12),
        # One that is not decided is no advice, and is told.
        ({12: (1.1, 0), 16: (1.2, 0.03), 24: (1.4, 0), 32: (1.5, 0)}, 12, 16),
        ({512: (1.1, 0)}, 512, None),
    ],
)
def test_the_smallest_larger_batch_that_was_not_within_the_tolerance(slower, advised, larger):
    events = [*measured(HEADER), *three(8)]
    events += [run for size, given in slower.items() for run in three(size, *given)]
    summary = summarize(HEADER, Results(events), "complete")
    advice, said = summary.recommendation, found(summary, Larger)
    assert (advice.batch_size, advice.why) == (advised, "")
    assert (said and said.run.batch_size) == larger
    overhead = slower[advised][0] - 1 if advised > 8 else None
    assert advice.overhead == (overhead and pytest.approx(overhead, abs=0.01))
    assert advice.warmup_samples == (0 if advised == 8 else 256)
    assert advice.lr == pytest.approx(0.001 * math.sqrt(advised / 8))


def test_without_a_decision_it_says_how_long_one_would_take():
    def minutes(workers, spread, decay="none"):
        header = make_header(runtime={"workers": workers}, task={"lr_decay": decay})
        decays = decay != "none"
        lengths = lengths_of(LENGTH, 0.2) if decays else [LENGTH]
        events = [scratch(8, i, samples=n, decays=decays) for i in range(3) for n in lengths]
        events += [*three(32, 1.15, spread), *three(16, 1.15, 2 * spread)]
        advice = summarize(header, Results(events), "budget").recommendation
        assert (advice.batch_size, advice.why, advice.samples) == (None, "undecided", LENGTH)
        return advice.minutes

    assert minutes(2, 0.01) == minutes(1, 0.01) / 2
    assert minutes(1, 0.02) > minutes(1, 0.01)
    # One that falls takes two more trainings of the smallest batch, of 1 / 1.2 and 1 / 1.6.
    assert minutes(1, 0.01, "linear") > 1.5 * minutes(1, 0.01)


def test_the_rates_that_were_found_are_the_answers():
    header = make_header((LENGTH,), settings={"tune": True}, seeds=6)
    best = {8: -0.5} | dict.fromkeys((12, 16, 24, 32, 48, 64, 128), 2.25)
    results = Results(studied(header, 80.0, sigma=2e-4, lengths=1e9, best=best))
    summary, found = summarize(header, results, "complete"), Evidence(header, results)
    size = summary.recommendation.batch_size
    assert size == 24
    assert summary.lr == pytest.approx(0.001 * found.tuned("8"))
    assert summary.recommendation.lr == pytest.approx(0.001 * 3**0.5 * found.tuned("24"))
    assert summary.rates == ()


@pytest.mark.parametrize(("loss", "why"), [(lambda s: 2.0, "flat"), (lambda s: s / 1e5, "flat")])
def test_where_the_loss_does_not_fall_there_is_no_advice(loss, why):
    header = make_header((512,))
    events = [scratch(8, seed, 512, losses=loss) for seed in range(3)]
    assert summarize(header, Results(events), "budget").recommendation.why == why
    # Nor is there any before a comparison.
    events = Results([point(0, 1024), *three(8)])
    assert summarize(HEADER, events, "budget").recommendation.why == "unmeasured"


@pytest.mark.parametrize("losses", [2.0, 0.0, None, "rising"])
def test_points_along_whose_branches_the_loss_does_not_fall(losses):
    def told(samples):
        return 1 + samples / 1e5 if losses == "rising" else losses

    second = [relabelled(branch, told) for branch in branches(1e5, point=1)]
    if losses is None:
        second = branches(1e5, sigma=0.5, seed=3, point=1)
    events = [point(0, 1024), *branches(120.0, sigma=1e-3, point=0), *second]
    events.append(point(1, LENGTH, losses=told) if losses is not None else point(1, LENGTH))
    header = make_header(task={"train_size": 512})
    summary = summarize(header, Results(events), "complete")
    assert found(summary, Flat) == Flat(points=(LENGTH,), epochs=8.0)
    assert [row.resolved for row in summary.points] == [True, False]
    assert summary.going_on.from_samples == 1024


def test_megatron_counts_tokens():
    header = make_header(task={"tokens_per_sample": 64})
    events = [*measured(header, (120.0, 1e5)), *three(8), *three(12, 1.1)]
    schedule = summarize(header, Results(events), "complete").schedule
    assert len(schedule.stages) > 1
    expected = " ".join(f"{s.from_samples * 64}:{s.batch_size}" for s in schedule.stages)
    assert schedule.megatron == expected
    assert (schedule.check, schedule.advised) == (None, False)


@pytest.mark.parametrize(("grown", "advised"), [(1e5, True), (20.0, False)])
def test_a_growing_batch_is_advised_where_it_passed(grown, advised):
    results = studied(HEADER, 100.0, grown=grown)
    schedule = summarize(HEADER, Results(results), "budget").schedule
    assert schedule.advised == schedule.check.within == advised
    assert schedule.check.beyond != advised


@pytest.mark.parametrize(("optimizer", "keep"), [("AdamW", False), ("AdamW", True), ("SGD", False)])
def test_half_lives(optimizer, keep):
    task = {"optimizer": optimizer, "weight_decay": 0.1, "beta2": 0.95}
    header = make_header(task=task, settings={"keep_half_life": keep})
    events = Results([*three(8), *three(32, 1.1)])
    advice = summarize(header, events, "complete").recommendation
    assert advice.batch_size == 32
    size = 8 if keep else 32
    assert advice.half_life == pytest.approx(size * math.log(0.5) / math.log(0.95))
    # A step takes lr * 0.1 of each weight: half is left after ln 2 / (lr * 0.1) steps.
    expected = size * math.log(2) / (0.001 * math.sqrt(size / 8) * 0.1)
    decays = optimizer == "AdamW"
    assert advice.decay_half_life == (pytest.approx(expected) if decays else None)


def test_what_concludes_and_draws_imports_no_torch():
    modules = ("plan", "search", "findings", "words", "page")
    code = "import sys\n" + "".join(f"import steadygrad.studies.advise.{m}\n" for m in modules)
    subprocess.run([sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True)
