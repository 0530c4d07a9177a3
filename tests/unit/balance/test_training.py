"""What happens to a balancer in training: loss scales, accumulation, weights, moves, copies."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steadygrad import LossBalancer
from tests.reference.balance import ReferenceBalancer
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    gradients_of,
    losses_of,
    make_model,
    partial_gradients,
    same_y,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


def run(balancer, y, target, call, factor=1.0, **options):
    """One backward pass of losses times a factor, by either call."""
    if call == "fork":
        (factor * sum(losses_of(balancer.fork(y, **options), target).values())).backward()
    else:
        losses = {k: factor * v for k, v in losses_of(same_y(y), target).items()}
        balancer.backward(losses, y, **options)


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
    kept, wanted = ours.core.averages.steps.value(), exact.core.averages.steps.value()
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
    assert balancer.left_out["nonfinite"]["l2"].item() == 1
    assert balancer.core.averages.steps.mass[1].item() == 0
    assert torch.isfinite(balancer.core.averages.steps.total).all()


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
        results[micro].append(balancer.core.averages.steps.value())
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
    assert balancer.core.averages.steps.mass.item() == 0
    gradient_handed_on(balancer, line(3.0), y, accumulation_steps=1)
    assert balancer.core.averages.steps.mass.item() == 1
    # The mean of slopes 1 (a half of two) and 3, for items of seven numbers.
    expected = pytest.approx(2 * 7**0.5)
    assert balancer.core.averages.steps.value().item() == expected


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


@CALLS
def test_weights_change_while_training(call):
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, make, y, call)
    balancer.set_weights({"adv": 0.5, "l2": 0})
    got = gradient_handed_on(balancer, make, y, call)
    fresh = LossBalancer({"l1": 1.0, "l2": 0.0, "adv": 0.5})
    torch.testing.assert_close(got, gradient_handed_on(fresh, make, y, call), rtol=1e-12, atol=0)
    assert balancer.weights == {"l1": 1.0, "l2": 0.0, "adv": 0.5}
    # A loss without weight is measured all the same.
    assert balancer.core.averages.steps.mass[1] > 1
    twin = LossBalancer(WEIGHTS)
    twin.load_state_dict(balancer.state_dict())
    assert twin.weights == balancer.weights


def test_state_finds_its_losses_by_name():
    balancer = LossBalancer(WEIGHTS)
    gradient_handed_on(balancer, make, draw(4, 7))
    turned = LossBalancer(dict(reversed(WEIGHTS.items())))
    turned.load_state_dict(balancer.state_dict())
    values = balancer.core.averages.steps.value()
    assert turned.core.averages.steps.value().tolist() == values.flip(0).tolist()
    assert turned.weights == WEIGHTS
    # And its own state still has its own order.
    again = LossBalancer(WEIGHTS)
    again.load_state_dict(turned.state_dict())
    assert torch.equal(again.core.averages.steps.value(), values)


def test_half_precision_models_keep_the_averages():
    model = nn.ModuleDict({"net": make_model(torch.float32), "balancer": LossBalancer(WEIGHTS)})
    gradient_handed_on(model["balancer"], make, draw(4, 7))
    before = copy.deepcopy(model["balancer"].state_dict())
    model.half().to("cpu").bfloat16()
    assert model["net"][0].weight.dtype == torch.bfloat16
    for key, value in model["balancer"].state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])


def test_copies_are_independent():
    balancer = LossBalancer(WEIGHTS)
    gradient_handed_on(balancer, make, draw(4, 7))
    twins = [copy.deepcopy(balancer), pickle.loads(pickle.dumps(balancer))]
    before = balancer.core.averages.steps.total.clone()
    for twin in twins:
        got = gradient_handed_on(twin, make, 2 * draw(4, 7))
        assert torch.isfinite(got).all()
        assert not torch.equal(twin.core.averages.steps.total, before)
    assert torch.equal(balancer.core.averages.steps.total, before)


def test_reset_forgets_averages_and_keeps_weights():
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, make, 100 * y)
    balancer.reset()
    got = gradient_handed_on(balancer, make, y)
    assert torch.equal(got, gradient_handed_on(LossBalancer(WEIGHTS), make, y))


def test_a_fork_in_evaluation_is_the_output_itself():
    balancer, model = LossBalancer(WEIGHTS), make_model()
    with torch.no_grad():
        y = model(draw(4, 5))
        ys = balancer.fork(y)
    assert set(ys) == set(WEIGHTS)
    assert all(v is y for v in ys.values())
    assert balancer.core.averages.steps.mass.sum() == 0
