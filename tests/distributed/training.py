"""One small model and its samples, on one process or on several; any model, sharded."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

MICRO = 6  # samples a rank and micro-batch


def make_model():
    torch.manual_seed(0)
    # The width 5 shards unevenly over 2 and 4; the bias of 3 leaves a rank of 4 with nothing.
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def sample(step, micro, rank, n=MICRO):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    x = torch.randn(n, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, y + x[:, :3]


def loss_of(model, x, y):
    return (model(x) - y).square().sum(-1).mean()


def shard(model, *blocks, **options):
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
