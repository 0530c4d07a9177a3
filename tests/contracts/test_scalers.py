"""Gradient scalers: what they find, and scales of any size."""

import pytest
import torch

from tests.contracts.problems import NARROW, assert_same, give_gradients, parameters, run, snapshot
from tests.contracts.table import OPTIMIZERS, TABLE, every_optimizer, every_optimizer_and_mode
from tests.covering import covering


@every_optimizer_and_mode
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_a_grad_scaler_skips_what_overflows_and_goes_on(entry, dtype):
    scaled, plain = parameters(dtype), parameters(dtype)
    ours, theirs = entry(scaled), entry(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    # As in torch: a fused step does what is left to do itself, and the host does not wait.
    by_itself = bool(ours.param_groups[0]["fused"])
    if dtype is torch.float16 and not by_itself:
        give_gradients(scaled, 0, none=False)
        scaler.scale(torch.zeros(()))
        with pytest.raises(ValueError, match="unscale FP16 gradients"):
            scaler.step(ours)
        return
    for step in range(8):
        give_gradients(plain, step, none=False)
        theirs.step()
        for bad in (True, False) if step in (0, 4) else (False,):
            scaler.scale(torch.zeros(()))  # as for a loss; the gradients follow by hand
            give_gradients(scaled, step, none=False)
            for p in scaled:
                p.grad.mul_(scaler.get_scale())
            if bad:
                scaled[0].grad[0, 0] = torch.inf
            elif step in (4, 5) and dtype is not torch.float16:
                scaler.unscale_(ours)  # as for clipping in between
            scaler.step(ours)
            scaler.update()
    assert ours.skipped == (2 if by_itself else 0)
    # Powers of two scale exactly.
    assert_same(scaled, plain)
    assert not hasattr(ours, "grad_scale")


@every_optimizer
@pytest.mark.parametrize("unscaled", [True, False])
def test_a_grad_scaler_may_meet_no_gradient_at_all(entry, unscaled):
    used, idle = parameters(), parameters()
    one, two = entry(used, fused=True), entry(idle, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    before = [p.detach().clone() for p in idle]
    for step in range(2):
        give_gradients(used, step, none=False)
        if unscaled:
            scaler.unscale_(two)
        scaler.step(one)
        scaler.step(two)
        scaler.update()
    assert_same(idle, before)
    assert not {"grad_scale", "found_inf"} & {*vars(two)}


def test_only_fused_steps_take_what_a_scaler_leaves():
    """Lightning clips no gradients, and Accelerate sees no skipped step, where they do."""
    for entry in OPTIMIZERS.values():
        found = [
            entry(parameters(), **mode)._step_supports_amp_scaling
            for mode in ({"fused": True}, {"fused": None}, {"fused": False}, {"foreach": True})
        ]
        assert found == [True, False, False, False]


@covering(entry=TABLE, scale=[4.0, 0.0, 2.0**-149, torch.nan, torch.inf], bad=[False, True])
def test_a_step_that_a_scaler_stops_changes_nothing(entry, scale, bad):
    """Only the scaler may know. One that meets bad steps alone halves its scale to zero."""
    params = parameters()
    optimizer = entry([{"params": params[:3]}, {"params": params[3:], "lr": 0.005}])
    run(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    give_gradients(params, 2)
    if bad:
        params[0].grad[0, 0] = torch.nan
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.ones(1)
    optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    assert {state["skipped"].item() for state in optimizer.state.values()} == {1.0}
    del optimizer.found_inf, optimizer.grad_scale
    run(optimizer, params, [2])
    assert not torch.equal(before[0], params[0])


# As large as leaves the gradients numbers of their type.
LARGE_SCALES = {
    "float32": (torch.float32, 2.0**124),
    "bfloat16": (torch.bfloat16, 2.0**124),
    "float64": (torch.float64, 2.0**140),
}


@covering(entry=TABLE, types=LARGE_SCALES, flushed=[False, True])
def test_no_loss_scale_is_too_large(entry, types, flushed):
    """Squares of gradients with it, and their products with weights, are past float32.

    Where numbers below the least normal one are zeros, no small factor may come first.
    """
    (dtype, scale), both = types, []
    assert torch.set_flush_denormal(flushed)
    try:
        for own in (None, torch.tensor(scale, dtype=torch.float64)):
            params = [*parameters(dtype), torch.ones(5000, dtype=dtype, requires_grad=True)]
            for p in params:
                p.data.mul_(30)
            optimizer = entry(params)
            if own is not None:
                optimizer.grad_scale, optimizer.found_inf = own, torch.zeros(1)
            for step in range(9):
                give_gradients(params, step)
                for p in params:
                    if p.grad is not None:
                        p.grad.mul_(1.0 if own is None else own)
                optimizer.step()
            assert optimizer.skipped == 0
            both.append(snapshot(optimizer, params))
    finally:
        torch.set_flush_denormal(False)
    # A power of two scales exactly.
    assert_same(*both)
