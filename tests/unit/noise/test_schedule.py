"""`BatchSizeSchedule`: the same stages in every form; learning rates for other batch sizes."""

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


def test_json_round_trip():
    schedule = BatchSizeSchedule(STAGES)
    assert json.loads(schedule.to_json()) == STAGES
    assert BatchSizeSchedule(json.loads(schedule.to_json())).stages == schedule.stages


def test_megatron_text():
    assert BatchSizeSchedule(STAGES).to_megatron() == "0:16 4K:32 4096:64"
    assert BatchSizeSchedule(STAGES[:2]).to_megatron(250_000) == "0:16 1B:32"


def test_lookup():
    schedule = BatchSizeSchedule(STAGES)
    assert [schedule.batch_size(n) for n in (0, 3999, 4000, 10**9)] == [16, 16, 32, 64]


@pytest.mark.parametrize(
    "stages", [[], STAGES[1:], [STAGES[0], STAGES[2], STAGES[1]], [1], [{"from": 0}], 3]
)
def test_bad_stages(stages):
    with pytest.raises(InputError, match="`stages`"):
        BatchSizeSchedule(stages)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", "x"), ("lr", 0.0), ("lr", float("nan")), ("lr", True), ("from_samples", 1.5),
     ("batch_size", 0)],
)  # fmt: skip
def test_a_stage_has_positive_numbers(field, value):
    with pytest.raises(InputError, match=f"`{field}`"):
        BatchSizeSchedule([STAGES[0], {**STAGES[1], field: value}])


class Duration:
    """OLMo-core's, as far as its callback is built with it."""

    @staticmethod
    def tokens(tokens):
        return ("tokens", tokens)


def olmo_core(text):
    """Arguments that the call hands to `BatchSizeSchedulerCallback`."""
    return eval(text, {"BatchSizeSchedulerCallback": dict, "Duration": Duration})


def test_olmo_core_counts_everything_in_tokens():
    assert olmo_core(BatchSizeSchedule(STAGES).to_olmo_core(64)) == {
        "batch_sizes": [1024, 2048, 4096],
        "schedule": [("tokens", 0), ("tokens", 256_000), ("tokens", 262_144)],
    }


def test_olmo_core_refuses_a_batch_size_twice_so_the_second_is_left_out():
    twice = [STAGES[0], {"from_samples": 100, "batch_size": 16}, STAGES[1]]
    found = olmo_core(BatchSizeSchedule(twice).to_olmo_core(1))
    assert found["batch_sizes"] == [16, 32]
    assert found["schedule"] == [("tokens", 0), ("tokens", 4000)]


@pytest.mark.parametrize(("rule", "expected"), [("constant", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_learning_rates_at_four_times_the_batch(rule, expected):
    assert learning_rate(1.0, 32, 8, rule) == expected
    assert learning_rate(0.1, 8, 8, rule) == 0.1


def test_an_unknown_rule():
    with pytest.raises(InputError, match="`rule`"):
        learning_rate(1.0, 16, 8, "cubic")
