"""Factors on losses: loss scales, and numbers of micro-batches."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steadygrad import LossBalancer
from tests.unit.balance.problems import (
    CALLS,
    WEIGHTS,
    Scaler,
    assert_same_state,
    averages_of,
    changed,
    draw,
    go_back,
    gradient_handed_on,
    gradients_of,
    losses_of,
    make_model,
    mass_of,
    same_y,
    slope,
    state_of,
    times,
)

# A loss that overflows.
BROKEN = changed(l2=lambda y: y.sum() * torch.inf)


@CALLS
@pytest.mark.parametrize("where", ["constructor", "call"])
@pytest.mark.parametrize("scale", [65536.0, torch.tensor(65536.0), Scaler(65536.0)], ids=type)
def test_a_loss_scale_scales_the_gradient_and_no_average(call, where, scale):
    plain = LossBalancer(WEIGHTS, per_batch_item=call == "fork")
    given = {"grad_scale": scale}
    told, options = (given, {}) if where == "constructor" else ({}, given)
    scaled = LossBalancer(WEIGHTS, per_batch_item=call == "fork", **told)
    for step in range(3):
        y = draw(4, 7) + step
        expected = gradient_handed_on(plain, losses_of, y, call)
        got = gradient_handed_on(scaled, times(65536), y, call, **options)
        assert torch.equal(got, 65536 * expected)  # a power of two
    # A scaler that is a module stays outside, too.
    assert_same_state(state_of(scaled), state_of(plain))


class HalfHead(nn.Module):
    """A model whose output, and so every partial gradient, is in float16."""

    def __init__(self):
        super().__init__()
        self.body = make_model(torch.float32)

    def forward(self, x):
        return self.body(x).half()


@pytest.mark.parametrize(("call", "micro"), [("fork", 1), ("backward", 4), ("fork", 4)])
def test_float16_under_a_scaler_equals_float32(call, micro):
    """Losses of about 1e-5, whose gradients lie below float16's normal numbers unscaled."""
    x, y = draw(8, 5, dtype=torch.float32), draw(8, 7, seed=1, dtype=torch.float32)
    full, half = make_model(torch.float32), HalfHead()
    half.body.load_state_dict(full.state_dict())
    scaler = GradScaler("cpu", init_scale=2.0**14)
    options = {"batch_independent": True, "accumulation_steps": micro}
    ours, exact = LossBalancer(WEIGHTS, **options), LossBalancer(WEIGHTS, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (full, half)]
    for _ in range(3):
        for rows, target in zip(x.split(8 // micro), y.split(8 // micro), strict=True):
            small = times(1e-3 / micro, lambda ys, t=target: losses_of(ys, t))
            go_back(exact, full(rows), small, call)
            loud = times(scaler.scale(torch.ones(())), small)
            go_back(ours, half(rows), loud, call, grad_scale=scaler)
        scaler.unscale_(optimizers[1])
        expected, got = gradients_of(full), gradients_of(half)
        # y and its gradients are rounded to 11 bits, and sums of 8 items cancel a little.
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-3 * expected.abs().max().item())
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    # The averages hold unscaled norms.
    kept, wanted = averages_of(ours), averages_of(exact)
    torch.testing.assert_close(kept, wanted, rtol=2e-3, atol=0)
    assert kept.min() < 1e-4


@CALLS
def test_an_overflow_reaches_the_scaler_and_no_average(call):
    model, x = HalfHead(), draw(4, 5, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    balancer = LossBalancer(WEIGHTS)
    weights = [p.clone() for p in model.parameters()]
    loud = times(scaler.scale(torch.ones(())))
    go_back(balancer, model(x), loud, call, grad_scale=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0**23
    assert balancer.metrics["nonfinite_l2"].item() == 1
    # The step is skipped, so the other losses' averages wait too.
    assert mass_of(balancer).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "scale",
    [2.0, torch.tensor(2.0), GradScaler("cpu", init_scale=2.0, enabled=False)],
    ids=["number", "tensor", "disabled scaler"],
)
def test_without_a_scaler_a_broken_loss_is_left_out(scale):
    """A number skips no step. A disabled scaler scales nothing."""
    factor = 1 if isinstance(scale, GradScaler) else 2
    balancer, alone = LossBalancer(WEIGHTS, grad_scale=scale), LossBalancer({"l1": 1, "adv": 4})
    got = gradient_handed_on(balancer, times(factor, BROKEN), draw(4, 7))
    expected = factor * gradient_handed_on(alone, changed(l2=None), draw(4, 7))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert mass_of(balancer).tolist() == [1.0, 0.0, 1.0]


@CALLS
@pytest.mark.parametrize("combine", [None, "alike"])
def test_only_a_scaler_is_handed_what_is_not_finite(call, combine):
    """It has to see an overflow, or every step from now on overflows; no aggregator hides it."""
    if combine:
        combine = nn.Module()
        combine.gramian_weighting = lambda products: products.new_ones(3)
    y, options = draw(4, 7), {"grad_scale": Scaler(), "combine": combine}
    balancer = LossBalancer(WEIGHTS, **options)
    assert gradient_handed_on(balancer, BROKEN, y, call).isnan().all()
    assert mass_of(balancer).tolist() == [0.0] * 3
    assert torch.isfinite(gradient_handed_on(balancer, losses_of, y, call)).all()
    # Nothing of a loss without weight is in the gradient: there is nothing to skip.
    if combine is None:
        balancer = LossBalancer({**WEIGHTS, "l2": 0.0}, **options)
        assert torch.isfinite(gradient_handed_on(balancer, BROKEN, y, call)).all()
        assert mass_of(balancer).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_step_that_overflows_in_one_micro_batch_moves_no_average(spoiled):
    y, options = draw(4, 7), {"grad_scale": Scaler(), "accumulation_steps": 3}
    balancer, plain = LossBalancer(WEIGHTS, **options), LossBalancer(WEIGHTS, **options)
    for part in range(3):
        losses = BROKEN if part == spoiled else losses_of
        got = gradient_handed_on(balancer, losses, 3 * y)
        assert got.isnan().all() == (part == spoiled)
    assert mass_of(balancer).tolist() == [0.0] * 3
    # And the next step is one like any other.
    for _ in range(3):
        got = gradient_handed_on(balancer, losses_of, y)
        assert torch.equal(got, gradient_handed_on(plain, losses_of, y))
    assert mass_of(balancer).tolist() == [1.0] * 3


@CALLS
def test_a_loss_scale_of_zero_leaves_every_loss_out(call):
    """No tensor is read to refuse it."""
    balancer = LossBalancer(WEIGHTS, grad_scale=torch.zeros(()))
    got = gradient_handed_on(balancer, times(0), draw(4, 7), call)
    assert torch.equal(got, torch.zeros_like(got))
    assert {balancer.metrics[f"nonfinite_{k}"].item() for k in WEIGHTS} == {1}
    assert mass_of(balancer).sum() == 0


def test_a_loss_scale_that_is_a_parameter_is_not_trained():
    scale = nn.Parameter(torch.tensor(2.0))
    y = draw(4, 7).requires_grad_()
    effective = LossBalancer(WEIGHTS, grad_scale=scale).backward(losses_of(same_y(y)), y)
    assert not effective.requires_grad
    assert scale.grad is None


@pytest.mark.parametrize("per_item", [True, False])
def test_one_and_four_accumulation_steps_agree(per_item):
    """With lagging averages to rounding, once there are some; the averages from the start."""
    options = {"batch_independent": True, "per_batch_item": per_item, "lag": True, "eps": 0}
    results = {}
    for micro in (1, 4):
        model, balancer = make_model(), LossBalancer(WEIGHTS, **options)
        results[micro] = []
        for step in range(4):
            x, target = draw(8, 5, seed=step), draw(8, 7, seed=50 + step)
            for a, b in zip(x.split(8 // micro), target.split(8 // micro), strict=True):
                part = times(1 / micro, lambda ys, t=b: losses_of(ys, t))
                go_back(balancer, model(a), part, accumulation_steps=micro)
            if step > 0:
                results[micro].append(gradients_of(model))
            model.zero_grad()
        results[micro].append(averages_of(balancer))
    for one, four in zip(results[1], results[4], strict=True):
        torch.testing.assert_close(four, one, rtol=1e-11, atol=1e-13)


def test_a_lagging_first_step_uses_its_own_norm():
    lag, plain = LossBalancer(WEIGHTS, lag=True), LossBalancer(WEIGHTS)
    y = draw(4, 7)
    got = gradient_handed_on(lag, losses_of, y)
    assert torch.equal(got, gradient_handed_on(plain, losses_of, y))
    first = averages_of(lag)[1]
    # Then the average as it was before, while the other one has moved.
    gradient_handed_on(lag, losses_of, 5 * y)
    gradient_handed_on(plain, losses_of, 5 * y)
    assert lag.metrics["average_l2"] == first
    assert lag.metrics["average_l2"] < 0.9 * plain.metrics["average_l2"]


def test_a_step_is_ended_by_hand():
    """As at the end of an epoch, when nobody knew that this micro-batch would be the last."""
    balancer, y = LossBalancer({"a": 1}, accumulation_steps=4), draw(4, 7)
    balancer.end_step()
    for factor in (0.25, 0.75):
        gradient_handed_on(balancer, slope(factor), y)
    assert mass_of(balancer).item() == 0
    for _ in range(2):
        balancer.end_step()
        assert mass_of(balancer).item() == 1
        # Slopes of 1 and 3, divided by four micro-batches, for items of seven numbers.
        assert averages_of(balancer).item() == pytest.approx(2 * 7**0.5)
    for part in range(4):
        assert mass_of(balancer).item() == 1, part
        gradient_handed_on(balancer, slope(0.25), y)
    assert mass_of(balancer).item() == pytest.approx(1.999)


def test_a_skipped_step_that_is_ended_by_hand_moves_no_average():
    balancer = LossBalancer({"a": 1}, accumulation_steps=4, grad_scale=Scaler())
    for factor in (1.0, torch.nan):
        gradient_handed_on(balancer, slope(factor), draw(4, 7))
    balancer.end_step()
    assert mass_of(balancer).item() == 0
    assert balancer.state.numbers().skipped.item() == 0


@pytest.mark.parametrize("loaded", [False, True])
def test_a_step_cut_short_ends_with_what_it_has(loaded):
    """As at the end of an epoch: told of fewer micro-batches, the step is over.

    Also one that was open when it was saved.
    """
    balancer, y = LossBalancer({"a": 1}), draw(4, 7)
    gradient_handed_on(balancer, slope(0.5), y, accumulation_steps=2)
    if loaded:
        saved, balancer = balancer.state_dict(), LossBalancer({"a": 1})
        balancer.load_state_dict(saved)
    assert mass_of(balancer).item() == 0
    gradient_handed_on(balancer, slope(3.0), y, accumulation_steps=1)
    assert mass_of(balancer).item() == 1
    # The mean of slopes 1 (a half of two) and 3, for items of seven numbers.
    assert averages_of(balancer).item() == pytest.approx(2 * 7**0.5)
