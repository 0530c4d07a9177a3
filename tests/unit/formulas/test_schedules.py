"""The factors of `WarmupHoldDecay` and `Eden` against literal references."""

import pytest

from steadygrad.formulas.schedules import eden, warmup_hold_decay
from tests.reference import schedules as reference


@pytest.mark.parametrize(
    ("total", "warmup", "hold"), [(40, 10, 10), (40, 0, 10), (40, 10, 0), (40, 0, 0), (7, 3, 4)]
)
def test_lines(total, warmup, hold):
    got = [warmup_hold_decay(t, total=total, warmup=warmup, hold=hold) for t in range(total + 3)]
    want = [reference.lans(t, total, warmup, hold) for t in range(total + 3)]
    assert got == pytest.approx(want, rel=1e-15)  # one rounding
    assert max(got) == 1
    assert got[total:] == [0, 0, 0]


@pytest.mark.parametrize("warmup", [0, 1, 500])
@pytest.mark.parametrize("epoch", [0, 0.5, 30])
@pytest.mark.parametrize("batch", [0, 1, 250, 499, 500, 100_000])
def test_eden(batch, epoch, warmup):
    scales = {"lr_batches": 5000, "lr_epochs": 3.5}
    got = eden(batch, epoch, **scales, warmup_batches=warmup, warmup_start=0.5)
    want = reference.icefall_eden(batch, epoch, **scales, warmup_batches=warmup)
    assert got == pytest.approx(want, rel=1e-14)  # roots by another road


def test_eden_far_out_is_an_inverse_square_root():
    scales = {"lr_batches": 100, "lr_epochs": 1, "warmup_batches": 0, "warmup_start": 0}
    assert eden(1e8, 0, **scales) == pytest.approx(1e-3, rel=1e-9)
    assert eden(0, 1e6, **scales) == pytest.approx(1e-3, rel=1e-9)
