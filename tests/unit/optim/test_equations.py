"""Equations at the ends of the types' ranges, and sums; the fuzz judges all others."""

import pytest
import torch

from steadygrad.numerics import inner_products, square_sums
from steadygrad.optim import LAMB, LANS, ScaledAdam, clipping, scaled_adam, scaled_adam_rule
from tests.contracts.table import MODES

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def test_lamb_without_trust_ratio_is_adamw():
    """torch's AdamW decays by the weight before the step too, and adds eps after the root."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(20, dtype=torch.float64, generator=draw)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    one = LAMB([ours], lr=1e-2, weight_decay=0.1, eps=1e-8, adapt=False)
    two = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, eps=1e-8)
    for _ in range(30):
        ours.grad = torch.randn(20, dtype=torch.float64, generator=draw)
        theirs.grad = ours.grad.clone()
        one.step()
        two.step()
    # Float64, 30 steps of a few roundings each.
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


# Type, gradients of each of four parameters of eight elements, and whether a step is taken.
NORMS = {
    "large": (torch.float32, [4e18] * 4, True),
    "joint past float32": (torch.float32, [6e18] * 4, True),
    "one past float32": (torch.float32, [1e19, 1, 1, 1], False),
    "16 bits, one past float32": (torch.bfloat16, [1e19, 1, 1, 1], False),
    "joint past float64": (torch.float64, [4e153] * 4, True),
    "one past float64": (torch.float64, [1e154, 1, 1, 1], False),
}


@every_mode
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norms_past_the_range_of_a_type(case, mode):
    """A step is skipped where a tensor's own square sum overflows, not where their sum does.

    The sum is over all groups: a gradient in one scales down those of another.
    """
    dtype, sizes, is_taken = case
    params = [torch.ones(8, dtype=dtype, requires_grad=True) for _ in sizes]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = LAMB(groups, lr=0.1, max_grad_norm=1.0, **mode)
    for p, size in zip(params, sizes, strict=True):
        p.grad = torch.full((8,), size, dtype=dtype)
    optimizer.step()
    assert optimizer.skipped == (not is_taken)
    # (1 - beta1) times the gradient over the norm of all 32 elements.
    expected = 0.1 / 32**0.5 if is_taken else 0.0
    for p in params:
        moment = optimizer.state[p]["exp_avg"]
        torch.testing.assert_close(moment, torch.full_like(moment, expected), rtol=1e-6, atol=0)
        # AdamW's first step is of one in every element, and as long as the weight: ratio 1 / 1.01.
        left = torch.full_like(p, 0.9 if is_taken else 1.0)
        torch.testing.assert_close(p, left, rtol=5e-3 if dtype is torch.bfloat16 else 1e-6, atol=0)


@every_mode
@pytest.mark.parametrize("kind", [LAMB, LANS])
def test_a_weight_whose_norm_is_past_its_type_stays_finite(kind, mode):
    params = [torch.full((8,), size, requires_grad=True) for size in (1e20, 1.0)]
    optimizer = kind(params, lr=0.1, weight_decay=0.5, **mode)
    for p in params:
        p.grad = torch.ones(8)
    optimizer.step()
    assert optimizer.skipped == 0
    # Ratio 1: no more than the decay, which here is along one direction or both.
    torch.testing.assert_close(params[0].detach(), torch.full((8,), 0.95e20), rtol=1e-5, atol=0)
    torch.testing.assert_close(params[1].detach(), torch.full((8,), 0.9), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("recipe", "period"), [("zipformer", 3), ("stateless7", 1)])
def test_a_host_that_does_not_look_ahead_takes_the_same_steps(recipe, period, monkeypatch):
    options = {"clipping_scale": 1.1, "clipping_update_period": 50, "size_update_period": period}

    def trained():
        draw = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=draw).requires_grad_() for n in (1, 5, 40)]
        optimizer = ScaledAdam(params, recipe=recipe, fused=True, **options)
        for step in range(60):
            for p in params:
                scale = torch.inf if step == 30 else step % 7
                p.grad = scale * torch.randn(p.shape, generator=draw)
            optimizer.step()
        return [*params, *(s for p in params for s in optimizer.state[p].values())]

    expected = trained()
    # As on an accelerator: every flag may hold, and masks alone decide.
    for module in (clipping, scaled_adam, scaled_adam_rule):
        monkeypatch.setattr(module, "may_hold", lambda flags: True)
    for a, b in zip(trained(), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
def test_sums_of_many_elements_lose_no_digits(layout):
    """A CPU adds them up one after the other: 2^20 of them in one go are off by 5e-5."""
    draws = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2**10, 2**11, generator=draws) + 0.1 for _ in range(2))
    x, y = (x[:, ::2], y[:, ::2]) if layout == "strided" else (x, y)
    x, y = (x.t(), y.t()) if layout == "transposed" else (x, y)
    exact = x.double().square().sum(), (x.double() * y.double()).sum()
    # Each piece is good to 3e-7, and their errors have either sign.
    assert square_sums([x, x[:2]])[0].item() == pytest.approx(exact[0].item(), rel=5e-7)
    # Those of a 16-bit type are taken in float32.
    assert square_sums([torch.full((4096,), 256.0, dtype=torch.float16)]).tolist() == [2.0**28]
    found = inner_products([x], [y], torch.float32).item()
    assert found == pytest.approx(exact[1].item(), rel=5e-6)  # cancels to a hundredth of its terms
