"""Steps in which processes find different things; the assertions are in test_agreement.py."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from steadygrad.optim import LAMB, LANS, ScaledAdam

MAKERS = {"lans": LANS, "lamb": LAMB, "scaled_adam": ScaledAdam}
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}}


def sharded(value, mesh):
    return distribute_tensor(torch.full((4, 4), value), mesh, [Shard(0)])


def agreement(rank, world):
    """By optimizer and mode: shards and counts after a bad and after a lopsided step."""
    mesh, found = init_device_mesh("cpu", (world,)), {}
    for name, make in MAKERS.items():
        for mode, options in MODES.items():
            key = f"{name} {mode}"
            found[key] = [
                local_infinity(make, options, mesh, rank, "gradient"),
                local_infinity(make, options, mesh, rank, "scaler"),
                *none_on_one(make, options, mesh, rank),
                *rebuilt_on_one(make, options, mesh, rank),
            ]
    return found


def local_infinity(make, options, mesh, rank, where):
    """One shared parameter, and a plain one (a local expert) whose gradient one process rejects."""
    shared, own = Parameter(sharded(1.0, mesh)), Parameter(torch.ones(3))
    optimizer = make([shared, own], lr=0.1, **options)
    shared.grad, own.grad = sharded(1.0, mesh), torch.ones(3)
    if rank == 0 and where == "gradient":
        own.grad[0] = torch.nan
    if where == "scaler":
        optimizer.found_inf = torch.tensor(float(rank == 0))
    optimizer.step()
    moved = not torch.equal(shared.detach().to_local(), torch.ones_like(shared.to_local()))
    return [moved, float(optimizer.skipped)]


def none_on_one(make, options, mesh, rank):
    """Weights with a gradient of None on one process, and with one of zeros there."""
    results = []
    for none in (True, False):
        params = [Parameter(sharded(float(i + 1), mesh)) for i in range(3)]
        optimizer = make(params, lr=0.1, **options)
        for _ in range(3):
            for i, p in enumerate(params):
                p.grad = sharded(1.0 + i, mesh)
            if rank == 0:
                params[0].grad.to_local().zero_()
                params[0].grad = None if none else params[0].grad
            # Nobody has this one.
            params[2].grad = None
            optimizer.step()
        results.append([p.detach().to_local().tolist() for p in params])
    untouched = torch.full((4 // mesh.size(), 4), 3.0).tolist()
    return [results[0] == results[1], results[0][2] == untouched]


def rebuilt_on_one(make, options, mesh, rank):
    """Weights, and collectives a step, where one process finds its states exchanged.

    It builds its batches anew after the collective that adds up partial gradients.
    """
    results, counts = [], []
    for exchanged in (False, True):
        copied = distribute_tensor(torch.ones(3), mesh, [Replicate()])
        params = [Parameter(sharded(1.0, mesh)), Parameter(copied)]
        optimizer = make(params, lr=0.1, **options)
        for step in range(4):
            part = torch.arange(3.0) + rank + step
            params[0].grad = sharded(1.0, mesh)
            params[1].grad = DTensor.from_local(part, mesh, [Partial()])
            if exchanged and rank == 0 and step == 2:
                state = optimizer.state[params[1]]
                state["step"], state["exp_avg_sq"] = state["step"].clone(), +state["exp_avg_sq"]
            with CommDebugMode() as communication:
                optimizer.step()
            counts.append(communication.get_total_counts())
        results.append([p.detach().to_local().tolist() for p in params])
    return [results[0] == results[1], counts]
