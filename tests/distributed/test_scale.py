"""Processes skip together and name the same layer; sharded gradients are the whole model's."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from steadygrad.scale import AutoScale, LayerwiseGradScaler
from tests.distributed.optim_models import whole
from tests.distributed.ranks import in_turn
from tests.distributed.training import shard
from tests.unit.scale.training import SCALES, Poison, assert_equal, batch, make, weights_of

pytestmark = pytest.mark.distributed
STEPS, BAD = 5, 2


def loss_of(model, step, rank, world):
    x, y = batch(step, 4 * world)
    rows = slice(4 * rank, 4 * rank + 4)
    return (model(x[rows]) - y[rows]).square().mean()


def run(wrap, rank, world, *, scales, bad_rank, before=False):
    """Weights after some steps, one of them bad on one rank; the scaler, and what it said."""
    model, _ = make()
    poison = Poison(model.b[0])
    wrapped = model if before else wrap(model)
    scaler = LayerwiseGradScaler(model, scales, init_scale=8.0)
    wrapped = wrap(model) if before else wrapped
    optimizer, seen = torch.optim.Adam(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        poison.active = step == BAD and rank == bad_rank
        optimizer.zero_grad()
        scaler.scale(loss_of(wrapped, step, rank, world)).backward()
        with CommDebugMode() as collectives:
            scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.culprits(), collectives.get_total_counts()])
    return {n: whole(p) for n, p in model.named_parameters()}, scaler, seen


def unscaled(world):
    """Training of one process on the batches of all, without scaling and without the bad one."""
    model, optimizer = make(optimizer=torch.optim.Adam)
    for step in set(range(STEPS)) - {BAD}:
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank, world) for rank in range(world)) / world).backward()
        optimizer.step()
    return weights_of(model)


def check_wrapper(wrap, rank, world, before):
    options = {"bad_rank": world - 1, "before": before}
    found, scaler, seen = run(wrap, rank, world, scales=SCALES, **options)
    # One collective a step, the flags, after two that exchange the layers' names; and the layer at
    # fault is the same one everywhere.
    assert [culprits for culprits, _ in seen] == [[], [], ["b"], [], []]
    assert [count for _, count in seen] == [3] + [1] * (STEPS - 1)
    assert scaler.get_scales() == {"": 8.0, **SCALES, "b": SCALES["b"] / 2}
    assert scaler.skipped == 1
    for name, value in unscaled(world).items():
        # Five steps of Adam on float32 means that were added up in another order.
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=name)
    # To the bit, what the same wrapper does when nothing is scaled.
    plain, *_ = run(wrap, rank, world, scales={}, **options)
    assert_equal(found, plain)
    return scaler.state_dict()


def automatic(rank, world):
    auto = AutoScale(every=1)
    with torch.autocast("cpu", torch.float16):
        _, scaler, _ = run(DistributedDataParallel, rank, world, scales=auto, bad_rank=0)
    return scaler.state_dict(), scaler.measured.weights.sum().item()


def alone(rank, world):
    """Without a group every process decides for itself, and nothing is sent."""
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES, process_group=None)
    poison = Poison(model.b[0])
    poison.active = rank == 0
    scaler.scale(loss_of(model, 0, rank, world)).backward()
    with CommDebugMode() as collectives:
        scaler.step(optimizer)
    scaler.update()
    return scaler.culprits(), collectives.get_total_counts()


def other_layers(rank, world):
    """One layer more on each process than on the one before, as in the stages of a pipeline."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2 + rank))).half()
    scaler = LayerwiseGradScaler(model, {"*": 4.0}, growth_interval=2)
    poison = Poison(torch.nn.Identity())
    # The last layer's input, behind its boundary.
    model[-1].register_forward_pre_hook(lambda module, args: poison.hook(module, None, args[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        scaler.measure(step == 3)
        poison.active = step == 1 and rank == world - 1
        before = weights_of(model)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4).half()).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(weights_of(model)["0.weight"], before["0.weight"])
        seen.append([scaler.culprits(), moved])
    return seen, scaler.get_scales(), scaler.measured.weights.sum(1).tolist()


def wrappers(rank, world):
    return [
        check_wrapper(wrap, rank, world, before)
        for wrap in (DistributedDataParallel, lambda model: shard(model, model.b))
        for before in (False, True)
    ]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request, tmp_path_factory):
    """By function what each rank found."""
    functions = [wrappers, automatic, alone, other_layers]
    return in_turn(request.param, functions, tmp_path_factory.mktemp(f"{request.param}"))


def test_all_processes_do_the_same(results):
    for name in ("wrappers", "automatic"):
        assert results[name] == results[name][:1] * len(results[name])
    # Every process's gradients are counted.
    _, counted = results["automatic"][0]
    assert counted == len(results["automatic"]) * (20 + 5 + 30 + 30 + 12)


def test_without_a_group_each_process_decides_for_itself(results):
    first, *others = results["alone"]
    assert first == [["b"], 0]
    assert others == [[[], 0]] * len(others)


def test_processes_with_other_layers_skip_together(results):
    world = len(results["other_layers"])
    last = str(world)
    for rank, (seen, scales, weights) in enumerate(results["other_layers"]):
        # All leave the same step out, and name the layer, whoever has it.
        assert seen == [[[], True], [[last], False], [[], True], [[], True]]
        grown = {str(i): 16.0 for i in range(2 + rank)}
        assert scales == {"": 1.0, **grown} | ({last: 4.0} if rank == world - 1 else {})
        # Each layer's exponents are those of the processes that have it.
        assert weights == [0.0, *(20.0 * (world - max(i - 1, 0)) for i in range(2 + rank))]
