"""The rule itself: against the literal reference, and where the answer is known."""

import pytest
import torch

from steadygrad import LossBalancer
from tests.reference.balance import ReferenceBalancer
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
    make_model,
    partial_gradients,
    same_y,
)

# float64; sums of a few dozen numbers in another order
CLOSE = {"rtol": 1e-11, "atol": 1e-14}

OPTIONS = {
    "default": {},
    "whole batch": {"per_batch_item": False, "ema_decay": 0.9, "total_norm": 3.0},
    "batch-independent": {"batch_independent": True, "ema_decay": 0.5},
    "whole, batch-independent": {"batch_independent": True, "per_batch_item": False},
    "no average": {"ema_decay": 0.0},
    "mean of all": {"ema_decay": 1.0},
    "weighted": {"balance_grads": False},
    "large eps": {"eps": 0.3},
}


def reference_for(options, weights=WEIGHTS):
    names = {"per_batch_item": "per_item", "balance_grads": "balance"}
    return ReferenceBalancer(weights, **{names.get(k, k): v for k, v in options.items()})


@pytest.mark.parametrize("call", ["backward", "fork"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_literal_rule(options, call):
    balancer, reference = LossBalancer(WEIGHTS, **options), reference_for(options)
    for step in range(6):
        y, target = draw(4, 7, seed=step) * (step + 1), draw(4, 7, seed=100 + step)
        got = gradient_handed_on(balancer, lambda ys, t=target: losses_of(ys, t), y, call)
        leaf = y.requires_grad_()
        grads = partial_gradients(losses_of(same_y(leaf), target), leaf)
        ((expected,),) = reference.step([[{k: g.tolist() for k, g in grads.items()}]], [4])
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_both_calls_agree_to_the_bit(options):
    trajectories = []
    for call in ("backward", "fork"):
        model, balancer = make_model(torch.float32), LossBalancer(WEIGHTS, **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(8):
            x, target = (draw(6, n, seed=step + n, dtype=torch.float32) for n in (5, 7))
            y = model(x)
            if call == "fork":
                sum(losses_of(balancer.fork(y), target).values()).backward()
            else:
                balancer.backward(losses_of(same_y(y), target), y)
            optimizer.step()
            optimizer.zero_grad()
        state = balancer.state_dict()
        trajectories.append([*model.state_dict().values(), *state.values()])
    for one, other in zip(*trajectories, strict=True):
        assert torch.equal(one, other)


def test_effective_loss_is_the_losses_times_their_scales():
    balancer = LossBalancer(WEIGHTS)
    y, target = draw(4, 7).requires_grad_(), draw(4, 7, seed=1)
    losses = losses_of(same_y(y), target)
    effective = balancer.backward(losses, y)
    metrics = balancer.metrics
    expected = sum(metrics[f"scale_{k}"] * loss.detach() for k, loss in losses.items())
    torch.testing.assert_close(effective, expected, **CLOSE)
    assert not effective.requires_grad
    assert effective.shape == ()


def norm_of(loss, leaf):
    """The mean over items of each item's norm."""
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0].norm(dim=1).mean()


@pytest.mark.parametrize("where", ["constructor", "call"])
def test_the_effective_loss_is_that_of_losses_that_carry_nothing(where):
    told = {"grad_scale": 8.0, "accumulation_steps": 4}
    y = draw(4, 7)
    leaf = y.clone().requires_grad_()
    losses = losses_of(same_y(leaf), draw(4, 7, seed=1))
    plain = LossBalancer(WEIGHTS).backward(losses, leaf, retain_graph=True)
    balancer = LossBalancer(WEIGHTS, **(told if where == "constructor" else {}))
    carried = {k: 2 * v for k, v in losses.items()}
    options = told if where == "call" else {}
    effective = balancer.backward(carried, leaf, retain_graph=True, **options)
    torch.testing.assert_close(effective, plain, rtol=1e-12, atol=0)
    # The pool holds norms without either.
    assert balancer.state.numbers().position.tolist() == [1.0] * 3
    torch.testing.assert_close(
        balancer.metrics["norm_l2"], norm_of(losses["l2"], leaf), rtol=1e-12, atol=0
    )
    # One that is not finite counts as none, and not as NaN.
    broken = {**carried, "l2": leaf.sum() * torch.nan}
    effective = balancer.backward(broken, leaf, retain_graph=True, **options)
    scales = balancer.metrics
    rest = sum(scales[f"scale_{k}"] * losses[k].detach() for k in ("l1", "adv"))
    torch.testing.assert_close(effective, rest, rtol=1e-12, atol=0)


@pytest.mark.parametrize("call", ["backward", "fork"])
def test_one_loss_is_its_own_backward_up_to_the_scale(call):
    y = draw(4, 7)
    make = lambda ys: {"a": (ys["a"] ** 3).mean()}  # noqa: E731
    got = gradient_handed_on(LossBalancer({"a": 2.5}, total_norm=3.0), make, y, call)
    plain = gradient_handed_on(LossBalancer({"a": 1}, balance_grads=False), make, y, call)
    torch.testing.assert_close(plain, 3 * y**2 / y.numel(), **CLOSE)
    ratio = got / plain
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), **CLOSE)
    assert got.norm(dim=1).mean().item() == pytest.approx(3.0, rel=1e-9)  # eps of 1e-12


def directions(angle):
    """Two losses with gradients of norm 1e-3 and 50 at an angle (cosine), one item."""
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    b = torch.tensor([angle, (1 - angle**2) ** 0.5], dtype=torch.float64)
    return lambda ys: {"a": 1e-3 * (ys["a"] @ a).sum(), "b": 50 * (ys["b"] @ b).sum()}


@pytest.mark.parametrize(
    ("angle", "expected"),
    [
        (1.0, 1.0),  # aligned: the norms add up to the total
        (0.0, (0.25**2 + 0.75**2) ** 0.5),  # orthogonal: as in Pythagoras
        (-1.0, 0.5),  # opposed: what is left of 3/4 after 1/4
    ],
    ids=["aligned", "orthogonal", "opposed"],
)
@pytest.mark.parametrize("call", ["backward", "fork"])
def test_norm_of_the_sum(angle, expected, call):
    balancer = LossBalancer({"a": 1, "b": 3}, monitor=True)
    got = gradient_handed_on(balancer, directions(angle), draw(1, 2), call)
    assert got.norm().item() == pytest.approx(expected, rel=1e-9)
    assert balancer.metrics["total"].item() == pytest.approx(expected, rel=1e-9)
    assert balancer.metrics["cosine_a_b"].item() == pytest.approx(angle, abs=1e-12)
    assert balancer.metrics["share_after_a"].item() == pytest.approx(0.25)
    assert balancer.metrics["share_before_a"].item() == pytest.approx(1e-3 / 50.001)


def test_equal_losses_are_one_loss():
    y, target = draw(4, 7), draw(4, 7, seed=1)
    both = lambda ys: {k: (ys[k] - target).square().mean() for k in ys}  # noqa: E731
    two = gradient_handed_on(LossBalancer({"a": 1, "b": 3}), both, y)
    one = gradient_handed_on(LossBalancer({"a": 1}), both, y)
    torch.testing.assert_close(two, one, **CLOSE)


def test_scale_of_a_loss_does_not_matter():
    y, target = draw(4, 7), draw(4, 7, seed=1)

    def scaled(factor):
        def make(ys):
            losses = losses_of(ys, target)
            return {**losses, "adv": factor * losses["adv"]}

        return gradient_handed_on(LossBalancer(WEIGHTS, eps=0), make, y)

    torch.testing.assert_close(scaled(1e6), scaled(1.0), **CLOSE)


def test_metrics_name_shares_before_and_after():
    balancer = LossBalancer(WEIGHTS)
    assert balancer.metrics == {}
    target = draw(4, 7, seed=1)
    gradient_handed_on(balancer, lambda ys: losses_of(ys, target), draw(4, 7))
    metrics = {k: v.item() for k, v in balancer.metrics.items()}
    norms = {k: metrics[f"norm_{k}"] for k in WEIGHTS}
    for name, weight in WEIGHTS.items():
        assert metrics[f"share_before_{name}"] == pytest.approx(norms[name] / sum(norms.values()))
        assert metrics[f"ratio_{name}"] == pytest.approx(metrics[f"share_before_{name}"])
        # In the first step the average is the step's own norm.
        assert metrics[f"share_after_{name}"] == pytest.approx(weight / 7)
        assert metrics[f"target_{name}"] == pytest.approx(weight / 7)
        assert metrics[f"average_{name}"] == pytest.approx(norms[name])
        assert metrics[f"scale_{name}"] == pytest.approx(weight / 7 / norms[name])


@pytest.mark.parametrize(("balance_grads", "expected"), [(False, 99.0), (True, 0.0)])
def test_passes_encodecs_own_test(balance_grads, expected):
    """Its `test()`: two losses that pull one number apart, one of them a hundred times as hard."""
    x = torch.zeros(1, requires_grad=True)
    one = torch.ones_like(x)
    losses = {
        "1": torch.nn.functional.l1_loss(x, one),
        "2": 100 * torch.nn.functional.l1_loss(x, -one),
    }
    balancer = LossBalancer({"1": 1, "2": 1}, balance_grads=balance_grads)
    balancer.backward(losses, x)
    assert torch.allclose(x.grad, torch.tensor(expected))
