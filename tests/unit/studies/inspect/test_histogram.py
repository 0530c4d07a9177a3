"""Counts, from steps made by hand into fields of a record."""

import pytest
import torch
from msgspec.structs import replace

from steadygrad.scale import MeasuredExponents
from steadygrad.scale.equations import exponent_histogram
from steadygrad.studies.inspect.analysis import counts_of, lost, shares_of
from steadygrad.studies.inspect.schema import Histogram
from steadygrad.studies.inspect.trials import ExponentHistograms, _histogram
from tests.reference.layerwise import fates
from tests.unit.studies.inspect.runs import parts

NAMES = ["", "a"]


def measured(values, scales=(4.0, 8.0)):
    """The same gradients at the boundaries and in the weights, of the layer ``a`` only."""
    rows = torch.stack([exponent_histogram(torch.tensor(row)) for row in ([], values)])
    return MeasuredExponents(rows, rows, torch.tensor(scales))


def test_a_skipped_step():
    histograms = ExponentHistograms(NAMES)
    histograms.add(measured([0.0, 1.0, 4.0]), [])
    histograms.add(measured([2.0, torch.inf, torch.nan]), ["a"])
    fields = histograms.fields(plain=False)
    assert fields["skipped"] == 1
    # Its finite gradients are not those of the batch; what was not finite is counted.
    expected = Histogram(zero=1, low=0, counts=(1, 0, 1), over=2)
    assert fields["weights"] == fields["activations"] == {"a": expected}
    assert fields["largest"]["weights"] == {"a": 2.0 - 3.0}


def test_overflows_and_the_least_scale_at_which_they_happened():
    histograms = ExponentHistograms(NAMES)
    for scale in (16.0, 8.0, 32.0):
        histograms.add(measured([torch.inf], (4.0, scale)), ["a"])
    # One that no scale prevents says nothing of scales.
    histograms.add(measured([torch.inf], (1.0, 2.0)), ["", "a"], ["a"])
    fields = histograms.fields(plain=False)
    assert fields["overflows"] == {"": 1, "a": 4}
    assert fields["at_any_scale"] == {"a": 1}
    assert fields["overflowed_at"] == {"": 0.0, "a": 3.0}
    assert fields["skipped"] == 4


def test_what_gradients_would_be_without_scales():
    """Step by step: scales move within a part."""
    histograms = ExponentHistograms(NAMES)
    histograms.add(measured([0.0, 8.0, 2.0]), [])
    histograms.add(measured([0.0, 64.0, 2.0**-148], (1.0, 64.0)), [])
    fields = histograms.fields(plain=True)
    # 8/8, 64/64; 2/8; what is beyond float32 stays at its end.
    expected = Histogram(zero=2, low=-149, counts=(1, *[0] * 146, 1, 0, 2), over=0)
    assert fields["plain"] == {kind: {"a": expected} for kind in ("activations", "weights")}
    assert histograms.fields(plain=False)["plain"] == {"activations": {}, "weights": {}}


def test_what_a_scale_makes_zero_or_subnormal():
    """As torch counts it for float16."""
    values = [0.0, 1.0, 2.0**-10, 2.0**-14, 2.0**15, torch.inf]
    row = exponent_histogram(torch.tensor(values))
    held = _histogram(row.double())
    (counted,) = counts_of(parts("before", {"a": held}, {})).values()
    for log2 in (-45, -30, -15, -12, -5, -1, 0, 1):
        zero, flushed, subnormal, overflow = fates(values, 2.0**log2, torch.float16)
        # Of the second half of eight parts, with six values each.
        assert lost(counted, log2) == pytest.approx(4 * 6 * (flushed + subnormal))
        (found,) = shares_of(
            parts("before", {"a": replace(held, low=held.low + log2)}, {})
        ).values()
        expected = (zero + flushed, subnormal, overflow)
        assert (found.zero, found.subnormal, found.overflow) == pytest.approx(expected)
