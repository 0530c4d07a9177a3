"""Processes skip together and name the same layer; sharded gradients are the whole model's."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from steadygrad.scale import AutoScale, LayerwiseGradScaler
from tests.distributed.ranks import on_ranks
from tests.unit.scale.test_audit import TOKENS, Head
from tests.unit.scale.training import SCALES, Poison, assert_equal, batch, make, weights_of

pytestmark = pytest.mark.distributed
STEPS, BAD = 5, 2


def shard(model):
    fully_shard(model.b)
    return fully_shard(model)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model, step, rank, world):
    x, y = batch(step, 4 * world)
    rows = slice(4 * rank, 4 * rank + 4)
    return (model(x[rows]) - y[rows]).square().mean()


def run(wrap, rank, world, *, scales, bad_rank=None, before=False, seen=None):
    """Weights after some steps, one of them bad on one rank; and the scaler."""
    model, _ = make()
    poison = Poison(model.b[0])
    wrapped = model if before else wrap(model)
    scaler = LayerwiseGradScaler(model, scales, init_scale=8.0)
    wrapped = wrap(model) if before else wrapped
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(STEPS):
        poison.active = step == BAD and rank == bad_rank
        optimizer.zero_grad()
        scaler.scale(loss_of(wrapped, step, rank, world)).backward()
        with CommDebugMode() as collectives:
            scaler.step(optimizer)
        scaler.update()
        if seen is not None:
            seen.append([scaler.culprits(), collectives.get_total_counts()])
    return {n: full(p.detach()) for n, p in model.named_parameters()}, scaler


def whole(world):
    """Training of one process on the batches of all, without scaling and without the bad one."""
    model, optimizer = make(optimizer=torch.optim.Adam)
    for step in set(range(STEPS)) - {BAD}:
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank, world) for rank in range(world)) / world).backward()
        optimizer.step()
    return weights_of(model)


def close(found, expected):
    for name, value in expected.items():
        # Five steps of Adam on float32 means that were added up in another order.
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=name)


def check_wrapper(wrap, rank, world, before):
    seen = []
    found, scaler = run(
        wrap, rank, world, scales=SCALES, bad_rank=world - 1, before=before, seen=seen
    )
    # One collective a step, the flags, after two that exchange the layers' names; and the layer at
    # fault is the same one everywhere.
    assert [culprits for culprits, _ in seen] == [[], [], ["b"], [], []]
    assert [count for _, count in seen] == [3] + [1] * (STEPS - 1)
    assert scaler.get_scales() == {"": 8.0, **SCALES, "b": SCALES["b"] / 2}
    assert scaler.skipped == 1
    close(found, whole(world))
    # To the bit, what the same wrapper does when nothing is scaled.
    plain, _ = run(wrap, rank, world, scales={}, bad_rank=world - 1, before=before)
    assert_equal(found, plain)
    return scaler.state_dict()


def check_automatic(rank, world):
    auto = AutoScale(every=1)
    with torch.autocast("cpu", torch.float16):
        _, scaler = run(DistributedDataParallel, rank, world, scales=auto, bad_rank=0)
    return scaler.state_dict(), scaler.measured.weights.sum().item()


def check_alone(rank, world):
    """Without a group every process decides for itself, and nothing is sent."""
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES, process_group=None)
    poison = Poison(model.b[0])
    poison.active = rank == 0
    scaler.scale(loss_of(model, 0, rank, world)).backward()
    with CommDebugMode() as collectives:
        scaler.step(optimizer)
    scaler.update()
    assert collectives.get_total_counts() == 0
    return scaler.culprits()


def check_refused(rank, world):
    """DDP leaves the graph whole: a use that gets around a boundary shows."""
    model = Head()
    scaler = LayerwiseGradScaler(model, {"embed": 8.0}, process_group=None)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"'embed\.weight'"):
        scaler.scale(wrapped(TOKENS).sum())


def check_two_scalers(rank, world):
    """The generator's loss overflows on one process: all skip its step, and no critic's."""
    torch.manual_seed(0)
    nets = [torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())]
    scalers = [
        LayerwiseGradScaler(net, scales) for net, scales in zip(nets, ({}, {"0": 8.0}), strict=True)
    ]
    wrapped = [DistributedDataParallel(net) for net in nets]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for step in range(3):
        for i in (0, 1):
            made = wrapped[0](torch.full((2, 3), 1.0 + rank))
            loss = wrapped[1](made.detach() if i else made).mean()
            bad = (step, rank, i) == (1, world - 1, 0)
            optimizers[i].zero_grad()
            scalers[i].scale(loss * torch.inf if bad else loss).backward()
            scalers[i].step(optimizers[i])
            scalers[i].update()
    return [int(scaler.skipped) for scaler in scalers], [p.tolist() for p in nets[1].parameters()]


def check_other_layers(rank, world):
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


def everything(rank, world):
    check_refused(rank, world)
    states = [
        check_wrapper(DistributedDataParallel, rank, world, before=False),
        check_wrapper(DistributedDataParallel, rank, world, before=True),
        check_wrapper(shard, rank, world, before=False),
        check_wrapper(shard, rank, world, before=True),
    ]
    return {
        "states": states,
        "auto": check_automatic(rank, world),
        "alone": check_alone(rank, world),
        "two": check_two_scalers(rank, world),
    }


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_processes_do_the_same(world, tmp_path):
    results = on_ranks(world, everything, tmp_path)
    for result in results:
        assert result["states"] == results[0]["states"]
        assert result["auto"] == results[0]["auto"]
        assert result["two"] == results[0]["two"]
    assert [result["alone"] for result in results] == [["b"], *[[]] * (world - 1)]
    assert results[0]["two"][0] == [1, 0]
    # Every process's gradients are counted.
    assert results[0]["auto"][1] == world * (20 + 5 + 30 + 30 + 12)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_with_other_layers_skip_together(world, tmp_path):
    results = on_ranks(world, check_other_layers, tmp_path)
    last = str(world)
    for rank, (seen, scales, weights) in enumerate(results):
        # All leave the same step out, and name the layer, whoever has it.
        assert seen == [[[], True], [[last], False], [[], True], [[], True]]
        grown = {str(i): 16.0 for i in range(2 + rank)}
        assert scales == {"": 1.0, **grown} | ({last: 4.0} if rank == world - 1 else {})
        # Each layer's exponents are those of the processes that have it.
        assert weights == [0.0, *(20.0 * (world - max(i - 1, 0)) for i in range(2 + rank))]
