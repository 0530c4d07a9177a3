"""Several processes balance as one does on the joined batch: DDP, FSDP2, missing losses."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.distributed.ranks import on_ranks
from tests.distributed.training import make_model, shard
from tests.unit.balance.problems import (
    WEIGHTS,
    averages_of,
    draw,
    losses_of,
    mass_of,
    parameters_of,
    same_y,
)

pytestmark = pytest.mark.distributed

ITEMS = 3
STEPS = 5
WRAP = {"ddp": DistributedDataParallel, "fsdp": shard}

OPTIONS = {
    "default": {},
    "whole batch": {"per_batch_item": False, "total_norm": 2.0},
    "batch-independent": {"batch_independent": True},
    "combined": {"combine": "products"},
}


class ByProducts(nn.Module):
    """A stand-in for TorchJD's aggregators: it looks at inner products alone."""

    def __init__(self):
        super().__init__()
        self.gramian_weighting = lambda products: 1 + products.sum(0)


def make_balancer(name, **more):
    options = {**OPTIONS[name], **more}
    if options.get("combine") == "products":
        options["combine"] = ByProducts()
    return LossBalancer(WEIGHTS, **options)


def batch(step, world):
    n = ITEMS * world
    return draw(n, 7, seed=step), draw(n, 3, seed=100 + step)


def names_there(step, rank, missing):
    """In every second step one rank has no adversarial loss, or all of them."""
    if missing == "one" and step % 2 and rank == 0:
        return ["l1", "l2"]
    if missing == "all" and step % 2 and rank == 0:
        return []
    return list(WEIGHTS)


def rank_losses(ys, x_target, step, missing, ranks):
    """The mean over ranks of each rank's losses, in which its missing ones count as zero."""
    total = {}
    for rank in ranks:
        rows = slice(rank * ITEMS, (rank + 1) * ITEMS)
        there = names_there(step, rank, missing)
        own = losses_of({k: ys[k][rows] for k in there}, x_target[rows])
        for name, loss in own.items():
            total[name] = total.get(name, 0.0) + loss / len(ranks)
    return total


def joined_run(world, name, missing):
    """One process on the joined batch."""
    model, balancer = make_model(), make_balancer(name, process_group=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, target = batch(step, world)
        losses = rank_losses(balancer.fork(model(x)), target, step, missing, range(world))
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model).tolist(), averages_of(balancer).tolist()


def one_run(rank, world, kind, call, name, missing):
    model, balancer = WRAP[kind](make_model()), make_balancer(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, target = (t[rank * ITEMS : (rank + 1) * ITEMS] for t in batch(step, world))
        y = model(x)
        there = names_there(step, rank, missing)
        if call == "fork":
            ys = balancer.fork(y)
            sum(losses_of({k: ys[k] for k in there}, target).values()).backward()
        else:
            balancer.backward(losses_of(same_y(y, there), target), y)
        optimizer.step()
        optimizer.zero_grad()
    full = [p.full_tensor() if kind == "fsdp" else p for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in full])
    state = {k: v.tolist() for k, v in balancer.state_dict().items()}
    return flat.tolist(), averages_of(balancer).tolist(), state


CASES = [
    *((kind, call, "default", "none") for kind in ("ddp", "fsdp") for call in ("fork", "backward")),
    ("ddp", "fork", "whole batch", "none"),
    ("fsdp", "backward", "whole batch", "one"),
    ("ddp", "backward", "batch-independent", "one"),
    ("fsdp", "fork", "batch-independent", "one"),
    ("ddp", "fork", "default", "one"),
    ("ddp", "backward", "default", "all"),
    ("fsdp", "fork", "combined", "one"),
]


def collectives(rank, world):
    """How many collectives a step adds to the same step without a balancer."""
    found = {}
    for size in (3, 300):
        weights = {f"loss{i}": 1.0 for i in range(size)}
        balancer = LossBalancer(weights, monitor=size == 3)
        y = draw(2, 5).requires_grad_()
        # The first step makes a process group, for which there is one more.
        for _ in range(2):
            with CommDebugMode() as counter:
                ys = balancer.fork(y * 1)
                sum((ys[k] * (i + 1)).sum() for i, k in enumerate(weights)).backward()
        found[size] = counter.get_total_counts()
    return found


def groups(rank, world):
    """A balancer of one half of the processes, one of each process alone, and orders of names."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    y = draw(2, 5, seed=rank)
    found = {}
    for key, group in (("half", halves[rank // 2]), ("alone", None), ("all", "all")):
        # Losses handed over in another order on every second rank: packed by name all the same.
        balancer = LossBalancer({"a": 1, "b": 2}, process_group=group)
        leaf = y.clone().requires_grad_()
        losses = {"a": leaf.sum(), "b": 100 * leaf.square().sum()}
        order = list(losses) if rank % 2 else list(reversed(losses))
        balancer.backward({k: losses[k] for k in order}, leaf)
        found[key] = averages_of(balancer).tolist()
        found[f"{key} twin"] = copy.deepcopy(balancer).ranks.members is group
    twin = copy.deepcopy(balancer)
    leaf = y.clone().requires_grad_()
    twin.backward({"a": leaf.sum(), "b": leaf.sum()}, leaf)
    found["twin"] = mass_of(twin).tolist()
    mesh = init_device_mesh("cpu", (world,))
    try:
        balancer.fork(DTensor.from_local(leaf * 1, mesh, [Shard(0)]))
    except InputError as error:
        found["sharded"] = str(error)
    nan = torch.full((2, 5), torch.nan if rank == 1 else 1.0, dtype=torch.float64)
    balancer.backward({"a": (nan * leaf).sum(), "b": leaf.sum()}, leaf)
    found["nonfinite"] = [balancer.metrics[f"nonfinite_{k}"].item() for k in "ab"]
    found["scales"] = balancer.metrics["scale_a"].item()
    return found


class Drawing(ByProducts):
    """Weighs at random, as PCGrad does by the order it draws."""

    def __init__(self):
        super().__init__()
        self.gramian_weighting = lambda products: torch.rand(len(products)).double()


def apart(rank, world):
    """Allowed differences between processes: groups and random numbers."""
    found = {}
    if rank == 0:
        # torch names a group by how many this process is in.
        dist.new_group([0], use_local_synchronization=True)
    torch.manual_seed(rank)
    names = list(WEIGHTS)
    for key, combine in (("sum", None), ("drawn", Drawing())):
        weights = dict.fromkeys(names, 1.0)
        balancer = LossBalancer(weights, combine=combine, monitor=True)
        leaf = draw(2, 5, seed=rank).requires_grad_()
        ys = balancer.fork(leaf * 1)
        factors = {"l1": 1.0, "l2": 100.0, "adv": 0.01}
        sum((factors[k] * ys[k].square()).sum() for k in names).backward()
        kept = averages_of(balancer).tolist()
        # Its own, because the order of DDP's collectives is not ours.
        found[f"{key} own"] = balancer.ranks._own[1] is not dist.group.WORLD
        found[f"{key} averages"] = dict(sorted(zip(names, kept, strict=True)))
        found[f"{key} cosine"] = min(v.item() for k, v in balancer.metrics.items() if "cos" in k)
        scales = [balancer.metrics[f"scale_{k}"].item() for k in names]
        drawn = [scale * norm for scale, norm in zip(scales, kept, strict=True)]
        found[f"{key} drawn"] = dict(sorted(zip(names, drawn, strict=True)))
    return found


def everything(rank, world):
    """All that needs processes, in one go: starting them takes longest."""
    found = {"cases": [one_run(rank, world, *case) for case in CASES]}
    if world == 2:
        found["collectives"] = collectives(rank, world)
    else:
        found["groups"] = groups(rank, world)
    found["apart"] = apart(rank, world)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Reports of each rank of two and of four processes."""
    return {
        world: on_ranks(world, everything, tmp_path_factory.mktemp(f"ranks{world}"))
        for world in (2, 4)
    }


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_on_the_joined_batch(world, runs):
    results = [found["cases"] for found in runs[world]]
    for i, (kind, call, name, missing) in enumerate(CASES):
        parameters, averages = joined_run(world, name, missing)
        for found, kept, state in (result[i] for result in results):
            # Sums over ranks in another order, five steps long; the issue asks for 1e-6.
            assert found == pytest.approx(parameters, abs=1e-12), (kind, call, name, missing)
            assert kept == pytest.approx(averages, rel=1e-12), (kind, call, name, missing)
            # The state is the same on every rank to the bit.
            assert state == results[0][i][2]


def test_one_collective_a_step_whatever_the_losses(runs):
    for found in runs[2]:
        assert found["collectives"] == {"3": 1, "300": 1}


@pytest.mark.parametrize("world", [2, 4])
def test_processes_may_differ_in_groups_and_random_numbers(world, runs):
    results = [found["apart"] for found in runs[world]]
    for found in results:
        one, two = (found["sum averages"][k] for k in ("l1", "l2"))
        assert two == pytest.approx(100 * one)
        assert found["sum averages"] == results[0]["sum averages"]
        assert found["sum own"] is found["drawn own"] is True
        assert found["sum cosine"] == pytest.approx(1.0)
        # Every average times its scale is a third, and with drawn weights a third of those.
        assert found["sum drawn"] == pytest.approx(dict.fromkeys(WEIGHTS, 1 / 3))
        assert found["drawn drawn"] == pytest.approx(results[0]["drawn drawn"])
        drawn = found["drawn drawn"].values()
        assert max(drawn) > 1.1 * min(drawn)


def test_groups_orders_and_what_one_rank_alone_has(runs):
    results = [found["groups"] for found in runs[4]]
    norms = []
    for rank in range(4):
        y = draw(2, 5, seed=rank)
        norms.append((5**0.5, (200 * y).norm(dim=1).mean().item()))
    for rank, found in enumerate(results):
        assert found["alone"] == pytest.approx(norms[rank])
        half = norms[:2] if rank < 2 else norms[2:]
        # Means over the items, of gradients that the number of processes divides.
        assert found["half"] == pytest.approx([sum(n) / 2 / 2 for n in zip(*half, strict=True)])
        assert found["all"] == pytest.approx([sum(n) / 4 / 4 for n in zip(*norms, strict=True)])
        assert found["twin"][0] > 1
        assert found["half twin"] is found["alone twin"] is found["all twin"] is True
        assert "DTensor" in found["sharded"]
        # A gradient that is not finite on one rank is left out on all of them.
        assert found["nonfinite"] == [1, 0]
        assert found["scales"] == 0.0
