"""Parameters between the outputs and the losses, and what reaches them."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import draw, gradient_handed_on, mass_of

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
WEIGHTS = {"l1": 1.0, "adv": 4.0}


def steep(head):
    """Losses of which the second has finite gradients of y, about 1e9, but 1e40 in the head."""
    return lambda ys: {"l1": ys["l1"].abs().mean(), "adv": 1e10 * head(ys["adv"]).mean()}


def large_outputs():
    return 1e30 * draw(4, 7, dtype=torch.float32).abs()


def backward_options(call, head):
    return {"head_parameters": head} if call == "backward" else {}


@CALLS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_overflow_in_a_head_alone_reaches_its_scaler(call, dtype):
    head = nn.Linear(7, 1)
    head.weight.data = head.weight.data.to(dtype)
    cast = lambda y: nn.functional.linear(y, head.weight.float(), head.bias)  # noqa: E731
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([head.bias, head.weight.requires_grad_()], lr=1.0)
    before = [p.detach().clone() for p in head.parameters()]
    scaled = lambda ys: {k: scaler.scale(v) for k, v in steep(cast)(ys).items()}  # noqa: E731
    balancer = LossBalancer(WEIGHTS, grad_scale=scaler)
    got = gradient_handed_on(
        balancer, scaled, large_outputs(), call, **backward_options(call, head)
    )
    assert torch.isfinite(got).all()
    assert not torch.isfinite(head.weight.grad).any()
    assert balancer.metrics["nonfinite_adv"].item() == 0
    if dtype == torch.float32:  # torch refuses to unscale float16 gradients
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        for p, old in zip(head.parameters(), before, strict=True):
            assert torch.equal(p, old)


def test_without_a_scaler_it_reaches_the_head_as_in_any_backward_pass():
    found = []
    for call in ("backward", "fork"):
        head = nn.Linear(7, 1)
        with torch.no_grad():
            head.weight.fill_(0.5)
        options = backward_options(call, head)
        gradient_handed_on(LossBalancer(WEIGHTS), steep(head), large_outputs(), call, **options)
        found.append((head.weight.grad, head.bias.grad))
    assert found[0][0].isinf().all()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].item() == found[1][1].item() == 1e10


def test_a_loss_that_is_left_out_takes_nothing_to_a_head_that_another_one_has():
    head = nn.Linear(7, 1).double()
    y = draw(4, 7)
    both = lambda ys: {"l1": head(ys["l1"]).mean(), "adv": torch.nan * head(ys["adv"]).sum()}  # noqa: E731
    gradient_handed_on(LossBalancer(WEIGHTS), both, y, head_parameters=head)
    torch.testing.assert_close(head.weight.grad, y.mean(0, keepdim=True), rtol=1e-12, atol=0)
    assert head.bias.grad.item() == 1.0


def test_an_overflowing_y_makes_all_heads_gradients_nan_for_a_scaler():
    head = nn.Linear(7, 1).double()
    both = lambda ys: {"l1": head(ys["l1"]).mean(), "adv": torch.nan * ys["adv"].sum()}  # noqa: E731
    balancer = LossBalancer(WEIGHTS, grad_scale=GradScaler("cpu", init_scale=2.0))
    gradient_handed_on(balancer, both, draw(4, 7), head_parameters=head)
    assert head.weight.grad.isnan().all()


def test_gradients_of_a_float16_head_are_summed_in_float32():
    """2048 + 1 + 1 in float16 alone is 2048."""
    weight, factors = nn.Parameter(torch.ones(1).half()), {"a": 2048.0, "b": 1.0, "c": 1.0}
    make = lambda ys: {k: (f * weight).sum() + ys[k].mean() for k, f in factors.items()}  # noqa: E731
    balancer = LossBalancer(dict.fromkeys(factors, 1.0))
    gradient_handed_on(balancer, make, draw(4, 7), head_parameters=[weight])
    assert weight.grad.dtype == torch.float16
    assert weight.grad.item() == 2050.0


FORMS = {
    "module": lambda head: head,
    "generator": lambda head: head.parameters(),
    "named": lambda head: head.named_parameters(),
}


@pytest.mark.parametrize("form", FORMS)
def test_heads_may_be_named_in_many_ways(form):
    head = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 1)).double()
    make = lambda ys: {"l1": ys["l1"].abs().mean(), "adv": head(ys["adv"]).square().mean()}  # noqa: E731
    y = draw(4, 7)
    wanted = torch.autograd.grad(make({"l1": y, "adv": y})["adv"], list(head.parameters()))
    gradient_handed_on(LossBalancer(WEIGHTS), make, y, head_parameters=FORMS[form](head))
    for p, expected in zip(head.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "heads",
    ["critic", [nn.Linear(1, 1)], [("w", 3)], [torch.ones(2, requires_grad=True) * 2]],
)
def test_what_is_no_head_is_refused(heads):
    y = draw(4, 7).requires_grad_()
    balancer = LossBalancer(WEIGHTS)
    with pytest.raises(InputError, match="head_parameters"):
        balancer.backward({"l1": y.sum()}, y, head_parameters=heads)
    assert y.grad is None
    assert mass_of(balancer).sum() == 0
