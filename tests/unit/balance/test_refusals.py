"""Wrong arguments and calls that fail: a clear error each, and nothing has changed afterwards."""

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import (
    CALLS,
    WEIGHTS,
    Aggregator,
    assert_same_state,
    changed,
    draw,
    go_back,
    gradient_handed_on,
    losses_of,
    mass_of,
    same_y,
    state_of,
)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"weights": {}}, "weights"),
        ({"weights": {"a": 0, "b": 0.0}}, "weights"),
        ({"weights": {"a": 1, "b": -1}}, r"weights\['b'\]"),
        ({"weights": {"a": float("nan")}}, r"weights\['a'\]"),
        ({"weights": [1, 2]}, "weights"),
        ({"weights": {"a.b": 1.0}}, "weights"),
        ({"weights": {3: 1.0}}, "weights"),
        *(({name: 1}, name) for name in ("balance_grads", "per_batch_item", "batch_independent")),
        ({"lag": "yes"}, "lag"),
        ({"monitor": None}, "monitor"),
        ({"total_norm": 0.0}, "total_norm"),
        ({"ema_decay": 1.5}, "ema_decay"),
        ({"eps": -1.0}, "eps"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"process_group": 3}, "process_group"),
        ({"combine": 3}, "combine.*gramian_weighting"),
        ({"combine": nn.Identity()}, "combine.*gramian_weighting"),
    ],
)
def test_constructor(arguments, match):
    with pytest.raises(InputError, match=match) as caught:
        LossBalancer(**{"weights": WEIGHTS, **arguments})
    assert "Remedy:" in str(caught.value)
    assert "\n" not in str(caught.value)


def alike(products):
    return products.new_ones(3)


def make_used(**options):
    """A balancer in the midst of an accumulation, and all that a call may change."""
    balancer = LossBalancer({**WEIGHTS, "watched": 0.0}, accumulation_steps=2, **options)
    for seed in range(3):
        gradient_handed_on(balancer, losses_of, draw(4, 7, seed=seed))
    return balancer, state_of(balancer)


def complex_y(y):
    z = torch.view_as_complex(y[:, :6].reshape(4, 3, 2).contiguous())
    return {"l1": z.abs().mean()}, z


# From an output to losses and what is called y; and what the error names.
CALLED = {
    "no losses": (lambda y: ({}, y), "losses"),
    "all missing": (lambda y: ({"l1": None}, y), "losses"),
    "no weight": (lambda y: ({"watched": y.sum()}, y), "losses"),
    "unknown": (lambda y: ({**losses_of(same_y(y)), "l3": y.sum()}, y), "losses.*'l3'"),
    "detached": (lambda y: ({"l1": y.detach().sum()}, y), "'l1'"),
    "apart": (lambda y: ({"l1": y.mean(), "l2": draw(3).requires_grad_().sum()}, y), "'l2'"),
    "from a copy": (lambda y: ({"l1": (y + 0).mean()}, y.clone()), "'l1'"),
    "one from the other": (lambda y: ({"l1": y.mean()}, [y, 2 * y]), "`y`"),
    "no gradient": (lambda y: ({"l1": y.mean()}, y.detach()), "`y`"),
    "no tensor": (lambda y: ({"l1": y.mean()}, {"y": 3}), "`y`"),
    "no batch": (lambda y: ({"l1": y.mean()}, y.mean()), "per_batch_item"),
    "other batch": (lambda y: ({"l1": y.mean()}, [y, draw(2, 7).requires_grad_()]), "dimension"),
    "complex": (complex_y, "`y`.*complex"),
}


@pytest.mark.parametrize("wrong", CALLED)
def test_backward(wrong):
    make, match = CALLED[wrong]
    balancer, before = make_used()
    source = draw(4, 7).requires_grad_()
    losses, y = make(source * 1)
    with pytest.raises(InputError, match=match):
        balancer.backward(losses, y)
    assert source.grad is None
    assert_same_state(state_of(balancer), before)


def test_a_batch_independent_norm_needs_one_number_of_items():
    y = [draw(4, 7).requires_grad_(), draw(2, 7).requires_grad_()]
    losses = lambda ys: {"a": ys["a"][0].sum() + ys["a"][1].sum()}
    whole = {"weights": {"a": 1}, "per_batch_item": False}
    with pytest.raises(InputError, match="batch_independent"):
        go_back(LossBalancer(**whole, batch_independent=True), y, losses)
    # The whole batch's norm does not ask for the number of items.
    go_back(LossBalancer(**whole), y, losses)
    assert y[1].grad.norm().item() == pytest.approx((14 / 42) ** 0.5)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"l3": 1.0}, "l3"),
        ({"l1": -1.0}, "l1"),
        (dict.fromkeys(WEIGHTS, 0.0), "weights"),
        (3, "weights"),
    ],
)
def test_weights_are_changed_by_name_only(wrong, match):
    balancer = LossBalancer(WEIGHTS)
    with pytest.raises(InputError, match=match):
        balancer.set_weights(wrong)
    with pytest.raises(TypeError):
        balancer.weights["l1"] = 3.0
    assert balancer.weights == WEIGHTS


def freed(y):
    loss = y.exp().mean()
    torch.autograd.grad(loss, y)
    return loss


def no_convergence(products):
    raise ArithmeticError("no convergence")


# A loss's rule or an aggregator that fails, after two losses were differentiated.
FAILS = {
    "several numbers": (lambda y: y.abs(), alike, "scalar"),
    "freed graph": (freed, alike, "second time"),
    "aggregator": (torch.sum, no_convergence, "no convergence"),
    "too few weights": (torch.sum, lambda products: products.new_ones(2), r"\(2,\)"),
    "no vector": (torch.sum, lambda products: products.new_ones(3, 1), r", 1\)"),
    "no tensor": (torch.sum, lambda products: [1.0] * 3, "list"),
}


@CALLS
@pytest.mark.parametrize("what", FAILS)
def test_a_call_that_fails_counts_nothing(call, what):
    rule, weigh, match = FAILS[what]
    balancer, before = make_used(combine=Aggregator(alike))
    balancer.aggregator.gramian_weighting = weigh
    source = draw(4, 7).requires_grad_()
    with pytest.raises((ArithmeticError, RuntimeError, InputError), match=match):
        go_back(balancer, source * 1, changed(adv=rule, watched=None), call)
    assert source.grad is None
    assert_same_state(state_of(balancer), before)


def test_each_loss_s_own_backward_through_one_fork_is_refused():
    """The second pass would see one loss alone, with all of the total, and count as a step."""
    balancer = LossBalancer(WEIGHTS)
    source = draw(4, 7).requires_grad_()
    losses = list(losses_of(balancer.fork(source * 1)).values())
    losses[0].backward()
    before, gradient = state_of(balancer), source.grad.clone()
    with pytest.raises(InputError, match="one `fork`"):
        losses[1].backward()
    assert_same_state(state_of(balancer), before)
    assert torch.equal(source.grad, gradient)
    # A fork of its own may follow.
    gradient_handed_on(balancer, losses_of, draw(4, 7), "fork")
    assert mass_of(balancer)[1] == 1.0
