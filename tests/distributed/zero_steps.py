"""Training under torch's ZeroRedundancyOptimizer, whose ranks each step some of the parameters."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.distributed.optim_models import FLOAT32

# The first steps of all, with a NaN, with frozen parameters, and before a file is written.
STEPS, BAD, FROZEN, STOP = 40, 7, range(12, 25), 20


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3), nn.Linear(3, 1))


def _groups(model):
    # With three ranks and more there is one without a parameter of the last group.
    params = [*model.parameters()]
    return [{"params": params[:4]}, {"params": params[4:], "lr": 3e-2}]


def _step(model, optimizer, step):
    """One step; all ranks have the gradients, as after DDP's reduction."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(6, 5, generator=draw) * (1 + step % 5)
    optimizer.zero_grad()
    for place, p in enumerate(model.parameters()):
        # The largest of the first group lies alone on its rank; the second group is left out whole.
        p.requires_grad_(not (step in FROZEN and place in (0, 4, 5)))
    model(x).square().mean().backward()
    if step == BAD:
        model[0].bias.grad[0] = torch.nan
    optimizer.step()


def _bits(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _memory(optimizer):
    """What each group's parameters on this rank share, as numbers."""
    names = ("skipped", "clipping_step", "num_clipped", "model_norms")
    firsts = [[optimizer.state[p] for p in g["params"][:1]] for g in optimizer.param_groups]
    return [[s[n].tolist() for s in own for n in names if n in s] for own in firsts]


def everything(rank, world):
    found = {}
    for name, maker in FLOAT32.items():
        plain, split = _net(), _net()
        alone, zero = maker(_groups(plain)), _zero(split, maker)
        for step in range(STOP):
            _step(plain, alone, step)
            _step(split, zero, step)
        other = _net()
        other.load_state_dict(split.state_dict())
        zero.consolidate_state_dict()
        saved = [zero.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(saved)
        resumed = _zero(other, maker)
        # It is taken as it is, not as a copy.
        resumed.load_state_dict(copy.deepcopy(saved[0]))
        for step in range(STOP, STEPS):
            _step(plain, alone, step)
            _step(split, zero, step)
            _step(other, resumed, step)
        found[name] = {
            "difference": float((_bits(plain) - _bits(split)).abs().max()),
            "resumed": float((_bits(other) - _bits(split)).abs().max()),
            "alone": _memory(alone),
            "here": _memory(zero.optim),
            "again": _memory(resumed.optim),
        }
    dist.barrier()
    return found


def _zero(model, maker):
    return ZeroRedundancyOptimizer(_groups(model), optimizer_class=maker)
