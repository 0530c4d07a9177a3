"""A model with every awkward shape, the ways of sharding it, and the optimizers that train it."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from steadygrad.optim import LAMB, LANS, ScaledAdam

BATCH = 8


def lans(params, **mode):
    return LANS(params, lr=1e-2, weight_decay=0.05, **mode)


def lamb(params, **mode):
    return LAMB(params, lr=1e-2, weight_decay=0.05, max_grad_norm=0.1, **mode)


def scaled_adam(params, **mode):
    # A period of 5 takes a threshold from the fifth step on, and this scale clips by it.
    return ScaledAdam(params, lr=1e-2, clipping_scale=0.9, clipping_update_period=5, **mode)


FLOAT32 = {"lans": lans, "lamb": lamb, "scaled_adam": scaled_adam}
CODED = {f"{name}-8bit": partial(maker, state_dtype="8bit") for name, maker in FLOAT32.items()}
MAKERS = FLOAT32 | CODED


class Net(nn.Module):
    """Rows by 5 (uneven), 2 and 1 (empty shards), a one-element gain, layers without a gradient."""

    def __init__(self, extra: int = 0, gain_shape: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.second, self.third, self.last = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(2, 1)
        self.gain = nn.Parameter(torch.ones(gain_shape))
        self.unused = nn.Linear(3, 3)
        self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(extra))

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.third(torch.tanh(self.second(x))))) * self.gain


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def split_types(model):
    """Sixteen bits everywhere but in the first two layers."""
    for module in (model.second, model.third, model.last, model.unused):
        module.bfloat16()
    return model


def two_groups(model):
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "lr": 5e-3},
    ]


TP_PLAN = {"second": ColwiseParallel, "third": RowwiseParallel}


def _tensor_parallel(model, mesh):
    parallelize_module(model, mesh, {name: style() for name, style in TP_PLAN.items()})


def shard_none(model):
    return model


def shard_ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def shard_fsdp(model, **options):
    fully_shard(model.first, **options)
    return fully_shard(model, **options)


def shard_hsdp(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part")))


def shard_tp(model):
    _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def shard_2d(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"])


SHARD = {
    "none": shard_none,
    "ddp": shard_ddp,
    "fsdp": shard_fsdp,
    "hsdp": shard_hsdp,
    "tp": shard_tp,
    "2d": shard_2d,
}
LAYOUTS = {2: ("ddp", "fsdp", "tp"), 4: ("fsdp", "hsdp", "2d")}


def make(layout, **options):
    """The model as the user calls it, and its parameters."""
    if layout in ("none", "ddp", "tp"):
        # FSDP2 itself refuses 0-d parameters.
        options = {"gain_shape": (), **options}
    return SHARD[layout](net(**options))


def batch(step, layout="none"):
    """This process's part of the step's samples."""
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
    if layout in ("none", "tp"):
        return x
    rank, parts = dist.get_rank(), dist.get_world_size()
    if layout == "2d":
        rank, parts = rank // 2, 2
    return x[rank * BATCH // parts : (rank + 1) * BATCH // parts]


def loss_of(model, step, layout="none"):
    return model(batch(step, layout)).square().mean()


def train(model, optimizer, steps, layout="none"):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, layout).backward()
        optimizer.step()


def like(tensor, parameter):
    """A tensor that every process has, laid out as a parameter is."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(
        tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def feed(model, optimizer, steps):
    """Steps with drawn gradients: the same on every layout, to the last bit."""
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=draw).to(p.dtype)
            p.grad = None if name.startswith("unused") else like(drawn, p)
        optimizer.step()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def difference(model, reference):
    """Largest absolute difference of any weight."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((whole(a).reshape(-1) - whole(b).reshape(-1)).abs().max()) for a, b in pairs)


def locals_of(model, optimizer):
    """This process's weights and state, without the count of skipped steps."""
    tensors = [local(p) for p in model.parameters()]
    for p in model.parameters():
        state = optimizer.state[p]
        tensors += [local(state[name]) for name in sorted(state) if name != "skipped"]
    return tensors


def same_bits(first, second):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))
