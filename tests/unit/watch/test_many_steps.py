"""Ten thousand ordinary steps without a false alarm."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.watch.nets import Block, Module, Stack, TransformerBlock, mse, watching

STEPS = 2_500


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def masked():
    """Attention in a block, dropout, and a module whose output is minus infinity in places."""
    model = Stack(TransformerBlock)
    model.blocks[0].place = nn.Sequential(
        Module(lambda x: x.masked_fill(torch.arange(8) > 4, -torch.inf)),
        nn.Softmax(-1),
        nn.Dropout(0.2),
    )
    return model


KINDS = {
    "float32": (masked, nullcontext, "first"),
    "bfloat16": (masked, lambda: torch.autocast("cpu", torch.bfloat16), "first"),
    "checkpointed": (lambda: Stack(Checkpointed), nullcontext, "first"),
    "as on a device": (masked, nullcontext, "device"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm(kind):
    make, precision, mode = KINDS[kind]
    torch.manual_seed(0)
    model = make()
    watch = watching(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alarms = []
    for step in range(STEPS):
        for _ in range(1 + step % 2):  # accumulated in every other step
            x, y = torch.randn(2, 2, 4, 4) * 10.0 ** float(torch.empty(()).uniform_(-4, 4))
            with precision():
                output = model(x)
            mse(output.float(), y).backward()
        if step % 10 == 9:
            alarms.append(watch.report())
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            with torch.no_grad():
                model(x * torch.nan)
    assert alarms == [None] * (STEPS // 10)
    assert watch.batches == 3 * STEPS // 2
