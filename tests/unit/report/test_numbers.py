"""Numbers are written the way people read them."""

import math
from collections.abc import Callable

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

INF, NAN = math.inf, math.nan
WRITTEN = {
    show: {
        None: "–", NAN: "–", INF: "∞", -INF: "−∞", True: "yes", 0: "0", 254_720: "254,720",
        -3: "−3", 1234.5: "1,234", 99.96: "100", 0.0123: "0.0123", 0.00282842: "0.00283",
        -0.0004: "−4e−4", 1.25e-9: "1.25e−9", 3e8: "3e8", 10.0: "10", "sqrt": "sqrt",
    },
    loss: {
        1.7: "1.7000", -2.5: "−2.5000", NAN: "–", INF: "∞", 2: "2.0000", 2.26849: "2.2685",
        1.2e-5: "1.2e−5", 0.01234: "0.01234", None: "–",
    },
    short: {8: "8", 999: "999", 2000: "2K", 1.5e6: "1.5M", 3e9: "3B"},
    size: {8: "8", 38.608: "38.6", 512: "512", 1024: "1024", 65_536: "65.5K"},
    percent: {
        0.154: "15%", -0.02: "−2%", 3.0: "300% or more", INF: "300% or more", None: "–", NAN: "–",
    },
}  # fmt: skip
ENDS = {
    interval: {
        (48, 128): "48 – 128", (41.0, INF): "≥ 41", (0.0, INF): "0 – ∞", (-INF, INF): "−∞ – ∞",
        (NAN, 3.0): "–", (None, 3.0): "–",
    },
    percent_interval: {
        (0.1, 3.5): "10% to 300% or more", (1 / 1.5 - 1, 0.2): "below −33% to 20%",
        (None, None): "–",
    },
}  # fmt: skip


@pytest.mark.parametrize("function", WRITTEN)
def test_a_number(function: Callable[[object], str]):
    assert {value: function(value) for value in WRITTEN[function]} == WRITTEN[function]
    assert show(0.0) == "0"


@pytest.mark.parametrize("function", ENDS)
def test_an_interval(function: Callable[[object, object], str]):
    assert {ends: function(*ends) for ends in ENDS[function]} == ENDS[function]
