"""Sixteen bits without masters, gradients of another type, and devices without float64."""

import pytest
import torch

from steadygrad import numerics
from tests.contracts.problems import NARROW, Watch, clones, give_gradients, parameters, run
from tests.contracts.table import OPTIMIZERS, every_optimizer
from tests.covering import covering
from tests.rounding import assert_alike

# None: compiled loops.
MODES = {"foreach": True, "single": False, "fused": None}
every_mode = pytest.mark.parametrize("foreach", MODES.values(), ids=MODES)
# A rounding may change a code.
WITHOUT_CODES = {name: entry for name, entry in OPTIMIZERS.items() if not entry.coded}


def states_of(optimizer, params):
    """States by name, masters and the record of skipped steps aside."""
    return [
        (name, t)
        for p in params
        for name, t in optimizer.state[p].items()
        if name not in ("skipped", "master_weight")
    ]


# Not pairs alone: each mode of each optimizer has code of its own for each type.
@pytest.mark.few(12)
@every_optimizer
@every_mode
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_without_a_master_a_step_is_that_in_float32_rounded_once(entry, dtype, foreach):
    params = parameters(dtype)
    optimizer = entry(params, master_weights=False, foreach=foreach)
    for step in range(9):
        twin = [p.detach().float().requires_grad_() for p in params]
        other = entry(twin, foreach=foreach)
        for p, q in zip(params, twin, strict=True):
            other.state[q].update({n: t.clone() for n, t in optimizer.state[p].items()})
        other._fill_state()
        give_gradients(params, step)
        for p, q in zip(params, twin, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        other.step()
        # Loops for 16 bits may add up in another order than those for float32; two operations of
        # the weight's own update may be one rounding in float32 and a tie in 16 bits apart.
        rounded = [("weight", q.to(dtype)) for q in twin]
        assert_alike([("weight", p) for p in params], rounded, roundings=8)
        assert_alike(states_of(optimizer, params), states_of(other, twin), roundings=8)


@pytest.mark.few(6)
@covering(entry=WITHOUT_CODES, foreach=MODES, then=NARROW)
def test_gradients_may_stay_wider_than_their_weights(entry, foreach, then):
    """As where `p.data` is cast and `p.grad` is not."""
    params = parameters()
    optimizer = entry(params, foreach=foreach)
    run(optimizer, params, range(2))
    give_gradients(params, 3, none=False)
    for p in params:
        p.grad = p.grad.to(then).float()
        p.data = p.data.to(then)
    others = clones(params)
    other = entry(others, foreach=foreach)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, others, strict=True):
        assert p.grad.dtype is torch.float32
        q.grad = p.grad.to(then)
    optimizer.step()
    other.step()
    assert optimizer.skipped == 0
    assert_alike(
        [("weight", p) for p in params] + states_of(optimizer, params),
        [("weight", p) for p in others] + states_of(other, others),
    )


@every_optimizer
def test_devices_without_float64(entry, monkeypatch):
    """Columns are of float32 there, as on Apple's: the same but for its rounding."""
    narrow, wide = parameters(), parameters()
    theirs = entry(wide, foreach=True)
    run(theirs, wide, range(12))
    monkeypatch.setattr(numerics, "_WIDEST", {"cpu": torch.float32})
    ours = entry(narrow, foreach=True)
    with Watch() as watch:
        run(ours, narrow, range(6))
        ours.load_state_dict(ours.state_dict())
        run(ours, narrow, range(6, 12))
    assert torch.float32 in watch.types
    assert torch.float64 not in watch.types
    # A correction of one less a power near one loses up to four of seven digits in the first steps.
    for a, b in zip(narrow, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
