"""The page's recipe: weights in bf16 on one side, the step on the host over a copy of them."""

import runpy
from pathlib import Path

import torch
from torch import nn

from steadygrad.optim import LAMB
from tests.contracts.problems import assert_same, snapshot

RECIPE = runpy.run_path(str(Path(__file__).parents[3] / "examples/compute_copy.py"))


def test_is_the_step_over_the_weights_themselves():
    """To the bit; the loss scale is a power of two, and a step with an infinity moves nothing."""
    torch.manual_seed(0)
    # The last one is never called.
    model, direct = (nn.ModuleList([nn.Linear(64, 128), nn.Linear(3, 3)]) for _ in range(2))
    direct.load_state_dict(model.bfloat16().state_dict())
    host, options = RECIPE["host_copy"](model), {"max_grad_norm": 0.5, "state_dtype": "8bit"}
    optimizer, plain = (
        LAMB(host.values(), **options),
        LAMB(direct.bfloat16().parameters(), **options),
    )
    optimizer.grad_scale = torch.tensor(2.0**10)
    for step in range(12):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        (model[0](x).float().square().mean() * 2.0**10).backward()
        if step == 7:
            model[0].weight.grad[5, 5] = torch.inf
        else:
            direct[0](x).float().square().mean().backward()
            plain.step()
            plain.zero_grad()
        RECIPE["step_on_host"](model, host, optimizer)
    assert_same(snapshot(optimizer, host.values()), snapshot(plain, direct.parameters()))
    assert_same(model.parameters(), direct.parameters())
    assert int(optimizer.skipped) == 1
    assert any(v.dtype is torch.uint8 for v in optimizer.state[host["0.weight"]].values())
