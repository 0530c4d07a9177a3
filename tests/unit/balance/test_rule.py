"""The rule: against the literal reference, where the answer is known, and who takes part in it."""

import pytest
import torch

from steadygrad import LossBalancer
from steadygrad.balance.equations import gram
from tests.reference.balance import ReferenceBalancer
from tests.unit.balance.problems import (
    CALLS,
    CLOSE,
    WEIGHTS,
    assert_same_state,
    averages_of,
    changed,
    draw,
    gradient_handed_on,
    losses_of,
    same_y,
    state_of,
    times,
)

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


def reference_gradients(losses, y):
    """Each loss's gradient of y, as the reference takes those of one process."""
    leaf = y.clone().requires_grad_()
    found = losses(same_y(leaf)).items()
    return [{k: torch.autograd.grad(v, leaf, retain_graph=True)[0].tolist() for k, v in found}]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_both_calls_are_the_literal_rule(options):
    names = {"per_batch_item": "per_item", "balance_grads": "balance"}
    reference = ReferenceBalancer(WEIGHTS, **{names.get(k, k): v for k, v in options.items()})
    balancer, forked = LossBalancer(WEIGHTS, **options), LossBalancer(WEIGHTS, **options)
    for step in range(6):
        y, target = draw(4, 7, seed=step) * (step + 1), draw(4, 7, seed=100 + step)
        losses = lambda ys, t=target: losses_of(ys, t)
        got = gradient_handed_on(balancer, losses, y)
        assert torch.equal(gradient_handed_on(forked, losses, y, "fork"), got)
        ((expected,),) = reference.step([reference_gradients(losses, y)], [4])
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), **CLOSE)
    assert_same_state(state_of(forked), state_of(balancer))


def test_micro_batches_follow_the_literal_rule():
    """Pooled norms, and losses missing in some micro-batches."""
    options = {"ema_decay": 0.5, "total_norm": 2.0}
    balancer, reference = LossBalancer(WEIGHTS, **options), ReferenceBalancer(WEIGHTS, **options)
    there = [["l1", "l2", "adv"], ["l2"], ["l1", "adv"]]
    for step in range(3):
        micros, got = [], []
        for part, names in enumerate(there):
            y = draw(4, 7, seed=100 + 10 * step + part)
            some = lambda ys, n=names: losses_of({k: ys[k] for k in n})
            third = times(1 / 3, some)
            got.append(3 * gradient_handed_on(balancer, third, y, accumulation_steps=3))
            micros.append(reference_gradients(some, y))
        expected = reference.step(micros, [4])
        for g, (e,) in zip(got, expected, strict=True):
            torch.testing.assert_close(g, torch.tensor(e, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize(
    ("cosine", "expected"),
    [
        (1.0, 1.0),  # aligned: the norms add up to the total
        (0.0, (0.25**2 + 0.75**2) ** 0.5),  # orthogonal: as in Pythagoras
        (-1.0, 0.5),  # opposed: what is left of 3/4 after 1/4
    ],
    ids=["aligned", "orthogonal", "opposed"],
)
def test_norm_of_the_sum(cosine, expected):
    """Two losses with gradients of norm 1e-3 and 50, one item, and all metrics in closed form."""
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    b = torch.tensor([cosine, (1 - cosine**2) ** 0.5], dtype=torch.float64)
    losses = lambda ys: {"a": 1e-3 * (ys["a"] @ a).sum(), "b": 50 * (ys["b"] @ b).sum()}
    balancer = LossBalancer({"a": 1, "b": 3}, monitor=True)
    assert balancer.metrics == {}
    got = gradient_handed_on(balancer, losses, draw(1, 2))
    assert got.norm().item() == pytest.approx(expected, rel=1e-9)
    metrics = {k: v.item() for k, v in balancer.metrics.items()}
    assert metrics["total"] == pytest.approx(expected, rel=1e-9)
    assert metrics["cosine_a_b"] == pytest.approx(cosine, abs=1e-12)
    for name, norm, share in (("a", 1e-3, 0.25), ("b", 50.0, 0.75)):
        for key in ("ratio", "share_before"):
            assert metrics[f"{key}_{name}"] == pytest.approx(norm / 50.001)
        for key in ("share_after", "target"):
            assert metrics[f"{key}_{name}"] == pytest.approx(share)
        # In the first step the average is the step's own norm.
        assert metrics[f"norm_{name}"] == metrics[f"average_{name}"] == pytest.approx(norm)
        assert metrics[f"scale_{name}"] == pytest.approx(share / norm)


# How the second loss is left out, and the metric that counts it.
LEFT_OUT = {
    "missing": (None, None),
    "nan": (lambda y: y[0, 0] * torch.nan, "nonfinite"),
    "inf": (lambda y: y[0, 0] * torch.inf, "nonfinite"),
    "flat": (lambda y: 0.0 * y.sum() + 0.5, "zero"),
}


@CALLS
@pytest.mark.parametrize("why", LEFT_OUT)
def test_a_loss_that_takes_no_part_leaves_its_share_to_the_others(call, why):
    rule, count = LEFT_OUT[why]
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    healthy = gradient_handed_on(balancer, losses_of, y, call)
    average = averages_of(balancer)[1]
    got = gradient_handed_on(balancer, changed(l2=rule), y, call)
    alone = LossBalancer({"l1": 1, "adv": 4})
    torch.testing.assert_close(got, gradient_handed_on(alone, changed(l2=None), y), **CLOSE)
    metrics = balancer.metrics
    assert averages_of(balancer)[1] == average
    assert metrics["scale_l2"].item() == 0.0
    targets = [metrics[f"target_{k}"].item() for k in WEIGHTS]
    assert targets == [pytest.approx(1 / 5), 0.0, pytest.approx(4 / 5)]
    counts = {k: n.item() for k, n in metrics.items() if k.startswith(("nonfinite", "zero"))}
    assert {k: n for k, n in counts.items() if n} == ({f"{count}_l2": 1} if count else {})
    torch.testing.assert_close(gradient_handed_on(balancer, losses_of, y, call), healthy, **CLOSE)


@pytest.mark.parametrize(
    ("balance_grads", "weight", "rule", "value"),
    [
        # A mean over nothing: its value is NaN, and its gradient zero.
        (False, 3.0, lambda y: y[:0].mean(), 0.0),
        (True, 3.0, lambda y: y.sum() * torch.nan, 0.0),
        # The plain sum of values has also those without a slope.
        (False, 3.0, lambda y: 0 * y.sum() + 5, 15.0),
    ],
    ids=["empty", "nan", "flat"],
)
def test_the_effective_loss_has_no_loss_that_takes_no_part(balance_grads, weight, rule, value):
    y, options = draw(4, 7).requires_grad_(), {"balance_grads": balance_grads}
    alone = LossBalancer({"a": 2.0}, **options).backward({"a": y.square().mean()}, y)
    losses = {"a": y.square().mean(), "b": rule(y)}
    effective = LossBalancer({"a": 2.0, "b": weight}, **options).backward(losses, y)
    torch.testing.assert_close(effective, alone + value, rtol=0, atol=0)
    assert not effective.requires_grad


def test_gram_is_the_product_of_stacked_gradients():
    rows = [[draw(3, 2, seed=s), draw(4, seed=9 + s)] for s in range(3)]
    rows[1][0] = None
    filled = [[torch.zeros(3, 2) if t is None else t for t in row] for row in rows]
    matrix = torch.stack([torch.cat([t.flatten() for t in row]) for row in filled])
    torch.testing.assert_close(gram(rows), matrix @ matrix.T, rtol=1e-12, atol=1e-14)
    assert gram([rows[0], [], rows[2]])[1].tolist() == [0.0, 0.0, 0.0]
