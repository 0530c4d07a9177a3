"""A step of every optimizer of the table, in every mode and type."""

import pytest
import torch

from tests.contracts.problems import (
    DTYPES,
    assert_same,
    every_type,
    give_gradients,
    parameters,
    run,
    snapshot,
    tensors_of,
)
from tests.contracts.table import TABLE, every_optimizer, every_optimizer_and_mode
from tests.covering import covering


@pytest.mark.few(14)
@covering(entry=TABLE, dtype=DTYPES, maximize=[False, True], shape=[(), (1,)])
def test_a_closure_has_gradients_and_its_loss_goes_the_right_way(entry, dtype, maximize, shape):
    draw = torch.Generator().manual_seed(2024)
    weight, x = (torch.randn(size, generator=draw).to(dtype) for size in ((10, 5), (5,)))
    weight.requires_grad_()
    rate = torch.full(shape, 0.02, dtype=torch.float64)
    optimizer = entry([weight], lr=rate, maximize=maximize)

    def closure():
        optimizer.zero_grad()
        loss = (weight @ x).square().sum()
        (-loss if maximize else loss).backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] is rate


@every_optimizer_and_mode
@every_type
def test_gradients_types_and_shapes_stay_as_they_are(entry, dtype):
    params = parameters(dtype)
    optimizer = entry(params)
    before = [(name, t.dtype, t.shape) for name, t in tensors_of(optimizer)]
    for step in range(9):
        give_gradients(params, step, none=False)
        gradients = [p.grad.clone() for p in params]
        optimizer.step()
        assert_same(gradients, [p.grad for p in params])
    assert [(name, t.dtype, t.shape) for name, t in tensors_of(optimizer)] == before
    is_coded = entry.coded and dtype is not torch.float64
    for p, state in zip(params, optimizer.state_dict()["state"].values(), strict=True):
        assert {"step", "skipped", *entry.large} <= {*state}
        assert state["step"] == (9 if p.numel() else 0)
        assert ("master_weight" in state) == (dtype in (torch.bfloat16, torch.float16))
        for name in entry.large:
            is_code = is_coded and p.ndim > 1 and p.numel() > 0
            expected = (torch.uint8,) if is_code else (torch.float32, torch.float64)
            assert state[name].dtype in expected
            assert state[name].shape == p.shape


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


@every_optimizer_and_mode
def test_none_gradients_mean_what_the_entry_says(entry):
    params = parameters()
    optimizer = entry(params)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert_same(before, [p.detach() for p in params])
    run(optimizer, params, range(3), none=False)
    before = params[0].detach().clone()
    give_gradients(params, 3)
    params[0].grad = None
    optimizer.step()
    assert (not torch.equal(before, params[0])) == entry.none_moves


@every_optimizer_and_mode
def test_empty_groups_and_parameters_without_elements(entry):
    empty = [torch.zeros(0, 3, requires_grad=True), torch.zeros(2, 0, requires_grad=True)]
    alone = entry([{"params": []}, {"params": empty}])
    for p in empty:
        p.grad = torch.zeros_like(p)
    assert alone.step(lambda: 2.0) == 2.0
    assert {float(alone.state[p]["step"]) for p in empty} == {0.0}
    assert alone.skipped == 0
    assert entry([{"params": []}]).skipped == 0
    params, others = parameters(), parameters()
    ours, theirs = entry([{"params": []}, {"params": params}]), entry(others)
    run(ours, params, range(3))
    run(theirs, others, range(3))
    assert ours.skipped == 0
    assert_same(snapshot(ours, params), snapshot(theirs, others))


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
    with pytest.warns(UserWarning, match="3 steps in a row") as caught:
        skip(5)
    assert len(caught) == 1
    optimizer.warn_after_skips = None
    run(optimizer, params, [2])
    skip(5)
    assert optimizer.skipped == 14
