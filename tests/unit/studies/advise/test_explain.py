"""The six lines: no sentence may contradict a number."""

import math
import random
import re

import pytest

from steadygrad.record import End, dumps
from steadygrad.record.schema.advise import Noise
from steadygrad.studies.advise.decisions import Chooser
from steadygrad.studies.advise.recommend import Evidence
from steadygrad.studies.advise.summary import summarize
from steadygrad.studies.journal import Journal
from tests.unit.studies.advise.events import branches, make_header, point, scratch, slowness

STATUSES = ("complete", "interrupted", "budget", "failed")


def random_journal(seed):
    """A header and events of any kind that a study may leave, whole or cut short."""
    draw = random.Random(seed)
    count = draw.randint(1, 4)
    points = tuple(1024 * 4**i for i in range(count))
    header = make_header(
        points,
        task={
            "lr_rule": draw.choice(["sqrt", "linear", "constant"]),
            "beta2": draw.choice([None, 0.95, 0.999]),
            "tokens_per_sample": draw.choice([None, 64]),
            "train_size": draw.choice([1000, 100_000]),
        },
        candidates=draw.choice([0, 2, 3]) if count > 1 else 0,
        rates=draw.random() < 0.5,
        runtime={"world_size": draw.choice([1, 4])},
    )
    events = []
    for i, samples in enumerate(points):
        events.append(point(i, samples))
        if draw.random() < 0.8:
            value = draw.choice([math.nan, 30.0])
            fields = {"value": value, "low": 10.0, "high": math.inf if value != value else 50.0}
            rest = {"grad_sq_norm": 1.0, "noise_trace": 1.0, "measurements": 3, "effective": 3.0}
            events.append(Noise(point=i, samples=64, resolved=value == value, **fields, **rest))
        lost = {
            8 * 2**k: draw.choice([math.inf, 1e9, 2.99])
            for k in range(draw.randint(2, 8), 7)
            if draw.random() < 0.7
        }
        events += branches(
            10 ** draw.uniform(0.5, 5),
            sigma=10 ** draw.uniform(-5, -1),
            repeats=draw.choice([2, 3]),
            seed=draw.random(),
            point=i,
            diverged=lost,
        )
    return header, events, draw


def with_runs(header, events, draw):
    """Adds the runs from scratch that the study would have chosen."""
    chooser, critical = Chooser(header), 10 ** draw.uniform(0.5, 4)
    for rate in (0.5, 2.0) if header.plan.rates else ():
        slower = 10 ** draw.uniform(-0.4, 0.4)
        events.append(scratch(8, 0, header.plan.length, rate=rate, slower=slower))
    for repeat in (1, 2) if header.plan.candidates else ():
        job = chooser(("baseline", repeat), Journal(events=events))
        if job:
            noise = draw.gauss(0, 0.01)
            events.append(scratch(8, repeat, job["samples"], noise=noise))
    sigma = 10 ** draw.uniform(-4, -1)
    names = [("candidate", number) for number in range(header.plan.candidates)]
    for name in [*names, ("schedule",)] if names else ():
        found = Journal(events=events)
        for job in [chooser((*name, repeat), found) for repeat in range(3)]:
            if job is not None and draw.random() < 0.97:
                lost = math.inf if draw.random() < 0.05 else draw.gauss(0, sigma)
                size = job["batch_size"]
                events.append(
                    scratch(
                        size,
                        job["repeat"],
                        job["samples"],
                        slower=slowness(size, critical),
                        noise=lost,
                        purpose=job["purpose"],
                        stages=[tuple(stage) for stage in job["stages"]],
                    )
                )
    return events


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_no_sentence_contradicts_a_number(first):
    for seed in range(first, first + 20):
        header, events, draw = random_journal(seed)
        events = with_runs(header, events, draw)
        if draw.random() < 0.3:
            events = events[: draw.randint(0, len(events))]
        status = draw.choice(STATUSES)
        journal = Journal(events=[*events, End(status=status)])
        summary = summarize(header, journal, status)
        check(Evidence(header, journal), summary, status)
        # A summary can be written, and is a function of the record.
        assert dumps(summary) == dumps(summarize(header, journal, status))


def check(evidence, summary, status):
    words, tolerance = summary["words"], evidence.header.settings.tolerance
    assert 1 <= len(words) <= 6
    text = "\n".join(words)
    assert "nan" not in text
    assert "None" not in text
    assert ("Preliminary" in text) == (status != "complete")
    advice = summary["recommendation"]
    size = advice["batch_size"]
    checked = {run["batch_size"]: run for run in summary["checked"]}
    if advice["basis"] == "trained" and size != 8:
        assert checked[size]["overhead"] <= tolerance
        assert "Predicted" not in words[0]
        assert f"train at batch {size:,}" in words[0]
    if advice["basis"] == "predicted":
        assert not checked
        assert "not trained" in words[0]
        assert all(size <= ceiling(c) for c in evidence.criticals.values())
    if size is None:
        assert words[0].startswith(("Nothing", "No batch size"))
    # Nothing that diverged or failed at this batch size from scratch is advised.
    for other, run in checked.items():
        if run["overhead"] > tolerance:
            assert size < other
    check_going_on(evidence, summary, text)
    schedule = summary["schedule"]
    if schedule:
        check_schedule(evidence, schedule)
        assert ("A growing batch is not advised" in text) == (
            schedule["basis"] == "trained" and not schedule["advised"]
        )


def ceiling(critical):
    """The largest size below all that diverged."""
    return max(s for s in critical.sizes if critical.diverged is None or s < critical.diverged)


def check_going_on(evidence, summary, text):
    going = summary["going_on"]
    assert (going is None) == (evidence.last is None)
    if going is None:
        return
    critical = evidence.criticals[evidence.last]
    position = critical.sizes.index(going["batch_size"])
    assert going["batch_size"] <= ceiling(critical)
    assert critical.overhead[position] <= evidence.header.settings.tolerance
    if "every batch tried" in text:
        assert critical.diverged is None
        assert max(critical.overhead) <= evidence.header.settings.tolerance
    assert going["known"] == ("the critical batch size is not known" not in text)


def check_schedule(evidence, schedule):
    stages = schedule["stages"]
    assert stages[0]["from_samples"] == 0
    assert schedule["steps"] < evidence.length / evidence.constant
    for stage in stages[1:]:
        later = [p for p in evidence.measured if p.samples >= stage["from_samples"]]
        assert all(stage["batch_size"] <= p.critical.safe for p in later)
    assert bool(schedule["megatron"]) == bool(evidence.header.task.tokens_per_sample)


def test_megatron_counts_tokens():
    header = make_header((1024, 4096), task={"tokens_per_sample": 64})
    events = [point(0, 1024), point(1, 4096)]
    for i, critical in enumerate((120.0, 1e5)):
        events += branches(critical, sigma=1e-4, seed=i, point=i)
    summary = summarize(header, Journal(events=events), "complete")
    stages = summary["schedule"]["stages"]
    assert len(stages) > 1
    expected = " ".join(f"{s['from_samples'] * 64}:{s['batch_size']}" for s in stages)
    assert numbers(summary["schedule"]["megatron"]) == numbers(expected)


def test_half_life_follows_the_batch_size():
    header = make_header((1024, 4096), task={"beta2": 0.95})
    events = [point(i, n) for i, n in enumerate((1024, 4096))]
    for i in (0, 1):
        events += branches(120.0, sigma=1e-4, seed=i, point=i)
    advice = summarize(header, Journal(events=events), "complete")["recommendation"]
    steps = math.log(0.5) / math.log(0.95)
    assert advice["half_life"] == pytest.approx(advice["batch_size"] * steps)
