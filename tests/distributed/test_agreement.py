"""Processes that share a parameter take and skip the same steps, whatever each of them finds."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.distributed.optim_models import difference, make, train
from tests.distributed.ranks import on_ranks
from tests.unit.optim.test_batched import Momentum

pytestmark = pytest.mark.distributed

# Options with which norms and thresholds of the whole model decide on a step.
CLIPPED = {
    LANS: {},
    LAMB: {"max_grad_norm": 0.5},
    ScaledAdam: {"clipping_scale": 0.5, "clipping_update_period": 2},
}
# LANS and LAMB share their passes: each is tried in one of the modes.
CASES = {
    "lans fused": (LANS, {"fused": True}),
    "lamb foreach": (LAMB, {"foreach": True}),
    "scaled_adam fused": (ScaledAdam, {"fused": True}),
    "scaled_adam foreach": (ScaledAdam, {"foreach": True}),
}


def sharded(value, mesh, placements=None):
    """A matrix, by rows if nothing else is said."""
    placements = placements or [Shard(0)]
    return distribute_tensor(torch.full((4, 4), value), mesh, placements, src_data_rank=None)


def here(tensor):
    """What this process holds, as lists."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).tolist()


def norms_of(optimizer, p):
    return optimizer.state[p].get("model_norms", torch.zeros(2)).tolist()


def local_infinity(make, options, mesh, rank):
    """One shared parameter, and a plain one (a local expert) whose gradient one process rejects."""
    found = []
    for where in ("gradient", "scaler"):
        shared, own = Parameter(sharded(1.0, mesh)), Parameter(torch.ones(3))
        optimizer = make([shared, own], lr=0.1, **options)
        shared.grad, own.grad = sharded(1.0, mesh), torch.ones(3)
        if rank == 0 and where == "gradient":
            own.grad[0] = torch.nan
        if where == "scaler":
            optimizer.found_inf = torch.tensor(float(rank == 0))
        optimizer.step()
        found.append([shared.detach().to_local().unique().tolist(), float(optimizer.skipped)])
    return found


def infinite_together(make, options, mesh, rank):
    """Weight and count after squares that are finite on each process, and whose sum is not."""
    p = Parameter(sharded(1.0, mesh))
    optimizer = make([p], lr=0.1, **options)
    # 16 squares of 3.6e37: past float32's 3.4e38, half of them are not.
    p.grad = sharded(6e18, mesh)
    optimizer.step()
    return [p.detach().to_local().unique().tolist(), float(optimizer.skipped)]


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
        results.append([here(p) for p in params])
    return results


# By step and parameter the processes with a gradient: all, all but the first, none.
PARTIAL = [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 1), (0, 0, 0)]


def partial_none(make, options, mesh, rank):
    """Weights with partial gradients that are None on one process, or on all.

    Beside a sharded parameter, and alone; each before those of a run without sharding.
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
                grad = None
                if kind == 0 or (kind == 1 and (not split or rank > 0)):
                    own = parts[rank - (kind == 1)] if split else sum(parts)
                    grad = DTensor.from_local(own, mesh, [Partial()]) if split else own
                params[i].grad = grad
            if with_shards:
                params[3].grad = sharded(1.0, mesh) if split else torch.ones(4, 4)
            optimizer.step()
        found.append([here(p) for p in params[:3]])
    return found


def loaded_otherwise(make, options, mesh, rank):
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
            p.grad = sharded(3.0, mesh)
            optimizer.step()
            found.append(here(p))
        except InputError as error:
            found.append(str(error))
    return found


def joint_norm(make, options, mesh, rank):
    """Movements and norms of a shared parameter beside a plain one that differs by process.

    Then the same on one process whose plain gradient has the mean of all squares.
    """
    found, sizes = [], [float(1 + 3 * r) for r in range(mesh.size())]
    mean = (sum(size**2 for size in sizes) / mesh.size()) ** 0.5
    for split, size in ((True, sizes[rank]), (False, mean)):
        weight = sharded(1.0, mesh) if split else torch.ones(4, 4)
        shared, own = Parameter(weight), Parameter(torch.ones(3))
        optimizer = make([shared, own], lr=0.1, **options, **CLIPPED[make])
        for _ in range(6):
            shared.grad = sharded(1.0, mesh) if split else torch.ones(4, 4)
            own.grad = torch.full((3,), size)
            optimizer.step()
        found.append([here(shared)[0][0], *norms_of(optimizer, shared)])
    return found


def lopsided(make, options, mesh, rank):
    """A plain parameter that one process alone holds, or alone has a gradient of."""
    found = []
    for frozen, elsewhere in ((True, 3), (False, 0), (False, 3)):
        shared = Parameter(sharded(1.0, mesh), requires_grad=not frozen)
        own = Parameter(torch.ones(3 if rank == 0 else elsewhere))
        optimizer = make([shared, own], lr=0.1, **options, **CLIPPED[make])
        for step in range(5):
            shared.grad = None if frozen else sharded(1.0 + step, mesh)
            has_own = rank == 0 or (elsewhere and step != 1)
            own.grad = torch.full_like(own, 2.0 + 3 * rank) if has_own else None
            optimizer.step()
        found.append([here(shared)[0][0], norms_of(optimizer, shared)])
    return found


def experts(make, options, mesh, rank):
    """Weights of an expert on a part of the mesh beside a tensor on all of it.

    Then those of a run without sharding on this process's expert.
    """
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part")), []
    # Rows alike, so that each process knows what a run without sharding has.
    values = (1.0 + 4.0 * (rank // 2), 1.0)
    for split in (True, False):
        grads = [torch.full((4, 4), value) for value in values]
        if split:
            grads = [
                sharded(values[0], mesh["part"]),
                sharded(values[1], mesh, [Shard(0), Shard(1)]),
            ]
        params = [Parameter(grad.clone()) for grad in grads]
        optimizer = make(params, lr=0.1, **options)
        for _ in range(5):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.clone()
            optimizer.step()
        found.append([*here(params[0])[0], *here(params[1])[0][:2]])
    return found


def copies(make, options, mesh, rank):
    """Copies of a dense tensor beside experts on parts of the mesh, and beside a plain one.

    In the fourth step one part's expert has a gradient that is not finite.
    """
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part")), []
    part = rank // 2
    for placements in ([Replicate(), Shard(0)], [Replicate(), Replicate()]):
        for is_plain in (False, True):
            dense = sharded(1.0, mesh, placements)
            own = torch.full((4, 4), 1.0 + part) if is_plain else sharded(1.0 + part, mesh["part"])
            params = [Parameter(dense), Parameter(own)]
            optimizer = make(params, lr=0.1, **options, **CLIPPED[make])
            for step in range(6):
                bad = step == 3 and part == 1
                size = torch.nan if bad else 1.0 + 3 * part + step
                params[0].grad = torch.ones_like(params[0]) * (1.0 + step)
                params[1].grad = torch.full_like(params[1], size)
                optimizer.step()
            weight = params[0].detach().full_tensor()
            found.append([float(optimizer.skipped), weight.flatten().tolist()])
    return found


def stacked():
    """`BatchedOptimizer` on shards, by way of a load: what differs from one process, and sums."""
    model, reference = make("fsdp"), make("none")
    optimizer, second = (Momentum(model.parameters()) for _ in range(2))
    train(reference, Momentum(reference.parameters()), range(5))
    train(model, optimizer, range(3), "fsdp")
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, optimizer))
    train(model, second, range(3, 5), "fsdp")
    off, velocity = difference(model, reference), second.state[model.first.weight]["velocity"]
    with CommDebugMode() as communication:
        second.step()
    return [off, isinstance(velocity, DTensor), communication.get_total_counts()]


def everything(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    checks = [
        local_infinity, infinite_together, none_on_one, partial_none, loaded_otherwise, joint_norm,
        lopsided, *([experts, copies] if world == 4 else []),
    ]  # fmt: skip
    found = {
        check.__name__: [check(*case, mesh, rank) for case in CASES.values()] for check in checks
    }
    return {**found, "stacked": stacked()}


# Four processes take three times as long as two.
FOUR = pytest.param(4, marks=pytest.mark.slow)
four_processes = pytest.mark.parametrize("results", [FOUR], indirect=True)


@pytest.fixture(scope="module", params=[2, FOUR])
def results(request, tmp_path_factory):
    """By check what each process found, by case."""
    ranks = on_ranks(request.param, everything, tmp_path_factory.mktemp(f"{request.param}"))
    return {name: [found[name] for found in ranks] for name in ranks[0]}


def test_what_is_not_finite_on_one_process_or_together_stops_all(results):
    for cases in results["local_infinity"]:
        assert cases == [[[[1.0], 1.0]] * 2] * len(CASES)
    for cases in results["infinite_together"]:
        assert cases == [[[1.0], 1.0]] * len(CASES)


def test_a_gradient_of_none_counts_as_zero_and_is_none_if_all_have_none(results):
    world = len(results["none_on_one"])
    for cases in results["none_on_one"]:
        for with_none, with_zeros in cases:
            assert with_none == with_zeros
            # ScaledAdam's momentum goes on without a gradient, from zero here.
            assert with_none[2] == [[3.0] * 4] * (4 // world)


def test_a_partial_gradient_of_none_on_one_process_counts_as_zero(results):
    """No process hangs, and copies stay alike; None on all processes is none."""
    for cases in results["partial_none"]:
        assert cases == results["partial_none"][0]
        for found in cases:
            beside, whole, alone, whole_alone = (torch.tensor(weights) for weights in found)
            # Sums of small whole numbers are exact; norms over copies and a mean may not be.
            torch.testing.assert_close(beside, whole, rtol=1e-6, atol=0)
            torch.testing.assert_close(alone, whole_alone, rtol=1e-6, atol=0)


def test_shards_of_one_tensor_take_the_same_steps(results):
    """Beside a plain parameter that one process alone has; no process hangs."""
    for cases in results["lopsided"]:
        assert cases == results["lopsided"][0]
        for frozen, *others in cases:
            # ScaledAdam bounds and moves a frozen one only if it has a gradient: none has.
            assert frozen[0] == 1.0
            assert all(weight != 1.0 for weight, _ in others)


def test_a_joint_norm_is_the_same_on_all_processes(results):
    """Beside a plain parameter that differs; else shards of one tensor took different steps."""
    for cases in results["joint_norm"]:
        for (split, alone), (first, _) in zip(cases, results["joint_norm"][0], strict=True):
            assert split == first
            # The mean of the squares counts: float32 sums in another order, six steps of 0.1.
            assert split == pytest.approx(alone, rel=1e-5)


def test_states_that_are_laid_out_otherwise(results):
    """They are laid out anew as they are loaded; those of another mesh are refused."""
    for cases in results["loaded_otherwise"]:
        for same, replicated, refused in cases:
            assert replicated == same
            assert "mesh" in refused


@four_processes
def test_experts_on_parts_of_a_mesh_are_not_mixed(results):
    """Each has norms of its own, and the step of a run without sharding."""
    for cases in results["experts"]:
        for split, alone in cases:
            assert split == pytest.approx(alone, rel=1e-5)


@four_processes
def test_copies_stay_alike_beside_tensors_that_differ(results):
    """Joint norms and skipped steps reach the copies of a tensor, too."""
    for cases in results["copies"]:
        assert cases == results["copies"][0]
        for skipped, weights in (run for found in cases for run in found):
            assert skipped == 1.0
            assert weights[0] != 1.0


def test_sharded_stacks_equal_unsharded_ones_without_collectives(results):
    for off, is_sharded, collectives in results["stacked"]:
        assert off < 1e-6  # the gradients' reduction over processes rounds otherwise
        assert is_sharded
        assert collectives == 0
