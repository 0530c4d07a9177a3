"""Steps in which processes find different things; the assertions are in test_agreement.py."""

import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam

MAKERS = {"lans": LANS, "lamb": LAMB, "scaled_adam": ScaledAdam}
# LANS and LAMB share their passes: each is tried in one of the modes.
CASES = {
    f"{name} {mode}": (MAKERS[name], {mode: True})
    for name, mode in [
        ("lans", "fused"),
        ("lamb", "foreach"),
        ("scaled_adam", "fused"),
        ("scaled_adam", "foreach"),
    ]
}


def sharded(value, mesh):
    return distribute_tensor(torch.full((4, 4), value), mesh, [Shard(0)])


def agreement(rank, world):
    """By optimizer and mode: shards and counts after a bad and after a lopsided step."""
    mesh, found = init_device_mesh("cpu", (world,)), {}
    for key, (make, options) in CASES.items():
        found[f"clipping {key}"] = clipped_alike(make, options, mesh, rank)
        found[f"frozen {key}"] = frozen_group(make, options, mesh)
        found[f"partial {key}"] = partial_none(make, options, mesh, rank)
        found[f"lopsided {key}"] = lopsided(make, options, mesh, rank)
        found[f"gaps {key}"] = gaps_on_one(make, options, mesh, rank)
        found[f"layout {key}"] = loaded_otherwise(make, options, mesh)
        found[f"together {key}"] = infinite_together(make, options, mesh)
        if world == 4:
            found[f"experts {key}"] = experts(make, options, rank)
            found[f"copies {key}"] = copies(make, options, rank)
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


def gaps_on_one(make, options, mesh, rank):
    """Norms and weights where one process has a batch more: kernels cannot take its gaps."""
    params, step = [], options.get("fused", False) + 1
    for i in range(17):
        own = torch.ones(1, 4 * step)[:, ::step] if i == 8 and rank == 0 else torch.ones(1, 4)
        params.append(Parameter(DTensor.from_local(own, mesh, [Shard(0)])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make(params, lr=0.1, **options, **CLIPPED[name_of(make)])
        for _ in range(5):
            # Squares of 6e-8 around one of 1: a sum in float32 depends on its place.
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, (1.0 if i == 8 else 2.43e-4) / p.numel() ** 0.5)
            optimizer.step()
    # Elements of the one with gaps are rounded otherwise by multi-tensor calls.
    weights = [p.detach().to_local()[0, 0].item() for p in (params[0], params[-1])]
    return norms_of(optimizer, params[0]) + weights


def loaded_otherwise(make, options, mesh):
    """Weights after a load of states with other placements, and the error for another mesh."""
    found, other = [], init_device_mesh("cpu", (mesh.size(), 1))
    for way in ("same", "replicated", "other mesh"):
        p = Parameter(sharded(1.0, mesh))
        optimizer = make([p], lr=0.1, **options)
        for size in (1.0, 2.0):
            p.grad = sharded(size, mesh)
            optimizer.step()
        saved = optimizer.state_dict()
        for name, value in saved["state"][0].items():
            if isinstance(value, DTensor) and way != "same":
                whole = value.redistribute(placements=[Replicate()])
                if way == "other mesh":
                    whole = DTensor.from_local(whole.to_local(), other, [Replicate()] * 2)
                saved["state"][0][name] = whole
        try:
            optimizer.load_state_dict(saved)
        except InputError as error:
            found.append(str(error))
            continue
        p.grad = sharded(3.0, mesh)
        optimizer.step()
        found.append(p.detach().to_local().tolist())
    return found


def infinite_together(make, options, mesh):
    """Weight and count after squares that are finite on each process, and whose sum is not."""
    p = Parameter(sharded(1.0, mesh))
    optimizer = make([p], lr=0.1, **options)
    # 16 squares of 3.6e37: past float32's 3.4e38, half of them are not.
    p.grad = sharded(6e18, mesh)
    optimizer.step()
    return [p.detach().to_local().unique().tolist(), float(optimizer.skipped)]


# By step and parameter the processes with a gradient: all, all but the first, none.
PARTIAL = [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 1), (0, 0, 0)]


def partial_none(make, options, mesh, rank):
    """Weights with partial gradients that are None on one process, or on all.

    Beside a sharded parameter, and alone; then those of a run without sharding.
    """
    found, world = [], mesh.size()
    for with_shards, split in ((True, True), (True, False), (False, True), (False, False)):
        whole = [torch.arange(1.0, 4.0) * (i + 1) for i in range(3)]
        params = [
            Parameter(distribute_tensor(w, mesh, [Replicate()]) if split else w) for w in whole
        ]
        if with_shards:
            params.append(Parameter(sharded(1.0, mesh) if split else torch.ones(4, 4)))
        optimizer = make(params, lr=0.1, **options)
        for step, row in enumerate(PARTIAL):
            for i, kind in enumerate(row):
                parts = [torch.arange(1.0, 4.0) + r + step for r in range(kind == 1, world)]
                here = kind == 0 or (kind == 1 and (not split or rank > 0))
                grad = None
                if here:
                    own = parts[rank - (kind == 1)] if split else sum(parts)
                    grad = DTensor.from_local(own, mesh, [Partial()]) if split else own
                params[i].grad = grad
            if with_shards:
                params[3].grad = sharded(1.0, mesh) if split else torch.ones(4, 4)
            optimizer.step()
        found.append([p.detach().to_local().tolist() if split else p.tolist() for p in params[:3]])
    return found


CLIPPED = {
    "lans": {},
    "lamb": {"max_grad_norm": 0.5},
    "scaled_adam": {"clipping_scale": 0.5, "clipping_update_period": 2},
}


def name_of(make):
    return next(name for name, other in MAKERS.items() if other is make)


def norms_of(optimizer, p):
    return optimizer.state[p].get("model_norms", torch.zeros(2)).tolist()


def clipped_alike(make, options, mesh, rank):
    """Movements and norms of a shared parameter beside a plain one that differs by process.

    Then the same on one process whose plain gradient has the mean of all squares.
    """
    world, found = mesh.size(), []
    sizes = [float(1 + 3 * r) for r in range(world)]
    mean = (sum(size**2 for size in sizes) / world) ** 0.5
    for split, size in ((True, sizes[rank]), (False, mean)):
        weight = sharded(1.0, mesh) if split else torch.ones(4, 4)
        shared, own = Parameter(weight), Parameter(torch.ones(3))
        optimizer = make([shared, own], lr=0.1, **options, **CLIPPED[name_of(make)])
        for _ in range(6):
            shared.grad = sharded(1.0, mesh) if split else torch.ones(4, 4)
            own.grad = torch.full((3,), size)
            optimizer.step()
        weight = shared.detach()
        found.append([float((weight.to_local() if split else weight)[0, 0])])
        found[-1] += norms_of(optimizer, shared)
    return found


def experts(make, options, rank):
    """Weights and norms of an expert on a part of the mesh beside a tensor on all of it.

    Then those of a run without sharding on this process's expert.
    """
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part")), []
    value = 1.0 + 4.0 * (rank // 2)
    for split in (True, False):
        own = torch.full((4, 4), value)
        here = [distribute_tensor(own, mesh["part"], [Shard(0)], src_data_rank=None)]
        here += [distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])]
        whole = [own, torch.ones(4, 4)]
        params = [Parameter(w) for w in (here if split else whole)]
        optimizer = make(params, lr=0.1, **options)
        for _ in range(5):
            for p, like, size in zip(params, here, (value, 1.0), strict=True):
                # Rows alike, so that each process knows what a run without sharding has.
                whole = torch.full((4, 4), size)
                spread = distribute_tensor(
                    whole, like.device_mesh, like.placements, src_data_rank=None
                )
                p.grad = spread if split else whole
            optimizer.step()
        local = [p.detach().to_local() if split else p.detach() for p in params]
        found.append([local[0][0].tolist(), local[1][0, :2].tolist()])
    return found


def copies(make, options, rank):
    """Copies of a dense tensor beside experts on parts of the mesh, and beside a plain one.

    In the fourth step one part's expert has a gradient that is not finite.
    """
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part")), []
    part = rank // 2
    for placements in ([Replicate(), Shard(0)], [Replicate(), Replicate()]):
        for is_plain in (False, True):
            dense = distribute_tensor(torch.ones(4, 4), mesh, placements)
            own = torch.full((4, 4), 1.0 + part)
            if not is_plain:
                own = distribute_tensor(own, mesh["part"], [Shard(0)], src_data_rank=None)
            params = [Parameter(dense), Parameter(own)]
            optimizer = make(params, lr=0.1, **options, **CLIPPED[name_of(make)])
            for step in range(6):
                bad = step == 3 and part == 1
                size = torch.nan if bad else 1.0 + 3 * part + step
                params[0].grad = torch.ones_like(params[0]) * (1.0 + step)
                params[1].grad = torch.full_like(params[1], size)
                optimizer.step()
            weight = params[0].detach().full_tensor()
            found.append([float(optimizer.skipped), weight.flatten().tolist()])
    return found


def lopsided(make, options, mesh, rank):
    """A plain parameter that one process alone holds, or alone has a gradient of."""
    found = []
    for frozen, elsewhere in ((True, 3), (False, 0), (False, 3)):
        shared = Parameter(sharded(1.0, mesh), requires_grad=not frozen)
        own = Parameter(torch.ones(3 if rank == 0 else elsewhere))
        optimizer = make([shared, own], lr=0.1, **options, **CLIPPED[name_of(make)])
        for step in range(5):
            shared.grad = None if frozen else sharded(1.0 + step, mesh)
            has_own = rank == 0 or (elsewhere and step != 1)
            own.grad = torch.full_like(own, 2.0 + 3 * rank) if has_own else None
            optimizer.step()
        found.append([shared.detach().to_local().flatten()[0].item(), norms_of(optimizer, shared)])
    return found


def frozen_group(make, options, mesh):
    """Reports of a group that is frozen and of one that is not, sharded and whole."""
    found = []
    for split in (True, False):
        params = [
            Parameter(sharded(v, mesh) if split else torch.full((4, 4), v)) for v in (1.0, 2.0)
        ]
        params[0].requires_grad_(False)
        optimizer = make([{"params": [p]} for p in params], lr=0.1, **options)
        for _ in range(2):
            params[1].grad = sharded(3.0, mesh) if split else torch.full((4, 4), 3.0)
            optimizer.step()
        found.append(optimizer.diagnostics())
    return found
