"""`BatchSizeController`: moves when the data are clear, and only then."""

import math

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeController, NoiseEstimate

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


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda: BatchSizeController(8).load_state_dict({}), "count"),
        (lambda: BatchSizeController(8, min_count=4, max_count=2), "max_count"),
        (lambda: BatchSizeController(8, count=3, max_count=2), "count"),
        (lambda: BatchSizeController(8).update(500.0), "estimate"),
    ],
)
def test_bad_arguments(act, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        act()


def test_one_micro_batch_is_enough_where_it_is_asked_for():
    assert BatchSizeController(16, count=1).min_count == 1
