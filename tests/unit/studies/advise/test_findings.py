"""What is concluded of each batch size, from results whose truth is known and from random ones."""

import json
import math
import random
import re

import msgspec
import pytest
from msgspec.structs import replace

from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.growth import longest, rungs_of
from steadygrad.studies.advise.schema import Noise, Summary
from steadygrad.studies.folder import Results, dumps
from steadygrad.studies.paired import looked
from steadygrad.studies.schema import Training
from tests.unit.studies.advise.events import (
    ARM,
    SEARCHED,
    SIZES,
    law,
    make_header,
    seeds,
    studied,
)

HEADER = make_header()


def record(slower, *extra):
    """Four pairs of sizes that need so many times the samples."""
    runs = [
        *SEARCHED,
        *seeds(8),
        *(r for size, slow in slower.items() for r in seeds(size, slower=slow)),
    ]
    return Results([*runs, *extra])


def known(slower, *extra):
    return BatchSizes(HEADER, record(slower, *extra))


def random_record(seed):
    """Any header, any results that a study may leave, and the summary."""
    draw = random.Random(seed)
    samples = 1024 * 4 ** draw.randint(0, 2)
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
    settings = {"samples": draw.choice([0, samples]), "tolerance": draw.choice([0.2, 0.5])}
    runtime = {"world_size": draw.choice([1, 4])}
    ladder = {}
    if seed % 3 == 1:
        ladder = {"shorter": draw.choice([(), (samples // 4,)]), "target": 50 * samples}
        ladder |= draw.choice([{}, {"stand_in": 40, "arms": SIZES * 2}])
        settings["batch_sizes"] = draw.choice(["", "16,64,4096"])
    header = make_header(samples, task=task, settings=settings, runtime=runtime, **ladder)
    stop = draw.choice([400, 2000, 1e9, 1e9, 1e9])
    losses = (lambda s: 1 + s / 1e5) if seed % 25 == 3 else lambda s: law(min(s, stop))
    made = studied(
        header,
        10 ** draw.uniform(0.5, 4),
        lengths=draw.choice([2, 20, 60, 60]),
        best={size: draw.uniform(-1, 2) for size in SIZES},
        # An optimizer that leaves its rate aside.
        bend=0.0 if seed % 11 == 5 else 0.3,
        sigma=10 ** draw.uniform(-5, -1.5),
        diverging=draw.choice([math.inf, 16, 64, 256]),
        losses=losses,
    )
    # Some are not there, and some of larger batches diverge.
    made = [r for r in made if draw.random() < 0.97]
    large = [getattr(r, "arm", 0) > 0 and draw.random() < 0.01 for r in made]
    lost = {"loss": math.inf, "curve": ((float(samples), math.inf),)}
    made = [replace(r, **lost) if is_lost else r for r, is_lost in zip(made, large, strict=True)]
    results = Results(made)
    status = draw.choice(("complete", "interrupted", "budget", "failed"))
    return header, results, summarize(header, results, status)


@pytest.mark.few(2)
@pytest.mark.parametrize("first", range(0, 160, 20))
def test_no_finding_contradicts_a_number(first):
    for seed in range(first, first + 20):
        header, results, summary = random_record(seed)
        advised, tolerance = summary.recommendation, summary.tolerance
        evidence = longest(rungs_of(header, results)[0])
        rows = {run.batch_size: run for run in summary.checked}
        assert summary.findings[0] is advised
        assert [*rows] == sorted(rows)
        for run in summary.checked:
            assert run.within == (run.overhead <= tolerance and run.high <= 1.25 * tolerance)
            assert run.beyond == (run.low > tolerance)
            assert run.low <= run.overhead <= run.high
            assert run.seeds == looked(run.seeds)
        # Nothing is advised that failed, that diverged, or that is above what did.
        if advised.batch_size not in (None, summary.batch_size):
            run = rows[advised.batch_size]
            assert run.within
            numbers = advised.overhead, advised.low, advised.high
            assert numbers == (run.overhead, run.low, run.high)
            assert advised.batch_size < min((s for s, r in rows.items() if r.beyond), default=1e9)
            assert not math.isinf(run.loss)
        assert (advised.batch_size is None) == (advised.why != "")
        assert (advised.why == "flat") == evidence.is_flat
        compared = evidence.is_flat or evidence.pairs
        assert (advised.why == "unmeasured") == (not compared)
        noise = results.get(Noise, evidence.samples)
        assert summary.noise == (noise.points if noise else ())
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
    known = size is not None or (summary.growth and summary.growth.predicted)
    preliminary = summary.status in ("interrupted", "failed") and bool(known)
    assert summary.answer.startswith("Preliminary") == preliminary


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
    runs = [*seeds(12, step=1.0), *seeds(24, samples=2048)]
    for size, slow in slower.items():
        runs += seeds(size, slower=slow, spread=0.02 if slow == 1.2 else 0.0)
    results = record({}, *runs)
    evidence = BatchSizes(HEADER, results)
    # Other lengths and rates are no size.
    assert [SIZES[arm] for arm in evidence.pairs] == sorted(slower)
    assert evidence.failed == ARM.get(failed)
    assert evidence.advised == ARM.get(constant)
    summary = summarize(HEADER, results, "complete")
    advice, named = summary.recommendation, re.search(r"batch (\d+) needs", summary.answer)
    assert advice.batch_size == constant
    # The answer names what is above the smallest batch and not within the tolerance.
    if slower and constant in (None, 8):
        assert int(named[1]) == larger
    if constant:
        overhead = slower[constant] - 1 if constant > 8 else None
        assert advice.overhead == (overhead and pytest.approx(overhead, abs=0.01))
        assert advice.warmup_samples == (0 if constant == 8 else 256)
        assert advice.lr == pytest.approx(0.001 * math.sqrt(constant / 8))


def test_an_evaluation_that_falls_in_no_training_is_not_judged():
    runs = record({16: 1.1})
    least = min(run.loss for run in runs if not run.seed)
    runs.add(replace(runs.select(Training)[1], seed=1, loss=least - 1))  # begins elsewhere
    stand_in = replace(HEADER, plan=replace(HEADER.plan, arms=SIZES * 2, stand_in=40))
    start = replace(HEADER, task=replace(HEADER.task, provenance={"Task.start": ""}))
    for header, above, rises in [
        (HEADER, 0, 1),
        (HEADER, 1e-9, 0),
        (start, 0, 0),
        (stand_in, 0, 0),
    ]:
        summary = summarize(replace(header, first_value=least + above), runs, "budget")
        assert (summary.answer == summary.rise, summary.checked == ()) == (rises, rises)


@pytest.mark.parametrize(("optimizer", "keep"), [("AdamW", False), ("AdamW", True), ("SGD", False)])
def test_half_lives(optimizer, keep):
    task = {"optimizer": optimizer, "weight_decay": 0.1, "beta2": 0.95}
    header = make_header(task=task, settings={"keep_half_life": keep})
    events = Results([*SEARCHED, *seeds(8), *seeds(32, slower=1.1)])
    advice = summarize(header, events, "complete").recommendation
    assert advice.batch_size == 32
    size = 8 if keep else 32
    assert advice.half_life == pytest.approx(size * math.log(0.5) / math.log(0.95))
    # A step takes lr * 0.1 of each weight: half is left after ln 2 / (lr * 0.1) steps.
    expected = size * math.log(2) / (0.001 * math.sqrt(size / 8) * 0.1)
    decays = optimizer == "AdamW"
    assert advice.decay_half_life == (pytest.approx(expected) if decays else None)
