"""Values that must not reach a weight or a state, from any source."""

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from tests.contracts.problems import (
    assert_same,
    give_gradients,
    parameters,
    run,
    snapshot,
    tensors_of,
)
from tests.contracts.table import OPTIMIZERS, TABLE
from tests.covering import covering

every_optimizer = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)
NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.few(49)
@covering(entry=TABLE, size=[1e-30, 1e-20, 1e15, 1e18, 4e18, 1e19, 3e38], at=[0, 1, 6])
def test_finite_gradients_of_any_size_leave_all_finite(entry, size, at):
    """Squares and sums of them overflow long before a gradient does."""
    params = parameters()
    for p in params:
        p.data.mul_(6)
    optimizer = entry(params)
    for step in range(9):
        give_gradients(params, step, none=False)
        if step == at:
            for p in params:
                p.grad.copy_(p.detach() / 6 * size)
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in params)
    assert all(
        torch.isfinite(t).all() for n, t in tensors_of(optimizer) if n != "model_norm_threshold"
    )


@every_optimizer
def test_one_bad_group_stops_them_all(entry):
    params = parameters()
    optimizer = entry([{"params": params[:3]}, {"params": params[3:], "lr": 0.005}])
    run(optimizer, params, range(3))
    before = snapshot(optimizer, params)
    give_gradients(params, 3)
    params[5].grad = None
    params[6].grad[0, 0] = -torch.inf
    optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    counts = [optimizer.state[p]["skipped"].item() for p in params]
    assert counts == [1.0] * 7


@every_optimizer
def test_the_count_of_skipped_steps_is_saved(entry):
    params, others = parameters(), parameters()
    optimizer, other = entry(params), entry(others)
    give_gradients(params, 0)
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped == 1
    run(other, others, [0])
    assert (other.skipped, optimizer.skipped) == (1, 1)
    assert other.skipped.data_ptr() != optimizer.skipped.data_ptr()


@every_optimizer
def test_a_first_group_may_be_empty(entry):
    params = parameters()
    optimizer = entry([{"params": []}, {"params": params}])
    run(optimizer, params, range(3))
    assert optimizer.skipped == 0
    assert optimizer.state[params[0]]["step"] == 3


@covering(entry=TABLE, dtype=NARROW, way=["no_grad", "data", "load"], after=[1, 2, 3])
def test_weights_written_later_are_kept(entry, dtype, way, after):
    model = nn.Linear(4, 3).to(dtype)
    optimizer = entry(model.parameters(), lr=1e-6)
    for step in range(after):
        give_gradients(model.parameters(), step, none=False)
        optimizer.step()
    value = torch.full((3, 4), 2.0, dtype=dtype)
    if way == "no_grad":
        with torch.no_grad():
            model.weight.copy_(value)
    elif way == "data":
        model.weight.data.copy_(value)
    else:
        model.load_state_dict({"weight": value, "bias": model.bias.detach().clone()})
    give_gradients(model.parameters(), 3, none=False)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), value, rtol=0.02, atol=0)


@every_optimizer
def test_placeholders_may_come_before_the_real_parameters(entry):
    """As Accelerate prepares a model for `fully_shard`."""
    params = parameters()
    optimizer = entry(params)
    group = optimizer.param_groups[0]
    group["params"] = [torch.empty(1) for _ in params]
    assert optimizer.skipped == 0
    group["params"] = others = [p.detach().clone().requires_grad_() for p in params]
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, others, range(3))
    assert {*optimizer.state} == {*others}
    fresh = parameters()
    run(entry(fresh), fresh, range(3))
    assert_same(fresh, others)


@every_optimizer
def test_a_refused_group_leaves_the_optimizer_as_it_was(entry):
    params = parameters()
    optimizer = entry(params)
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 2.0)}, {"foreach": True, "fused": True}):
        with pytest.raises(InputError):
            optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)], **wrong})
    other = torch.ones(2, requires_grad=True)
    wrongs = {"params": [other, params[0]]}, {"params": {other}}, [other]
    for wrong in ({"params": [torch.ones(2).long()]}, *wrongs):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group(wrong)
    assert len(optimizer.param_groups) == 1
    assert {*optimizer.state} == {*params}
    fresh = parameters()
    run(optimizer, params, range(2))
    run(entry(fresh), fresh, range(2))
    assert_same(fresh, params)


@every_optimizer
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
            scaler.step(ours)
            scaler.update()
    assert ours.skipped == (2 if by_itself else 0)
    # Powers of two scale exactly.
    assert_same(scaled, plain)
    assert not hasattr(ours, "grad_scale")


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, *OPTIMIZERS.values()], ids=["torch", *OPTIMIZERS]
)
@pytest.mark.parametrize("unscaled", [True, False])
def test_a_grad_scaler_may_meet_no_gradient_at_all(make, unscaled):
    used, idle = parameters(), parameters()
    one, two = make(used, fused=True), make(idle, fused=True)
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


@every_optimizer
def test_an_error_leaves_nothing_of_a_scaler_behind(entry):
    """The next step would take the product of both scales."""
    params = parameters()
    optimizer, scaler = entry(params, fused=True), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    give_gradients(params, 0, none=False)
    optimizer.param_groups[0]["eps"] = -1.0
    with pytest.raises(InputError, match="`eps`"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & {*vars(optimizer)}


def test_only_fused_steps_take_what_a_scaler_leaves():
    """Lightning clips no gradients, and Accelerate sees no skipped step, where they do."""
    for entry in OPTIMIZERS.values():
        found = [
            entry(parameters(), **mode)._step_supports_amp_scaling
            for mode in ({"fused": True}, {"fused": None}, {"fused": False}, {"foreach": True})
        ]
        assert found == [True, False, False, False]


@every_optimizer
def test_many_skipped_steps_in_a_row_are_told_once(entry):
    params = parameters()
    optimizer = entry(params)
    optimizer.warn_after_skips = 3

    def skip(count):
        for _ in range(count):
            give_gradients(params, 0, none=False)
            params[0].grad[0, 0] = torch.nan
            optimizer.step()

    skip(2)
    run(optimizer, params, [1])  # not in a row
    skip(2)
    with pytest.warns(UserWarning, match=r"3 steps in a row.*diagnostics\(\)") as caught:
        skip(5)
    assert len(caught) == 1
    optimizer.warn_after_skips = None
    run(optimizer, params, [2])
    skip(5)
    assert optimizer.skipped == 14


# As large as leaves the gradients numbers of their type.
LARGE_SCALES = {
    "float32": (torch.float32, 2.0**124),
    "bfloat16": (torch.bfloat16, 2.0**124),
    "float64": (torch.float64, 2.0**140),
}


@covering(entry=OPTIMIZERS, types=LARGE_SCALES, how=["fused", "foreach"])
@pytest.mark.parametrize("maximize", [False, True])
def test_no_loss_scale_is_too_large(entry, types, how, maximize):
    """Squares of gradients with it, and their products with weights, are past float32."""
    dtype, scale = types
    both = []
    for own in (None, torch.tensor(scale, dtype=torch.float64)):
        params = parameters(dtype)
        for p in params:
            p.data.mul_(30)
        optimizer = entry(params, **{how: True}, maximize=maximize)
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
    # A power of two scales exactly.
    assert_same(*both)


@covering(entry=OPTIMIZERS, scale=[0.0, 2.0**-149, torch.nan, torch.inf], how=["fused", "foreach"])
def test_a_step_that_is_skipped_changes_nothing_whatever_the_loss_scale(entry, scale, how):
    """A scaler that meets one bad step after the other halves its scale to zero."""
    params = parameters()
    optimizer = entry(params, **{how: True})
    run(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    give_gradients(params, 2)
    params[0].grad[0, 0] = torch.nan
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.ones(1)
    optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    assert optimizer.skipped == 1


@every_optimizer
def test_a_loss_scale_meets_no_small_factor_first(entry):
    """Where numbers below the least normal one are zeros, their products would be."""
    assert torch.set_flush_denormal(True)
    try:
        both = []
        for scale in (1.0, 2.0**110):
            p = torch.ones(5000, requires_grad=True)
            optimizer = entry([p])
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(1)
            for _ in range(3):
                p.grad = torch.full((5000,), 1e3 * scale)
                optimizer.step()
            both.append(snapshot(optimizer, [p]))
        assert_same(*both)
    finally:
        torch.set_flush_denormal(False)
