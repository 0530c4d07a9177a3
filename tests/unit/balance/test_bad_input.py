"""One clear error each, and nothing has changed afterwards."""

import copy
import sys

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import WEIGHTS, draw, losses_of, same_y

TARGET = draw(4, 7, seed=1)


def refused(match, **arguments):
    with pytest.raises(InputError, match=match) as caught:
        LossBalancer(**{"weights": WEIGHTS, **arguments})
    assert "Remedy:" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"weights": {}}, "at least one positive weight"),
        ({"weights": {"a": 0, "b": 0.0}}, "at least one positive weight"),
        ({"weights": {"a": 1, "b": -1}}, r"weights\['b'\].*\[0, inf\)"),
        ({"weights": {"a": float("nan")}}, r"weights\['a'\]"),
        ({"weights": [1, 2]}, "weights"),
        ({"total_norm": 0.0}, "total_norm"),
        ({"ema_decay": 1.5}, "ema_decay"),
        ({"eps": -1.0}, "eps"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"process_group": 3}, "process_group"),
        ({"combine": 3}, "combine"),
    ],
)
def test_constructor(arguments, match):
    refused(match, **arguments)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    refused(r"steadygrad\[torchjd\]", combine="UPGrad")


@pytest.fixture
def used():
    """A balancer in the middle of its life, and a call that would be right."""
    balancer = LossBalancer(WEIGHTS)
    for seed in range(2):
        y = draw(4, 7, seed=seed).requires_grad_()
        balancer.backward(losses_of(same_y(y), TARGET), y)
    return balancer


def no_losses(y):
    return {}, y


def all_missing(y):
    return {"l1": None}, y


def unknown(y):
    return {**losses_of(same_y(y), TARGET), "l3": y.sum()}, y


def detached(y):
    return {"l1": y.detach().sum()}, y


def apart(y):
    return {"l1": y.mean(), "l2": nn.Parameter(torch.ones(3)).sum()}, y


def from_a_copy(y):
    return {"l1": (y + 0).mean()}, y.clone()


def no_gradient(y):
    return {"l1": y.mean()}, y.detach()


def no_tensor(y):
    return {"l1": y.mean()}, {"y": 3}


def no_batch(y):
    return {"l1": y.mean()}, y.mean()


def other_batch(y):
    return {"l1": y.mean()}, [y, draw(2, 7).requires_grad_()]


def one_from_the_other(y):
    return {"l1": y.mean()}, [y, 2 * y]


def complex_output(y):
    z = torch.view_as_complex(y[:, :6].reshape(4, 3, 2).contiguous())
    return {"l1": z.abs().mean()}, z


CALLS = {
    no_losses: "loss with a positive weight",
    all_missing: "loss with a positive weight",
    unknown: "`losses` should be one of 'l1', 'l2', 'adv'. Found `losses = 'l3'`",
    detached: "'l1' should depend on `y`",
    apart: "'l2' should depend on `y`",
    from_a_copy: "'l1' should depend on `y`",
    no_gradient: "`y` should hold a tensor that requires a gradient",
    no_tensor: "`y` should hold a tensor that requires a gradient",
    no_batch: "common first dimension.*per_batch_item",
    other_batch: "common first dimension",
    one_from_the_other: "none is made from another",
    complex_output: "real tensors",
}


@pytest.mark.parametrize("wrong", CALLS, ids=lambda f: f.__name__)
def test_backward(used, wrong):
    source = draw(4, 7).requires_grad_()
    before = copy.deepcopy(used.state_dict())
    losses, y = wrong(source * 1)
    with pytest.raises(InputError, match=CALLS[wrong]):
        used.backward(losses, y)
    assert source.grad is None
    for key, value in used.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("wrong", [no_gradient, no_tensor, no_batch, other_batch])
def test_fork(used, wrong):
    _, y = wrong(draw(4, 7).requires_grad_() * 1)
    with pytest.raises(InputError, match=CALLS[wrong]):
        used.fork(y)


@pytest.mark.parametrize("call", ["backward", "fork"])
def test_a_batch_independent_norm_needs_one_number_of_items(call):
    y = [draw(4, 7).requires_grad_(), draw(2, 7).requires_grad_()]
    balancer = LossBalancer({"a": 1}, per_batch_item=False, batch_independent=True)
    with pytest.raises(InputError, match=r"common first dimension.*batch_independent"):
        balancer.fork(y) if call == "fork" else balancer.backward({"a": y[0].sum()}, y)
    # The whole batch's norm does not ask for the number of items.
    LossBalancer({"a": 1}, per_batch_item=False).backward({"a": y[0].sum() + y[1].sum()}, y)
    assert y[1].grad.norm().item() == pytest.approx((14 / 42) ** 0.5)


def test_only_losses_of_weight_zero():
    balancer = LossBalancer({"a": 0, "b": 1})
    y = draw(4, 7).requires_grad_()
    with pytest.raises(InputError, match="positive weight"):
        balancer.backward({"a": y.sum()}, y)


@pytest.mark.parametrize(
    ("grad_scale", "match"),
    [(torch.ones(2), "invalid for input of size 2"), (-1.0, "grad_scale"), (object(), "scale")],
)
def test_loss_scales(used, grad_scale, match):
    y = draw(4, 7).requires_grad_()
    wrong = pytest.raises((InputError, RuntimeError, AttributeError), match=match)
    with wrong:
        used.backward({"l1": y.sum()}, y, grad_scale=grad_scale)
    with wrong:
        used.fork(y, grad_scale=grad_scale)


def test_a_loss_of_several_numbers_is_torchs_own_error(used):
    y = draw(4, 7).requires_grad_()
    before = copy.deepcopy(used.state_dict())
    with pytest.raises(RuntimeError, match="scalar outputs"):
        used.backward({**losses_of(same_y(y), TARGET), "adv": y.abs()}, y)
    assert y.grad is None
    assert all(torch.equal(value, before[key]) for key, value in used.state_dict().items())


def test_weights_are_changed_by_name_only(used):
    for wrong, match in [
        ({"l3": 1.0}, "l3"),
        ({"l1": -1.0}, "l1"),
        (dict.fromkeys(WEIGHTS, 0.0), "positive weight"),
    ]:
        with pytest.raises(InputError, match=match):
            used.set_weights(wrong)
    with pytest.raises(TypeError):
        used.weights["l1"] = 3.0
    assert used.weights == WEIGHTS


def test_the_state_of_other_losses_is_refused(used):
    other = LossBalancer({"l1": 1.0, "l2": 2.0, "feat": 4.0})
    with pytest.raises(RuntimeError, match=r"Missing.*state.loss_feat.*\n.*Unexpected.*loss_adv"):
        other.load_state_dict(used.state_dict())
