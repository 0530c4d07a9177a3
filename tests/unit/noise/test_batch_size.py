"""Batch-size schedules in every form."""

import json

import pytest

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeSchedule
from steadygrad.noise.schedule import learning_rate

STAGES = [
    {"from_samples": 0, "batch_size": 16, "lr": 1e-3},
    {"from_samples": 4000, "batch_size": 32, "lr": None},
    {"from_samples": 4096, "batch_size": 64, "lr": None},
]


def test_json_round_trip_and_look_up():
    schedule = BatchSizeSchedule(STAGES)
    assert json.loads(schedule.to_json()) == schedule.stages == STAGES
    assert [schedule.batch_size(n) for n in (0, 3999, 4000, 10**9)] == [16, 16, 32, 64]


def test_trainers_texts():
    assert BatchSizeSchedule(STAGES).to_megatron() == "0:16 4K:32 4096:64"
    assert BatchSizeSchedule(STAGES[:2]).to_megatron(250_000) == "0:16 1B:32"
    # OLMo-core counts all in tokens, and refuses a batch size twice in a row.
    stages = [STAGES[0], {"from_samples": 100, "batch_size": 16}, STAGES[1]]
    assert "batch_sizes=[1024, 2048]," in BatchSizeSchedule(stages).to_olmo_core(64)


@pytest.mark.parametrize(
    ("stages", "name"),
    [
        *((stages, "stages") for stages in ([], STAGES[1:], STAGES[::-1], [1], [{"from": 0}], 3)),
        *(
            ([STAGES[0], {**STAGES[1], field: value}], field)
            for field, value in [("lr", "x"), ("lr", 0.0), ("from_samples", 1.5), ("batch_size", 0)]
        ),
        ([STAGES[0], STAGES[2], STAGES[1]], "stages"),
    ],
)
def test_bad_stages(stages, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        BatchSizeSchedule(stages)


@pytest.mark.parametrize(("rule", "expected"), [("constant", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_learning_rates_at_four_times_the_batch(rule, expected):
    assert learning_rate(1.0, 32, 8, rule) == expected
    with pytest.raises(InputError, match="`rule`"):
        learning_rate(1.0, 16, 8, rule + "ic")
