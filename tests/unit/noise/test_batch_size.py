"""The controller moves when the data are clear, and only then; schedules in every form."""

import json
import math

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeController, BatchSizeSchedule, NoiseEstimate
from steadygrad.noise.schedule import learning_rate

NAN, INF = math.nan, math.inf


def estimate(value, low, high, resolved=None):
    t = torch.tensor
    resolved = math.isfinite(high) if resolved is None else resolved
    return NoiseEstimate(*map(t, (value, low, high, 1.0, value, resolved, 100, 100.0, False, 49.5)))


def follow(controller, *estimates):
    return [controller.update(estimate(*one)) for one in estimates]


# Options of a controller that takes 8 samples a micro-batch, the estimates, and the counts.
COURSES = {
    "doubles to the noise scale and stays": (
        {"count": 1, "patience": 0}, [(80.0, 60.0, 110.0)] * 6, [2, 4, 8, 8, 8, 8]),
    "halves at most": (
        {"count": 16, "patience": 0}, [(16.0, 12.0, 20.0)] * 4, [8, 4, 2, 2]),
    "does not flutter inside the interval": (
        {"count": 8, "patience": 0}, [(v, v - 30, v + 30) for v in (50.0, 90.0, 75.0)], [8, 8, 8]),
    "nor below the hysteresis": (  # 9 of 8: below a quarter more
        {"count": 8, "patience": 0}, [(74.0, 70.0, 78.0)], [8]),
    "waits between changes": (
        {"count": 1}, [(800.0, 720.0, 880.0)] * 7, [2, 2, 2, 4, 4, 4, 8]),
    "is raised but never lowered by what is unresolved": (
        {"count": 4, "patience": 0}, [(NAN, 0.0, INF), (NAN, 56.0, INF), (10.0, 1.0, INF)],
        [4, 7, 7]),
    # A negative noise leaves no value, but an interval near zero.
    "is not lowered by an upper end that is unresolved": (
        {"count": 8, "patience": 0},
        [(NAN, 0.0, 1e-3, False), (NAN, 80.0, 90.0, False), (1e-3, 0.0, 2e-3)], [8, 10, 5]),
    "keeps its bounds, and takes a factor": (
        {"count": 2, "max_count": 5, "patience": 0, "factor": 0.5},
        [(8000.0, 7200.0, 8800.0)] * 3 + [(8.0, 4.0, 16.0)] * 3, [4, 5, 5, 3, 2, 2]),
    # With one micro-batch a step a single process would have nothing to compare.
    "by default can always measure": ({"patience": 0}, [(1.0, 0.5, 2.0)] * 2, [2, 2]),
}  # fmt: skip


@pytest.mark.parametrize("course", COURSES)
def test_course(course):
    options, estimates, counts = COURSES[course]
    controller = BatchSizeController(8, **options)
    assert follow(controller, *estimates) == counts
    assert controller.batch_size == 8 * counts[-1]


def test_state_goes_on():
    first, second = (BatchSizeController(1, count=1, patience=2) for _ in range(2))
    large = (100.0, 90.0, 110.0)
    follow(first, large, large)
    second.load_state_dict(first.state_dict())
    assert follow(second, *[large] * 3) == follow(first, *[large] * 3) == [2, 4, 4]


def test_what_is_no_estimate_is_refused():
    with pytest.raises(InputError, match="`estimate`"):
        BatchSizeController(8).update(500.0)


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
