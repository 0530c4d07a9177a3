"""Findings as structs: what they say of the results, and what they may never say."""

import json
import math
import subprocess
import sys

import msgspec
import pytest

from steadygrad.studies.advise.analysis import Evidence
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.schema import Flat, Larger, Summary, Unfinished, Unplanned
from steadygrad.studies.folder import Results
from steadygrad.studies.strict_json import dumps
from tests.unit.studies.advise.events import (
    branches,
    law,
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


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_no_finding_contradicts_a_number(first):
    for seed in range(first, first + 20):
        header, results, summary = random_record(seed)
        advised, tolerance = summary.recommendation, summary.tolerance
        evidence, rows = Evidence(header, results), {run.batch_size: run for run in summary.checked}
        assert summary.findings[0] is advised
        for run in summary.checked:
            assert run.within == (run.overhead <= tolerance and run.upper <= 1.25 * tolerance)
        # Nothing is advised that failed, that diverged, or that is above what did.
        if advised.batch_size not in (None, summary.batch_size):
            assert advised.batch_size < evidence.diverged
            bad = [size for size, run in rows.items() if not run.within]
            assert advised.batch_size < min(bad, default=math.inf)
            assert (advised.basis == "trained") == (advised.batch_size in rows)
        larger = found(summary, Larger)
        if larger and larger.run:
            assert not larger.run.within
            assert not larger.gap or larger.run.low > tolerance
        assert (found(summary, Unfinished) is None) == (summary.status == "complete")
        assert (advised.batch_size is None) == (advised.why != "") == (advised.basis == "none")
        schedule = summary.schedule
        for stage in schedule.stages if schedule else ():
            later = [p for p in evidence.measured if p.samples >= stage.from_samples]
            assert all(stage.batch_size <= p.critical.safe for p in later)
        assert not schedule or schedule.advised == bool(schedule.check and schedule.check.within)
        # A summary is a function of the results, and can be written and read.
        text = dumps(summary.to_dict())
        assert text == dumps(summarize(header, results, summary.status).to_dict())
        assert dumps(msgspec.convert(json.loads(text), Summary, strict=False).to_dict()) == text


@pytest.mark.parametrize(
    ("runs", "advised", "larger"),
    [
        ({12: 1.1, 24: 1.5}, 12, (24, False, None)),
        # A gap is told where a smaller size was not tried.
        ({32: 2.0}, 8, (32, True, None)),
        ({32: 2.0, 12: 1.6}, 8, (12, False, None)),
    ],
)
def test_the_smallest_larger_batch_that_was_not_within_the_tolerance(runs, advised, larger):
    events = [*measured(HEADER), *(scratch(8, seed, 4096) for seed in (1, 2))]
    events += [scratch(b, seed, 4096, slower=s) for b, s in runs.items() for seed in range(3)]
    summary = summarize(HEADER, Results(events), "complete")
    assert (summary.recommendation.basis, summary.recommendation.batch_size) == ("trained", advised)
    said = found(summary, Larger)
    assert (said.run.batch_size, said.gap, said.diverged) == larger
    assert found(summary, Unplanned) is None


def test_without_runs_it_is_predicted():
    header = make_header(candidates=0, seeds=0)
    summary = summarize(header, Results(measured(header, (1e3, 1e4))), "complete")
    assert summary.recommendation.basis == "predicted"
    assert found(summary, Unplanned) is not None
    own = summarize(header, Results(measured(header, (3.0, 3.0))), "complete")
    assert (own.recommendation.basis, own.recommendation.batch_size) == ("own", 8)


@pytest.mark.parametrize(
    ("losses", "how"), [(2.0, "flat"), (0.0, "zero"), (None, "slightly"), ("rising", "flat")]
)
def test_why_there_is_no_batch_size(losses, how):
    def told(samples):
        return 1 + samples / 1e5 if losses == "rising" else losses

    events = []
    for i, samples in enumerate(HEADER.plan.points):
        if losses is None:
            events += [point(i, samples), *branches(1e5, sigma=0.5, seed=3 * i, point=i)]
            continue
        events.append(point(i, samples, losses=told))
        events += [relabelled(branch, told) for branch in branches(1e5, point=i)]
    summary = summarize(HEADER, Results(events), "complete")
    assert (summary.recommendation.batch_size, summary.recommendation.why) == (None, how)
    assert summary.going_on is None
    assert found(summary, Flat) is None


def test_nothing_is_measured_and_a_study_cut_short():
    summary = summarize(HEADER, Results([point(0, 1024)]), "budget")
    assert summary.recommendation.why == "unmeasured"
    assert found(summary, Unfinished) == Unfinished(measured=0, planned=2)
    assert summary.table is None


def test_points_along_whose_branches_the_loss_does_not_fall():
    header = make_header(task={"train_size": 512})
    events = [point(0, 1024), *branches(120.0, sigma=1e-3, point=0), point(1, 4096)]
    events += [relabelled(branch, lambda s: 2.0) for branch in branches(120.0, point=1)]
    summary = summarize(header, Results(events), "complete")
    assert found(summary, Flat) == Flat(points=(4096,), epochs=8.0, how="flat")
    assert [row.resolved for row in summary.points] == [True, False]


@pytest.mark.parametrize(
    ("rates", "verdict", "first"),
    [({2.0: 0.6, 0.5: 1.5}, "low", True), ({0.5: 0.6}, "high", True), ({2.0: 1.2}, "fits", False)],
)
def test_a_learning_rate_that_looks_wrong_comes_first(rates, verdict, first):
    results, _ = studied(HEADER, 100.0, rates=rates)
    rate = summarize(HEADER, Results(results), "complete").rate
    assert (rate.verdict, rate.elsewhere, rate.first) == (verdict, False, first)


@pytest.mark.parametrize(("slower", "verdict", "first"), [(0.6, "low", True), (1.0, "high", False)])
def test_a_rate_that_is_too_high_for_a_long_run_says_nothing_of_a_short_one(slower, verdict, first):
    """The check ends at the first point, behind which the loss falls no more."""
    events = measured(HEADER)
    flat = lambda samples: law(min(samples, 1024))  # noqa: E731
    events = [point(e.point, e.samples, losses=flat) if e.key[0] == "point" else e for e in events]
    rate = 2.0 if verdict == "low" else 0.5
    run = scratch(8, 0, 4096, rate=rate, slower=slower if verdict == "low" else 0.5)
    summary = summarize(HEADER, Results([*events, run]), "complete")
    assert summary.recommendation.samples == 1024
    assert (summary.rate.verdict, summary.rate.elsewhere) == (verdict, True)
    assert summary.rate.first == first


def test_megatron_counts_tokens():
    header = make_header(task={"tokens_per_sample": 64})
    schedule = summarize(header, Results(measured(header, (120.0, 1e5))), "complete").schedule
    assert len(schedule.stages) > 1
    expected = " ".join(f"{s.from_samples * 64}:{s.batch_size}" for s in schedule.stages)
    assert schedule.megatron == expected


@pytest.mark.parametrize(("optimizer", "keep"), [("AdamW", False), ("AdamW", True), ("SGD", False)])
def test_half_lives(optimizer, keep):
    task = {"optimizer": optimizer, "weight_decay": 0.1, "beta2": 0.95}
    header = make_header(task=task, settings={"keep_half_life": keep})
    advice = summarize(header, Results(measured(header, (1e5, 1e5))), "complete").recommendation
    assert advice.batch_size > 8
    size = 8 if keep else advice.batch_size
    assert advice.half_life == pytest.approx(size * math.log(0.5) / math.log(0.95))
    # A step takes lr * 0.1 of each weight: half is left after ln 2 / (lr * 0.1) steps.
    expected = size * math.log(2) / (0.001 * math.sqrt(size / 8) * 0.1)
    decays = optimizer == "AdamW"
    assert advice.decay_half_life == (pytest.approx(expected) if decays else None)


def test_what_concludes_and_draws_imports_no_torch():
    modules = ("plan", "analysis", "findings", "words", "page")
    code = "import sys\n" + "".join(f"import steadygrad.studies.advise.{m}\n" for m in modules)
    subprocess.run([sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True)
