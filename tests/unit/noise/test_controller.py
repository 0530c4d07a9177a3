"""`BatchSizeController`: moves when the data are clear, and only then."""

import math

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeController, NoiseEstimate


def estimate(value, low, high, resolved=None):
    t = torch.tensor
    resolved = math.isfinite(high) if resolved is None else resolved
    return NoiseEstimate(*map(t, (value, low, high, 1.0, value, resolved, 100, 100.0, False, 49.5)))


def follow(controller, value, low, high, updates):
    return [controller.update(estimate(value, low, high)) for _ in range(updates)]


def test_grows_by_doubling_to_the_noise_scale_and_stays():
    controller = BatchSizeController(8, count=1, patience=0)
    assert follow(controller, 80.0, 60.0, 110.0, 6) == [2, 4, 8, 8, 8, 8]  # 64 lies inside
    assert controller.batch_size == 64


def test_does_not_flutter_inside_the_interval_or_below_the_hysteresis():
    controller = BatchSizeController(8, count=8, patience=0)
    for value in (50.0, 90.0, 64.0, 75.0):
        assert controller.update(estimate(value, value - 30, value + 30)) == 8
    assert controller.update(estimate(74.0, 70.0, 78.0)) == 8  # 9 of 8: below a quarter more


def test_patience_waits_between_changes():
    controller = BatchSizeController(1, count=1, patience=2)
    assert follow(controller, 100.0, 90.0, 110.0, 7) == [2, 2, 2, 4, 4, 4, 8]


def test_shrinks_by_half_at_most():
    down = BatchSizeController(8, count=16, patience=0)
    assert follow(down, 16.0, 12.0, 20.0, 4) == [8, 4, 2, 2]


def test_unresolved_estimates_raise_but_never_lower():
    controller = BatchSizeController(8, count=4, patience=0)
    assert controller.update(estimate(math.nan, 0.0, math.inf)) == 4
    assert controller.update(estimate(math.nan, 56.0, math.inf)) == 7
    assert controller.update(estimate(10.0, 1.0, math.inf)) == 7


def test_an_unresolved_estimate_with_an_upper_end_lowers_nothing():
    """A negative noise leaves no value, but an interval near zero."""
    controller = BatchSizeController(8, count=8, patience=0)
    assert controller.update(estimate(math.nan, 0.0, 1e-3, resolved=False)) == 8
    assert controller.update(estimate(math.nan, 80.0, 90.0, resolved=False)) == 10
    assert controller.update(estimate(1e-3, 0.0, 2e-3)) == 5


def test_bounds_and_factor():
    controller = BatchSizeController(8, count=2, min_count=2, max_count=5, patience=0, factor=0.5)
    assert follow(controller, 1000.0, 900.0, 1100.0, 3) == [4, 5, 5]
    assert follow(controller, 1.0, 0.5, 2.0, 3) == [3, 2, 2]


def test_state_goes_on():
    first = BatchSizeController(1, count=1, patience=2)
    follow(first, 100.0, 90.0, 110.0, 2)
    second = BatchSizeController(1, count=1, patience=2)
    second.load_state_dict(first.state_dict())
    assert follow(second, 100.0, 90.0, 110.0, 3) == follow(first, 100.0, 90.0, 110.0, 3)


def test_bad_arguments():
    with pytest.raises(InputError, match="`count`"):
        BatchSizeController(8).load_state_dict({})
    with pytest.raises(InputError, match="`max_count`"):
        BatchSizeController(8, min_count=4, max_count=2)
    with pytest.raises(InputError, match="`count`"):
        BatchSizeController(8, count=3, max_count=2)
    controller = BatchSizeController(8)
    before = controller.state_dict()
    with pytest.raises(InputError, match="`estimate`"):
        controller.update(500.0)
    assert controller.state_dict() == before


def test_by_default_a_single_process_can_always_measure():
    """With one micro-batch a step there would be nothing to compare."""
    controller = BatchSizeController(16, patience=0)
    assert (controller.count, controller.min_count) == (2, 2)
    assert follow(controller, 1.0, 0.5, 2.0, 3) == [2, 2, 2]
    assert BatchSizeController(16, count=1).min_count == 1
