"""`BatchSizeSchedule`: the same stages in every form."""

import csv
import io
import json

import pytest

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeSchedule

STAGES = [
    {"from_samples": 0, "batch_size": 16, "lr": 1e-3},
    {"from_samples": 4000, "batch_size": 32, "lr": None},
    {"from_samples": 4096, "batch_size": 64, "lr": None},
]


def test_json_round_trip():
    schedule = BatchSizeSchedule(STAGES)
    assert BatchSizeSchedule.from_json(schedule.to_json()) == schedule


def test_csv_has_every_number():
    rows = list(csv.DictReader(io.StringIO(BatchSizeSchedule(STAGES).to_csv())))
    assert [r["batch_size"] for r in rows] == ["16", "32", "64"]
    assert [r["lr"] for r in rows] == ["0.001", "", ""]


def test_megatron_text():
    assert BatchSizeSchedule(STAGES).to_megatron() == "0:16 4K:32 4096:64"
    assert BatchSizeSchedule(STAGES[:2]).to_megatron(250_000) == "0:16 1B:32"


def test_lookup():
    schedule = BatchSizeSchedule(STAGES)
    assert [schedule.batch_size(n) for n in (0, 3999, 4000, 10**9)] == [16, 16, 32, 64]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "Expected a JSON list of stages"),
        ("[1]", "Expected a stage with `from_samples`.* Found 1. Remedy"),
        ('[{"from": 0}]', "Expected a stage with .* Found {'from': 0}. Remedy"),
        ("3", "`stages` should be of type Iterable. Found 3, of type int. Remedy"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(InputError, match=message):
        BatchSizeSchedule.from_json(text)


@pytest.mark.parametrize("lr", ["x", 0.0, float("nan"), True])
def test_a_learning_rate_is_a_positive_number(lr):
    with pytest.raises(InputError, match=r"`lr` should be a finite number in \(0, inf\).*Remedy"):
        BatchSizeSchedule([{**STAGES[0], "lr": lr}])
    with pytest.raises(InputError, match="`lr` should be"):
        BatchSizeSchedule.from_json(json.dumps([{**STAGES[0], "lr": lr}]))


def test_a_stage_begins_at_a_whole_sample():
    with pytest.raises(InputError, match="`from_samples` should be an integer"):
        BatchSizeSchedule([STAGES[0], {"from_samples": 1.5, "batch_size": 9}])


@pytest.mark.parametrize("stages", [[], STAGES[1:], [STAGES[0], STAGES[2], STAGES[1]]])
def test_bad_stages(stages):
    with pytest.raises(InputError, match=r"begin at 0 and in rising order.*Remedy: sort them"):
        BatchSizeSchedule(stages)
