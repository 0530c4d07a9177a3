"""LANS equals its literal equations, and has the properties they promise."""

import pytest
import torch

from steadygrad.optim import LANS
from tests.reference.lans import Lans
from tests.unit.optim.reference_runs import MODES, deviation

OPTIONS = {
    "default": {},
    "fast": {"lr": 0.1, "betas": (0.5, 0.9)},
    "no-decay": {"weight_decay": 0.0},
    "no-momentum": {"betas": (0.0, 0.9), "lr": 0.03},
    "no-memory": {"betas": (0.9, 0.0), "lr": 0.03},
    "bounded": {"lower_bound": 0.2, "upper_bound": 1.5, "lr": 0.03},
    "bounded-below": {"lower_bound": 0.2, "lr": 0.03},
    "bounded-above": {"upper_bound": 0.5, "lr": 0.03},
    "clipped": {"clip_value": 0.3, "lr": 0.03},
    "uphill": {"maximize": True, "lr": 0.03, "weight_decay": 0.1},
}


@pytest.mark.few(10)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_reference(options, mode):
    for seed in range(2):
        # Float64 on both sides; 60 steps of rounding in another order.
        assert (
            deviation(
                lambda params: LANS(params, **options, **mode),
                lambda: Lans(**options),
                seed=seed,
            )
            < 1e-12
        )


def test_follows_a_changing_learning_rate():
    def before(step, optimizer, reference):
        optimizer.param_groups[0]["lr"] = reference.lr = 0.05 / (1 + step)

    assert deviation(LANS, Lans, before=before) < 1e-12


def step_of(scale, x, gradient, **options):
    p = x.clone().requires_grad_()
    optimizer = LANS([p], **options)
    p.grad = gradient * scale
    optimizer.step()
    return p.detach() - x


def test_the_gradients_scale_changes_nothing():
    draw = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 30, dtype=torch.float64, generator=draw)
    once = step_of(1.0, x, g)
    # Powers of two only change exponents.
    assert torch.equal(step_of(2.0**20, x, g), once)
    assert torch.equal(step_of(2.0**-20, x, g), once)


def test_a_steps_length_is_the_learning_rate_times_the_weights_norm():
    draw = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 30, dtype=torch.float64, generator=draw)
    # At the first step both directions agree: no decay, momentum equal to the gradient.
    moved = step_of(1.0, x, g, lr=0.01, weight_decay=0.0)
    torch.testing.assert_close(moved.norm(), 0.01 * x.norm(), rtol=1e-12, atol=0)
    bounded = step_of(1.0, x, g, lr=0.01, weight_decay=0.0, upper_bound=0.5)
    torch.testing.assert_close(bounded.norm(), torch.tensor(0.005).double(), rtol=1e-6, atol=0)


def test_a_block_without_gradient_decays_by_the_learning_rate():
    x = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = step_of(0.0, x, torch.ones(30).double(), lr=0.01, weight_decay=0.3)
    # Both directions are the weight itself, so their ratios undo the decay's size.
    torch.testing.assert_close(moved, -0.01 * x, rtol=1e-12, atol=0)
    still = step_of(0.0, x, torch.ones(30).double(), lr=0.01, weight_decay=0.0)
    assert torch.equal(still, torch.zeros_like(x))


def test_each_parameter_counts_its_own_steps():
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = LANS([first, second])
    for step in range(3):
        first.grad, second.grad = torch.ones(3), torch.ones(3) if step == 1 else None
        optimizer.step()
    assert optimizer.state[first]["step"] == 3
    assert optimizer.state[second]["step"] == 1


def test_a_block_of_the_late_joiner_is_corrected_from_its_own_start():
    params = [torch.full((4,), 2.0, requires_grad=True, dtype=torch.float64) for _ in range(2)]
    optimizer = LANS(params, lr=0.01)
    g = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    for _ in range(5):
        params[0].grad = g
        optimizer.step()
    start = params[1].detach().clone()
    params[1].grad = g
    optimizer.step()
    assert torch.equal(params[1].detach() - start, step_of(1.0, start, g, lr=0.01))
