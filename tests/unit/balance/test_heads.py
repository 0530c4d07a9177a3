"""Parameters between the outputs and the losses, and what reaches them through a fork."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steadygrad import LossBalancer
from tests.unit.balance.problems import draw, gradient_handed_on

WEIGHTS = {"l1": 1.0, "adv": 4.0}


def steep(head):
    """Losses of which the second has finite gradients of y, about 1e9, but 1e40 in the head."""
    return lambda ys: {"l1": ys["l1"].abs().mean(), "adv": 1e10 * head(ys["adv"]).mean()}


def large_outputs():
    return 1e30 * draw(4, 7, dtype=torch.float32).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_overflow_in_a_head_alone_reaches_its_scaler(dtype):
    head = nn.Linear(7, 1)
    head.weight.data = head.weight.data.to(dtype)
    cast = lambda y: nn.functional.linear(y, head.weight.float(), head.bias)  # noqa: E731
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD([head.bias, head.weight.requires_grad_()], lr=1.0)
    before = [p.detach().clone() for p in head.parameters()]
    scaled = lambda ys: {k: scaler.scale(v) for k, v in steep(cast)(ys).items()}  # noqa: E731
    balancer = LossBalancer(WEIGHTS, grad_scale=scaler)
    got = gradient_handed_on(balancer, scaled, large_outputs(), "fork")
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
    head = nn.Linear(7, 1)
    with torch.no_grad():
        head.weight.fill_(0.5)
    gradient_handed_on(LossBalancer(WEIGHTS), steep(head), large_outputs(), "fork")
    assert head.weight.grad.isinf().all()
    assert head.bias.grad.item() == 1e10


def test_audiocrafts_call_leaves_heads_alone():
    head = nn.Linear(7, 1)
    gradient_handed_on(LossBalancer(WEIGHTS), steep(head), large_outputs())
    assert head.weight.grad is head.bias.grad is None
