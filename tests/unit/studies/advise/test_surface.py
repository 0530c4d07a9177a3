"""The model of extra samples over batch sizes and over training."""

import math

import pytest

from steadygrad.studies.advise.critical import Critical
from steadygrad.studies.advise.surface import Measured, Surface, extended

SIZES = (8, 16, 32, 64)


def point(samples: int, *excess: float, branch: int = 512) -> Measured:
    found = Critical(SIZES, excess, (), 1.0, 1.0, 1.0, "", 1.0, 1.0, 1.0, 1.0)
    return Measured(samples, branch, found)


def test_linear_between_sizes_and_on_the_trade_off_beyond():
    at = extended(SIZES, (0.0, 0.1, 0.3, 0.7))
    assert [at(size) for size in (4, 8, 12, 24, 64)] == pytest.approx([0, 0, 0.05, 0.2, 0.7])
    assert at(120) == pytest.approx(0.7 * (120 - 8) / (64 - 8))


def test_fewer_samples_do_not_become_ever_fewer_beyond_the_sizes_tried():
    """A line through a negative excess would reach -100% and turn signs round."""
    at = extended(SIZES, (-0.2, -0.2, -0.1, -0.1))
    assert at(10_000) == -0.1
    surface = Surface([point(4096, 0.0, -0.3, -0.3, -0.3)])
    assert all(1 + surface.excess(64, seen) > 0 for seen in surface.nodes)


def test_excess_between_points_before_the_first_and_after_the_last():
    surface = Surface([point(1024, 0.0, 0.2, 0.6, 1.4), point(4096, 0.0, 0.1, 0.3, 0.7)])
    first, last = 1024 + 256, 4096 + 256
    assert surface.excess(16, first) == pytest.approx(0.2)
    assert surface.excess(16, last) == surface.excess(16, 10**6) == pytest.approx(0.1)
    # Half of the way in 1/s.
    middle = 2 / (1 / first + 1 / last)
    assert surface.excess(16, middle) == pytest.approx(0.15)
    # As much of everything at half the samples as at twice the batch size.
    assert surface.excess(16, first / 2) == pytest.approx(0.6)


def test_the_grid_runs_from_the_first_step_to_the_end():
    surface = Surface([point(1024, 0.0, 0.2, 0.6, 1.4)])
    assert (surface.nodes[0], surface.end) == (8, 1024 + 512)
    assert surface.nodes[-1] == pytest.approx(surface.end)


def test_the_mean_weighs_by_samples():
    """Excess proportional to the size at all times: what is averaged is c/s, or 1 after c."""
    surface = Surface([point(1024, 0.0, 0.08, 0.24, 0.56, branch=2048)])
    centre, end = 2048, 3072

    def mean(size: int) -> float:
        before = 0.01 * (size * centre * math.log(centre / size) - 8 * (centre - size))
        return (before + 0.01 * (size - 8) * (end - centre)) / end

    expected = [(1 + mean(size)) / (1 + mean(8)) - 1 for size in SIZES]
    # The grid has steps of a tenth; halved steps come four times nearer.
    assert surface.mean() == pytest.approx(expected, rel=5e-3)


def test_tolerable_is_the_largest_size_within_the_tolerance():
    surface = Surface([point(1024, 0.0, 0.2, 0.6, 1.4), point(4096, 0.0, 0.1, 0.3, 0.7)])
    for seen, size in zip(surface.nodes, surface.tolerable(0.2), strict=True):
        if seen < 1280:
            continue
        extra = (1 + surface.excess(size, seen)) / (1 + surface.excess(8, seen)) - 1
        assert extra == pytest.approx(0.2, rel=1e-9)


def test_tolerable_does_not_decrease_and_keeps_what_needs_no_pooling():
    falls = [point(1024, 0.0, 0.0, 0.1, 0.3), point(8192, 0.0, 0.2, 0.4, 0.8)]
    fit = Surface(falls).tolerable(0.2)
    assert fit == sorted(fit)
    alone = [Surface([each]).tolerable(0.2)[-1] for each in falls]
    assert alone == pytest.approx([48, 16])
    assert 16 < fit[-1] < 48
    # Exactly the largest size: a rounding error below would give away a step of the grid.
    assert Surface([point(1024, 0.0, 0.0, 0.0, 0.2)]).tolerable(0.2)[-1] == 64


def test_before_the_first_point_nothing_larger_is_tolerable():
    """On a plateau of excesses the extrapolation would find all sizes equally good."""
    surface = Surface([point(1024, 0.0, 0.9, 0.9, 0.9)])
    fit = surface.tolerable(0.2)
    at_point = surface.tolerable(0.2)[-1]
    assert at_point == pytest.approx(8 + 8 * 0.2 / 0.9)
    assert max(fit) == at_point
