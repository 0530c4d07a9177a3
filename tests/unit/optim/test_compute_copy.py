"""The page's recipe: weights in bf16 on one side, the step on the host over a copy of them."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same, snapshot

RECIPE = runpy.run_path(str(Path(__file__).parents[3] / "examples/compute_copy.py"))
MAKERS = {
    "lans": lambda params: LANS(params, lr=1e-2, state_dtype="8bit"),
    "lamb": lambda params: LAMB(params, lr=1e-2, max_grad_norm=0.5, state_dtype="8bit"),
    "scaled_adam": lambda params: ScaledAdam(
        params, lr=1e-2, clipping_scale=0.9, clipping_update_period=5, state_dtype="8bit"
    ),
}


def net():
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4)
    return nn.Sequential(*layers, nn.Linear(3, 3)).bfloat16()  # the last one is never called


def backward(model, step, scale=1.0):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 64, generator=draw).bfloat16()
    (model[:3](x).float().square().mean() * scale).backward()


@pytest.mark.parametrize("name", MAKERS)
def test_is_the_step_over_the_weights_themselves(name):
    """To the bit; the loss scale is a power of two, and a step with an infinity moves nothing."""
    model, direct = net(), net()
    host = RECIPE["host_copy"](model)
    optimizer, plain = MAKERS[name](host.values()), MAKERS[name](direct.parameters())
    optimizer.grad_scale = torch.tensor(2.0**10)
    for step in range(12):
        backward(model, step, 2.0**10)
        if step == 7:
            before = snapshot(optimizer, host.values())
            model[0].weight.grad[5, 5] = torch.inf
            RECIPE["step_on_host"](model, host, optimizer)
            assert_same(before, snapshot(optimizer, host.values()))
            continue
        backward(direct, step)
        RECIPE["step_on_host"](model, host, optimizer)
        plain.step()
        plain.zero_grad()
    assert_same(snapshot(optimizer, host.values()), snapshot(plain, direct.parameters()))
    assert_same(model.parameters(), direct.parameters())
    assert not torch.equal(model[0].weight, net()[0].weight)
    assert int(optimizer.skipped) == 1
    assert any(v.dtype is torch.uint8 for v in optimizer.state[host["0.weight"]].values())
