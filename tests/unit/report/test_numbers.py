"""Numbers are written the way people read them."""

import math

import pytest

from steadygrad.studies.text import (
    interval,
    loss,
    percent,
    percent_interval,
    short,
    show,
    size,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (True, "yes"),
        (0, "0"),
        (254_720, "254,720"),
        (-3, "−3"),
        (0.0, "0"),
        (1234.5, "1,234"),
        (99.96, "100"),
        (0.0123, "0.0123"),
        (0.00282842, "0.00283"),
        (-0.0004, "−4e−4"),
        (1.25e-9, "1.25e−9"),
        (3e8, "3e8"),
        (10.0, "10"),
        ("sqrt", "sqrt"),
    ],
)
def test_show(value: object, text: str):
    assert show(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.7, "1.7000"),
        (-2.5, "−2.5000"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (2, "2.0000"),
        (2.26849, "2.2685"),
        (1.2e-5, "1.2e−5"),
        (0.01234, "0.01234"),
        (None, "–"),
    ],
)
def test_loss(value: object, text: str):
    assert loss(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(8, "8"), (999, "999"), (2000, "2K"), (1.5e6, "1.5M"), (3e9, "3B")]
)
def test_short(value: float, text: str):
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(8, "8"), (38.608, "38.6"), (512, "512"), (1024, "1024"), (65_536, "65.5K")]
)
def test_size(value: float, text: str):
    assert size(value) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (48, 128, "48 – 128"),
        (41.0, math.inf, "≥ 41"),
        (0.0, math.inf, "0 – ∞"),
        (-math.inf, math.inf, "−∞ – ∞"),
        (math.nan, 3.0, "–"),
        (None, 3.0, "–"),
    ],
)
def test_interval(low: object, high: object, text: str):
    assert interval(low, high) == text


def test_percentages():
    assert [percent(x) for x in (0.154, -0.02, 3.0, math.inf, None, math.nan)] == [
        "15%",
        "−2%",
        "300% or more",
        "300% or more",
        "–",
        "–",
    ]
    assert percent_interval(0.1, 3.5) == "10% to 300% or more"
    assert percent_interval(1 / 1.5 - 1, 0.2) == "below −33% to 20%"
    assert percent_interval(None, None) == "–"
