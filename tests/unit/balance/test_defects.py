"""Fourteen things that break audiocraft's balancer, and do not break this one.

`test_original_defects.py` shows the original breaking, by the same numbers.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import (
    WEIGHTS,
    averages_of,
    draw,
    gradient_handed_on,
    losses_of,
    make_model,
    mass_of,
    parameters_of,
    same_y,
)

CLOSE = {"rtol": 1e-11, "atol": 1e-14}
CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


def without(name):
    return lambda ys: {k: v for k, v in make(ys).items() if k != name}


@CALLS
def test_1_losses_come_and_go(call):
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, make, y, call)
    before = averages_of(balancer)
    got = gradient_handed_on(balancer, without("adv"), y, call)
    # The two that are there share the total as if there had never been a third.
    alone = gradient_handed_on(LossBalancer({"l1": 1, "l2": 2}), without("adv"), y, call)
    torch.testing.assert_close(got, alone, **CLOSE)
    assert averages_of(balancer)[2] == before[2]
    assert torch.isfinite(gradient_handed_on(balancer, make, y, call)).all()


@CALLS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_2_a_gradient_that_is_not_finite_is_left_out_counted_and_named(call, bad):
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, make, y, call)
    before = averages_of(balancer)
    poisoned = lambda ys: {**make(ys), "l2": ys["l2"][0, 0] * bad}  # noqa: E731
    got = gradient_handed_on(balancer, poisoned, y, call)
    torch.testing.assert_close(
        got, gradient_handed_on(LossBalancer({"l1": 1, "adv": 4}), without("l2"), y), **CLOSE
    )
    assert torch.equal(averages_of(balancer)[1], before[1])
    counts = [balancer.metrics[f"nonfinite_{k}"].item() for k in WEIGHTS]
    assert counts == [0, 1, 0]
    healed = gradient_handed_on(balancer, make, y, call)
    torch.testing.assert_close(healed, gradient_handed_on(LossBalancer(WEIGHTS), make, y), **CLOSE)


@CALLS
@pytest.mark.parametrize("batch", [True, False])
def test_3_a_loss_scale_scales_the_gradient_and_no_average(call, batch):
    y = draw(4, 7)
    plain, scaled = (LossBalancer(WEIGHTS, per_batch_item=batch) for _ in range(2))
    for _ in range(3):
        expected = gradient_handed_on(plain, make, y, call)
        times = lambda ys: {k: 65536 * v for k, v in make(ys).items()}  # noqa: E731
        got = gradient_handed_on(scaled, times, y, call, grad_scale=65536.0)
        assert torch.equal(got, 65536 * expected)  # a power of two
        y = y + 1
    for a, b in zip(plain.state_dict().values(), scaled.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@CALLS
@pytest.mark.parametrize("batch", [True, False])
def test_4_micro_batches_add_up_to_one_step(call, batch):
    y = draw(4, 7)
    plain, parts = (LossBalancer(WEIGHTS, per_batch_item=batch) for _ in range(2))
    for _ in range(3):
        expected = gradient_handed_on(plain, make, y, call)
        eighth = lambda ys: {k: v / 8 for k, v in make(ys).items()}  # noqa: E731
        for _ in range(8):
            got = gradient_handed_on(parts, eighth, y, call, accumulation_steps=8)
            torch.testing.assert_close(got, expected / 8, **CLOSE)
        y = y + 1
    # The eight moved the averages once.
    for of in (averages_of, mass_of):
        torch.testing.assert_close(of(parts), of(plain), **CLOSE)


@CALLS
def test_5_float16_outputs_with_tiny_gradients(call):
    y = draw(4, 7).half()
    tiny = lambda ys: {"a": (ys["a"] * 2.0**-20).sum(), "b": (ys["b"] * 2.0**-3).sum()}  # noqa: E731
    balancer = LossBalancer({"a": 1, "b": 1}, total_norm=10.0)
    got = gradient_handed_on(balancer, tiny, y, call)
    assert balancer.metrics["scale_a"] > 65504
    assert got.dtype == torch.float16
    # Both point the same way, so each item's norm is the total; 1e-3: fp16 has 11 bits.
    torch.testing.assert_close(got.float().norm(dim=1), torch.full((4,), 10.0), rtol=1e-3, atol=0)


@CALLS
@pytest.mark.parametrize("per_item", [True, False])
def test_6_batch_size_does_not_matter_if_asked_for(call, per_item):
    """A batch that holds every item four times gives the model the same gradient."""
    grads = {}
    for copies in (1, 4):
        x, target = draw(6, 5).repeat(copies, 1), draw(6, 7, seed=1).repeat(copies, 1)
        for free in (False, True):
            model = make_model()
            balancer = LossBalancer(WEIGHTS, per_batch_item=per_item, batch_independent=free, eps=0)
            y = model(x)
            if call == "fork":
                sum(losses_of(balancer.fork(y), target).values()).backward()
            else:
                balancer.backward(losses_of(same_y(y), target), y)
            grads[free, copies] = model[0].weight.grad
    torch.testing.assert_close(grads[True, 4], grads[True, 1], **CLOSE)
    # By default as in the original: an item's gradient stays, and there are more of them.
    factor = 4.0 if per_item else 2.0
    torch.testing.assert_close(grads[False, 4], factor * grads[False, 1], **CLOSE)


@CALLS
def test_7_one_number_an_item(call):
    y = draw(5)
    ours = gradient_handed_on(LossBalancer({"a": 1}), lambda ys: {"a": ys["a"].sum()}, y, call)
    # Each item's norm is 1, so the balanced one is too; a norm of the whole would give 0.447.
    torch.testing.assert_close(ours, torch.ones_like(y), rtol=1e-9, atol=0)


@CALLS
def test_8_a_gradient_of_zero_is_left_out_counted_and_named(call):
    y = draw(4, 7)
    flat = lambda ys: {**make(ys), "l1": 0.0 * ys["l1"].sum() + 0.5}  # noqa: E731
    balancer = LossBalancer(WEIGHTS)
    gradient_handed_on(balancer, flat, y, call)
    assert balancer.metrics["zero_l1"].item() == 1
    assert mass_of(balancer).tolist() == [0.0, 1.0, 1.0]
    assert balancer.metrics["scale_l1"].item() == 0.0
    leaf = y.clone().requires_grad_()
    effective = LossBalancer(WEIGHTS).backward(flat(same_y(leaf)), leaf)
    assert effective.abs().item() < 100  # the original: 5e11 of 0.5


def head_loss():
    torch.manual_seed(1)
    head = nn.Linear(7, 1).double()
    return head, lambda ys: {"l1": (ys["l1"] - TARGET).abs().mean(), "adv": head(ys["adv"]).mean()}


def test_9_heads_get_the_gradients_of_an_ordinary_backward():
    head, make_both = head_loss()
    y = draw(4, 7)
    sum(make_both(same_y(y)).values()).backward()
    expected = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    balancer = LossBalancer({"l1": 1, "adv": 4})
    gradient_handed_on(balancer, make_both, y, "fork")
    for parameter, gradient in zip(head.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **CLOSE)


def test_9_a_loss_apart_from_y_is_refused_by_name():
    y, apart = draw(4, 7).requires_grad_(), draw(3).requires_grad_()
    balancer = LossBalancer(WEIGHTS)
    with pytest.raises(InputError, match="'adv' should depend on `y`"):
        balancer.backward({**make(same_y(y)), "adv": apart.sum()}, y)
    assert y.grad is None
    assert mass_of(balancer).sum() == 0


@CALLS
def test_10_shares_are_those_after_balancing(call):
    balancer, y = LossBalancer(WEIGHTS, monitor=True), draw(4, 7)
    got = gradient_handed_on(balancer, make, y, call)
    metrics = balancer.metrics
    assert metrics["share_after_adv"].item() == pytest.approx(4 / 7)
    assert metrics["ratio_adv"].item() < 0.01
    torch.testing.assert_close(metrics["total"], got.norm(), **CLOSE)


@CALLS
def test_11_targets_are_among_the_losses_that_are_there(call):
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, without("adv"), y, call)
    targets = [balancer.metrics[f"target_{k}"].item() for k in WEIGHTS]
    assert targets == [pytest.approx(1 / 3), pytest.approx(2 / 3), 0.0]


@CALLS
def test_12_compiled_heads_that_ran_an_ordinary_backward_before(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        head = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        compiled = torch.compile(head, backend="aot_eager")
        compiled(draw(4, 7).requires_grad_()).mean().backward()
        both = lambda h: lambda ys: {**without("adv")(ys), "adv": h(ys["adv"]).mean()}  # noqa: E731
        got = gradient_handed_on(LossBalancer(WEIGHTS), both(compiled), draw(4, 7), call)
        expected = gradient_handed_on(LossBalancer(WEIGHTS), both(head), draw(4, 7), call)
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("reentrant", [False, True])
@CALLS
def test_13_heads_under_activation_checkpointing(call, reentrant):
    head = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    through = lambda f: lambda ys: {**without("adv")(ys), "adv": f(ys["adv"]).mean()}  # noqa: E731
    again = lambda y: checkpoint(head, y, use_reentrant=reentrant)  # noqa: E731
    balancer = LossBalancer(WEIGHTS)
    expected = gradient_handed_on(LossBalancer(WEIGHTS), through(head), draw(4, 7))
    if reentrant and call == "backward":
        # torch's own limit: such a graph can only be walked by a plain backward, which fork has.
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            gradient_handed_on(balancer, through(again), draw(4, 7), call)
        assert mass_of(balancer).sum() == 0
        return
    got = gradient_handed_on(balancer, through(again), draw(4, 7), call)
    torch.testing.assert_close(got, expected, **CLOSE)


def train(model, balancer, optimizer, steps, call):
    for step in steps:
        y, target = model(draw(6, 5, seed=step)), draw(6, 7, seed=50 + step)
        if step % 3 == 2:
            target = target * 20
        if call == "fork":
            sum(losses_of(balancer.fork(y), target).values()).backward()
        else:
            balancer.backward(losses_of(same_y(y), target), y)
        optimizer.step()
        optimizer.zero_grad()


@CALLS
def test_14_killed_and_resumed_to_the_bit(call, tmp_path):
    def fresh():
        model = make_model(torch.float32).double()
        return model, LossBalancer(WEIGHTS), torch.optim.Adam(model.parameters(), lr=0.01)

    model, balancer, optimizer = fresh()
    train(model, balancer, optimizer, range(10), call)
    whole = parameters_of(model), list(balancer.state_dict().values())

    parts = fresh()
    train(*parts, range(4), call)
    torch.save([p.state_dict() for p in parts], tmp_path / "saved.pt")
    parts = fresh()
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    train(*parts, range(4, 10), call)
    assert torch.equal(parameters_of(parts[0]), whole[0])
    for one, other in zip(parts[1].state_dict().values(), whole[1], strict=True):
        assert torch.equal(one, other)


def test_the_numbers_of_the_problem_are_far_apart():
    """So that a test of balancing cannot pass by accident."""
    leaf = draw(4, 7).requires_grad_()
    losses = make(same_y(leaf))
    norms = {
        k: torch.autograd.grad(v, leaf, retain_graph=True)[0].norm(dim=1).mean().item()
        for k, v in losses.items()
    }
    assert norms["l2"] > 10 * norms["l1"] > 10 * norms["adv"]
    assert F.softplus(torch.zeros(())).item() == pytest.approx(math.log(2))
