"""The six lines: no sentence may contradict a number."""

import dataclasses
import math
import re
from collections import Counter

import msgspec
import pytest

from steadygrad.studies.advise.recommend import Evidence
from steadygrad.studies.advise.summary import summarize
from steadygrad.studies.folder import Results
from steadygrad.studies.strict_json import dumps
from tests.unit.studies.advise.events import branches, make_header, point
from tests.unit.studies.advise.random_records import random_record
from tests.unit.studies.advise.sentence_forms import FORMS
from tests.unit.studies.advise.sentences import Sentences

RECORDS = 200


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize("first", range(0, RECORDS, 20))
def test_no_sentence_contradicts_a_number(first):
    for seed in range(first, first + 20):
        header, journal, summary = random_record(seed)
        assert Sentences(header, journal, summary).check()
        check_schedule(Evidence(header, journal), summary["schedule"])
        # A summary can be written, and is a function of the record.
        again = {**summarize(header, journal, summary["status"]), "status": summary["status"]}
        assert dumps(summary) == dumps(again)


@pytest.mark.slow
def test_the_random_records_have_every_form_of_sentence():
    """Red here, and the test above says nothing."""
    found: Counter[str] = Counter()
    for seed in range(RECORDS):
        found.update(Sentences(*random_record(seed)).check())
    assert set(found) == set(FORMS)


def check_schedule(evidence, schedule):
    """No stage is above what was safe at its beginning and later."""
    for stage in schedule["stages"] if schedule else ():
        later = [p for p in evidence.measured if p.samples >= stage["from_samples"]]
        assert all(stage["batch_size"] <= p.critical.safe for p in later)
    tokens = evidence.header.task.tokens_per_sample
    assert not schedule or bool(schedule["megatron"]) == bool(tokens)


def test_megatron_counts_tokens():
    header = make_header((1024, 4096), task={"tokens_per_sample": 64})
    events = [point(0, 1024), point(1, 4096)]
    for i, critical in enumerate((120.0, 1e5)):
        events += branches(critical, sigma=1e-4, seed=i, point=i)
    summary = summarize(header, Results(events), "complete")
    stages = summary["schedule"]["stages"]
    assert len(stages) > 1
    expected = " ".join(f"{s['from_samples'] * 64}:{s['batch_size']}" for s in stages)
    assert numbers(summary["schedule"]["megatron"]) == numbers(expected)


def test_half_life_follows_the_batch_size():
    header = make_header((1024, 4096), task={"beta2": 0.95})
    events = [point(i, n) for i, n in enumerate((1024, 4096))]
    for i in (0, 1):
        events += branches(120.0, sigma=1e-4, seed=i, point=i)
    advice = summarize(header, Results(events), "complete")["recommendation"]
    steps = math.log(0.5) / math.log(0.95)
    assert advice["half_life"] == pytest.approx(advice["batch_size"] * steps)


@pytest.mark.parametrize(
    ("optimizer", "keep", "told"),
    [("AdamW", False, True), ("AdamW", True, True), ("SGD", False, False)],
)
def test_half_life_of_the_weight_decay(optimizer, keep, told):
    task = {"optimizer": optimizer, "weight_decay": 0.1}
    header = make_header((1024, 4096), task=task)
    settings = dataclasses.replace(header.settings, keep_half_life=keep)
    header = msgspec.structs.replace(header, settings=settings)
    events = [point(i, n) for i, n in enumerate((1024, 4096))]
    for i in (0, 1):
        events += branches(1e5, sigma=1e-4, seed=i, point=i)
    advice = summarize(header, Results(events), "complete")["recommendation"]
    size = 8 if keep else advice["batch_size"]
    lr = 0.001 * math.sqrt(size / 8)
    # A step takes lr * 0.1 of each weight: half is left after ln 2 / (lr * 0.1) steps.
    expected = size * math.log(2) / (lr * 0.1)
    assert advice["decay_half_life"] == (pytest.approx(expected) if told else None)
    assert advice["batch_size"] > 8
