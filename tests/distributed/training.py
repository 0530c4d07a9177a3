"""One small model, its samples, and training it on one process or on several."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from steadygrad.noise import NoiseScale

MICRO = 6  # samples a rank and micro-batch
STEPS = 4


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


def train(model, optimizer, noise, mine, accumulate, sizes=None):
    """Steps of the micro-batches in ``mine``, as (micro, rank), or of several ranks as one."""
    for step in range(STEPS):
        for i, (micro, ranks) in enumerate(mine):
            ranks = [ranks] if isinstance(ranks, int) else ranks
            data = [sample(step, micro, rank, sizes[rank] if sizes else MICRO) for rank in ranks]
            x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
            with accumulate(i == len(mine) - 1):
                loss = loss_of(model, x, y) / len(mine)
                with noise.microbatch(len(x)):
                    loss.backward()
        noise.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    got = noise.estimate()
    return [got.as_dict(), {k: g.as_dict() for k, g in got.by_group.items()}]


class Nothing:
    """A context that does nothing."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class FsdpSync(Nothing):
    """The context that lets FSDP2 reduce only after the last micro-batch."""

    def __init__(self, model, last):
        model.set_requires_gradient_sync(last)


def make_optimizer(model, metric):
    if metric == "euclidean":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def single(world, micros, *, sizes=None, metric="euclidean", source="microbatch"):
    """One process sees what all of them see: each rank's micro-batch, or whole micro-batches."""
    model = make_model()
    optimizer = make_optimizer(model, metric)
    options = {"metric": metric, "optimizer": optimizer} if metric != "euclidean" else {}
    if source == "per_example":
        options["source"] = source
    noise = NoiseScale(model, **options)
    every = [(micro, rank) for micro in range(micros) for rank in range(world)]
    whole = [(micro, range(world)) for micro in range(micros)]
    mine = whole if source == "accumulated" else every
    return train(model, optimizer, noise, mine, Nothing, sizes)


def shard(model, mesh=None, **options):
    kwargs = {**({"mesh": mesh} if mesh is not None else {}), **options}
    for layer in (model[0], model[3]):
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    return model


def hsdp_mesh(world):
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
