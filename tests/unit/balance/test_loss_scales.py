"""Factors on losses: loss scales, and numbers of micro-batches."""

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steadygrad import LossBalancer
from tests.reference.balance import ReferenceBalancer
from tests.unit.balance.problems import (
    WEIGHTS,
    averages_of,
    draw,
    gradient_handed_on,
    gradients_of,
    losses_of,
    make_model,
    mass_of,
    partial_gradients,
    run,
    same_y,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


class HalfHead(nn.Module):
    """A model whose output, and so every partial gradient, is in float16."""

    def __init__(self):
        super().__init__()
        self.body = make_model(torch.float32)

    def forward(self, x):
        return self.body(x).half()


@CALLS
@pytest.mark.parametrize("micro", [1, 4])
def test_float16_under_a_scaler_equals_float32(call, micro):
    """Losses of about 1e-5, whose gradients lie below float16's normal numbers unscaled."""
    x = draw(8, 5, dtype=torch.float32)
    full, half = make_model(torch.float32), HalfHead()
    half.body.load_state_dict(full.state_dict())
    scaler = GradScaler("cpu", init_scale=2.0**14)
    ours, exact = (
        LossBalancer(WEIGHTS, batch_independent=True),
        LossBalancer(WEIGHTS, batch_independent=True),
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (full, half)]
    for _ in range(3):
        for part in range(micro):
            rows = slice(part * 8 // micro, (part + 1) * 8 // micro)
            target = draw(8, 7, seed=1, dtype=torch.float32)[rows]
            small = 1e-3 / micro
            run(exact, full(x[rows]), target, call, small, accumulation_steps=micro)
            factor = scaler.scale(torch.tensor(small))
            run(
                ours, half(x[rows]), target, call, factor,
                accumulation_steps=micro, grad_scale=scaler,
            )  # fmt: skip
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
    model = HalfHead()
    x, target = draw(4, 5, dtype=torch.float32), draw(4, 7, seed=1, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    balancer = LossBalancer(WEIGHTS)
    weights = [p.clone() for p in model.parameters()]
    run(balancer, model(x), target, call, scaler.scale(torch.ones(())), grad_scale=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0**23
    assert balancer.metrics["nonfinite_l2"].item() == 1
    # The step is skipped, so the other losses' averages wait too.
    assert mass_of(balancer).tolist() == [0.0] * 3


class Doubling:
    """A scaler as far as it is asked: it multiplies by its scale."""

    def scale(self, outputs):
        return 2 * outputs


@CALLS
def test_only_a_scaler_is_handed_what_is_not_finite(call):
    """A number skips no step: with it a broken loss is left out, as without any scale."""
    y = draw(4, 7)
    twice = lambda ys: {k: 2 * v for k, v in make(ys).items()}  # noqa: E731
    broken = lambda ys: {**twice(ys), "l2": ys["l2"].sum() * torch.nan}  # noqa: E731
    for scale in (2.0, torch.tensor(2.0)):
        balancer = LossBalancer(WEIGHTS, grad_scale=scale)
        got = gradient_handed_on(balancer, broken, y, call)
        fresh = LossBalancer({"l1": 1, "adv": 4})
        some = lambda ys: {k: v for k, v in make(ys).items() if k != "l2"}  # noqa: E731
        expected = 2 * gradient_handed_on(fresh, some, y, call)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
        assert mass_of(balancer).tolist() == [1.0, 0.0, 1.0]
    balancer = LossBalancer(WEIGHTS, grad_scale=Doubling())
    assert gradient_handed_on(balancer, broken, y, call).isnan().all()
    assert mass_of(balancer).tolist() == [0.0] * 3
    # Nothing of a loss without weight is in the gradient: there is nothing to skip.
    balancer = LossBalancer({**WEIGHTS, "l2": 0.0}, grad_scale=Doubling())
    got = gradient_handed_on(balancer, broken, y, call)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert mass_of(balancer).tolist() == [1.0, 0.0, 1.0]


@CALLS
@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_step_that_overflows_in_one_micro_batch_moves_no_average(call, spoiled):
    y = draw(4, 7)
    balancer, plain = (
        LossBalancer(WEIGHTS, grad_scale=Doubling(), accumulation_steps=3) for _ in range(2)
    )
    broken = lambda ys: {**make(ys), "l2": ys["l2"].sum() * torch.inf}  # noqa: E731
    for part in range(3):
        losses = broken if part == spoiled else make
        got = gradient_handed_on(balancer, losses, 3 * y, call)
        assert got.isnan().all() == (part == spoiled)
    assert mass_of(balancer).tolist() == [0.0] * 3
    # And the next step is one like any other.
    for _ in range(3):
        got = gradient_handed_on(balancer, make, y, call)
        assert torch.equal(got, gradient_handed_on(plain, make, y, call))
    assert mass_of(balancer).tolist() == [1.0] * 3


def test_a_step_is_ended_by_hand():
    """As at the end of an epoch, when nobody knew that this micro-batch would be the last."""
    balancer, y = LossBalancer({"a": 1}, accumulation_steps=4), draw(4, 7)
    line = lambda slope: lambda ys: {"a": slope * ys["a"].sum()}  # noqa: E731
    balancer.end_step()
    for slope in (0.25, 0.75):
        gradient_handed_on(balancer, line(slope), y)
    assert mass_of(balancer).item() == 0
    for _ in range(2):
        balancer.end_step()
        assert mass_of(balancer).item() == 1
        # Slopes of 1 and 3, divided by four micro-batches, for items of seven numbers.
        assert averages_of(balancer).item() == pytest.approx(2 * 7**0.5)
    for part in range(4):
        assert mass_of(balancer).item() == 1, part
        gradient_handed_on(balancer, line(0.25), y)
    assert mass_of(balancer).item() == pytest.approx(1.999)


def test_a_skipped_step_that_is_ended_by_hand_moves_no_average():
    balancer, y = LossBalancer({"a": 1}, accumulation_steps=4, grad_scale=Doubling()), draw(4, 7)
    for slope in (1.0, torch.nan):
        gradient_handed_on(balancer, lambda ys, s=slope: {"a": s * ys["a"].sum()}, y)
    balancer.end_step()
    assert mass_of(balancer).item() == 0
    assert balancer.state.numbers().skipped.item() == 0


def test_a_disabled_scaler_is_none():
    got = LossBalancer(WEIGHTS, grad_scale=GradScaler("cpu", enabled=False))
    poisoned = lambda ys: {**make(ys), "l2": ys["l2"].sum() * torch.nan}  # noqa: E731
    assert torch.isfinite(gradient_handed_on(got, poisoned, draw(4, 7))).all()


@CALLS
@pytest.mark.parametrize("per_item", [True, False])
def test_one_and_four_accumulation_steps_agree(call, per_item):
    """With lagging averages to rounding, once there are some; the averages from the start."""
    options = {"batch_independent": True, "per_batch_item": per_item, "lag": True, "eps": 0}
    results = {}
    for micro in (1, 4):
        model, balancer = make_model(), LossBalancer(WEIGHTS, **options)
        results[micro] = []
        for step in range(4):
            x, target = draw(8, 5, seed=step), draw(8, 7, seed=50 + step)
            for a, b in zip(x.split(8 // micro), target.split(8 // micro), strict=True):
                run(balancer, model(a), b, call, 1 / micro, accumulation_steps=micro)
            if step > 0:
                results[micro].append(gradients_of(model))
            model.zero_grad()
        results[micro].append(averages_of(balancer))
    for one, four in zip(results[1], results[4], strict=True):
        torch.testing.assert_close(four, one, rtol=1e-11, atol=1e-13)


def test_micro_batches_follow_the_literal_rule():
    """Pooled norms, losses missing in some micro-batches, batches of several sizes."""
    options = {"ema_decay": 0.5, "total_norm": 2.0}
    balancer, reference = LossBalancer(WEIGHTS, **options), ReferenceBalancer(WEIGHTS, **options)
    there = [["l1", "l2", "adv"], ["l2"], ["l1", "adv"]]
    for step in range(3):
        micros, got = [], []
        for part, names in enumerate(there):
            y, target = draw(4, 7, seed=10 * step + part), draw(4, 7, seed=99)
            some = lambda ys, t=target, n=names: losses_of({k: ys[k] for k in n}, t)  # noqa: E731
            third = lambda ys, s=some: {k: v / 3 for k, v in s(ys).items()}  # noqa: E731
            got.append(3 * gradient_handed_on(balancer, third, y, accumulation_steps=3))
            leaf = y.requires_grad_()
            grads = partial_gradients(some(same_y(leaf)), leaf)
            micros.append([{k: g.tolist() for k, g in grads.items()}])
        expected = reference.step(micros, [4])
        for g, (e,) in zip(got, expected, strict=True):
            wanted = torch.tensor(e, dtype=torch.float64)
            torch.testing.assert_close(g, wanted, rtol=1e-11, atol=1e-14)


def test_a_step_cut_short_ends_with_what_it_has():
    """As at the end of an epoch: told of fewer micro-batches, the step is over."""
    balancer, y = LossBalancer({"a": 1}), draw(4, 7)
    line = lambda slope: lambda ys: {"a": slope * ys["a"].sum()}  # noqa: E731
    gradient_handed_on(balancer, line(0.5), y, accumulation_steps=2)
    assert mass_of(balancer).item() == 0
    gradient_handed_on(balancer, line(3.0), y, accumulation_steps=1)
    assert mass_of(balancer).item() == 1
    # The mean of slopes 1 (a half of two) and 3, for items of seven numbers.
    expected = pytest.approx(2 * 7**0.5)
    assert averages_of(balancer).item() == expected


def test_a_lagging_first_step_uses_its_own_norm():
    lag, plain = LossBalancer(WEIGHTS, lag=True), LossBalancer(WEIGHTS)
    y = draw(4, 7)
    got = gradient_handed_on(lag, make, y)
    assert torch.equal(got, gradient_handed_on(plain, make, y))
    # Then the average as it was before, while the other one has moved.
    gradient_handed_on(lag, make, 5 * y)
    gradient_handed_on(plain, make, 5 * y)
    first = plain.state.numbers().total[1] - lag.metrics["norm_l2"]
    torch.testing.assert_close(lag.metrics["average_l2"], first / 0.999, rtol=1e-9, atol=0)
    assert lag.metrics["average_l2"] < 0.9 * plain.metrics["average_l2"]


def test_a_step_that_was_open_when_saved_is_open_when_loaded():
    first, second = LossBalancer({"a": 1}), LossBalancer({"a": 1})
    y, line = draw(4, 7), lambda slope: lambda ys: {"a": slope * ys["a"].sum()}
    gradient_handed_on(first, line(0.5), y, accumulation_steps=2)
    second.load_state_dict(first.state_dict())
    gradient_handed_on(second, line(3.0), y, accumulation_steps=1)
    # Slopes of 1 and 3: what was saved belongs to the step that is ended now.
    assert averages_of(second).item() == pytest.approx(2 * 7**0.5)
    third = LossBalancer({"a": 1})
    third.load_state_dict(first.state_dict())
    third.end_step()
    assert averages_of(third).item() == pytest.approx(7**0.5)


@CALLS
def test_resumed_between_micro_batches(call):
    whole, first, second = (LossBalancer(WEIGHTS, accumulation_steps=3) for _ in range(3))
    for step in range(6):
        y = draw(4, 7, seed=step)
        expected = gradient_handed_on(whole, make, y, call)
        if step == 4:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        got = gradient_handed_on(first if step < 4 else second, make, y, call)
        assert torch.equal(got, expected)
    for one, other in zip(whole.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
