"""LAMB equals its literal equations, and has the properties they promise."""

import pytest
import torch

from steadygrad.optim import LAMB, LANS
from tests.reference.lamb import Lamb
from tests.unit.optim.reference_runs import MODES, deviation

OPTIONS = {
    "default": {},
    "fast": {"lr": 0.1, "betas": (0.5, 0.9)},
    "no-decay": {"weight_decay": 0.0},
    "no-momentum": {"betas": (0.0, 0.9), "lr": 0.03},
    "no-memory": {"betas": (0.9, 0.0), "lr": 0.03},
    "bounded": {"lower_bound": 0.2, "upper_bound": 1.5, "lr": 0.03},
    "bounded-below": {"lower_bound": 0.2, "lr": 0.03},
    "nvidia": {"max_grad_norm": 1.0, "lr": 0.03},
    "never-above": {"max_grad_norm": 1e6, "lr": 0.03},
    "adamw": {"adapt": False, "lr": 0.03, "weight_decay": 0.1},
    "uphill": {"maximize": True, "lr": 0.03, "weight_decay": 0.1, "max_grad_norm": 0.5},
}


@pytest.mark.few(11)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_reference(options, mode):
    for seed in range(2):
        # Float64 on both sides; 60 steps of rounding in another order.
        assert (
            deviation(
                lambda params: LAMB(params, **options, **mode),
                lambda: Lamb(**options),
                seed=seed,
            )
            < 1e-12
        )


def test_without_trust_ratio_it_is_adamw():
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


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_norm_is_that_of_all_groups(mode):
    """A gradient in one group scales down those of another."""
    moved = []
    for size in (1.0, 100.0):
        params = [torch.ones(4, requires_grad=True) for _ in range(2)]
        groups = [{"params": [params[0]]}, {"params": [params[1]], "lr": 0.0}]
        optimizer = LAMB(groups, max_grad_norm=1.0, eps=1.0, **mode)
        params[0].grad, params[1].grad = torch.ones(4), torch.full((4,), size)
        optimizer.step()
        moved.append(float(optimizer.state[params[0]]["exp_avg"][0].detach()))
    # (1 - beta1) over the norm.
    assert moved == pytest.approx([0.1 / 8**0.5, 0.1 / (4 + 4e4) ** 0.5], rel=1e-6)


def test_a_scalers_factor_is_no_part_of_the_norm():
    steps = []
    for scale in (1.0, 2.0**12):
        p = torch.ones(4, requires_grad=True)
        optimizer = LAMB([p], max_grad_norm=1.0, eps=1.0, fused=True)
        p.grad = torch.full((4,), 3.0 * scale)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(1)
        optimizer.step()
        steps.append(p.detach().clone())
    assert torch.equal(*steps)


def test_reports_name_the_largest_ratios():
    params = [torch.full((3,), size, requires_grad=True) for size in (1.0, 50.0)]
    optimizer = LAMB([("small", params[0]), ("large", params[1])])
    for _ in range(3):
        for p in params:
            p.grad = torch.ones(3)
        optimizer.step()
    (report,) = optimizer.diagnostics()
    assert list(report["trust_ratio"]) == ["large", "small"]
    assert report["trust_ratio"]["large"] > 10 * report["trust_ratio"]["small"]
    assert report["gradient_norm"] == pytest.approx(6**0.5)


# Type, gradients of each of four parameters of eight elements, and whether a step is taken.
NORMS = {
    "large": (torch.float32, [4e18] * 4, True),
    "joint past float32": (torch.float32, [6e18] * 4, True),
    "one past float32": (torch.float32, [1e19, 1, 1, 1], False),
    "16 bits, one past float32": (torch.bfloat16, [1e19, 1, 1, 1], False),
    "joint past float64": (torch.float64, [4e153] * 4, True),
    "one past float64": (torch.float64, [1e154, 1, 1, 1], False),
    "infinite": (torch.float32, [torch.inf, 1, 1, 1], False),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norms_past_the_range_of_a_type(case, mode):
    """A step is skipped where a tensor's own square sum overflows, not where their sum does."""
    dtype, sizes, is_taken = case
    params = [torch.ones(8, dtype=dtype, requires_grad=True) for _ in sizes]
    optimizer = LAMB(params, lr=0.1, max_grad_norm=1.0, **mode)
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


@pytest.mark.parametrize("kind", [LAMB, LANS])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
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
