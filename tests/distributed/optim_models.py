"""A model with every awkward shape, the ways of sharding it, and the optimizers that train it."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.distributed.training import shard

BATCH = 8
# Of LAMB: smaller than gradients are.
MOST_NORM = 0.1


def lans(params, **mode):
    return LANS(params, lr=1e-2, weight_decay=0.05, **mode)


def lamb(params, **mode):
    return LAMB(params, lr=1e-2, weight_decay=0.05, max_grad_norm=MOST_NORM, **mode)


def scaled_adam(params, **mode):
    # A period of 5 takes a threshold from the fifth step on, and this scale clips by it.
    return ScaledAdam(params, lr=1e-2, clipping_scale=0.9, clipping_update_period=5, **mode)


FLOAT32 = {"lans": lans, "lamb": lamb, "scaled_adam": scaled_adam}
CODED = {f"{name}-8bit": partial(maker, state_dtype="8bit") for name, maker in FLOAT32.items()}
# The codes of all are compared in test_codes.py; elsewhere one stands for them.
MAKERS = FLOAT32 | {"scaled_adam-8bit": CODED["scaled_adam-8bit"]}


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


def split_rows_and_columns(model, mesh):
    parallelize_module(model, mesh, {"second": ColwiseParallel(), "third": RowwiseParallel()})


LAYOUTS = {2: ("ddp", "fsdp", "offload", "tp"), 4: ("fsdp", "hsdp", "2d")}


def make(layout, **options):
    """The model as the user calls it."""
    if layout in ("none", "ddp", "tp"):
        # FSDP2 itself refuses 0-d parameters.
        options = {"gain_shape": (), **options}
    model = net(**options)
    if layout == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if layout == "fsdp":
        return shard(model, model.first)
    if layout == "offload":
        return shard(model, model.first, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))
        return fully_shard(model, mesh=mesh)
    if layout == "tp":
        split_rows_and_columns(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    if layout == "2d":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        split_rows_and_columns(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


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
