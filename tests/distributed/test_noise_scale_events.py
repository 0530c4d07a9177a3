"""`NoiseScale` on several processes: wrappers, refusals, and what goes wrong on one rank only."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from steadygrad.noise import NoiseScale
from tests.distributed.ranks import in_turn
from tests.distributed.training import MICRO, loss_of, make_model, sample, shard
from tests.refusals import refused

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def wrapped(rank, world):
    """The same step through every form a DDP model may come in, and without the wrapper."""
    found = []
    for wrap in (
        DistributedDataParallel,
        # As a trainer holds its model: not the wrapper itself.
        lambda m: nn.Sequential(DistributedDataParallel(m)),
        lambda m: torch.compile(DistributedDataParallel(m), backend="eager"),
    ):
        model = wrap(make_model())
        noise = NoiseScale(model, samples=MICRO)
        loss_of(model, *sample(0, 0, rank)).backward()
        noise.step()
        found.append([noise.world.kind, noise.estimate().noise_trace.item()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        NoiseScale(DistributedDataParallel(make_model()).module)
    return found, [str(w.message) for w in caught]


def one_rank_forgets(rank, world):
    """A rank without a micro-batch gets its error; the other is not left waiting."""
    model = DistributedDataParallel(make_model())
    noise = NoiseScale(model)
    loss = loss_of(model, *sample(0, 0, rank))
    if rank == 0:
        with noise.microbatch(MICRO):
            loss.backward()
    else:
        loss.backward()
        with refused("Found 0"):
            noise.step()
        return None
    noise.step()
    return [noise.estimate().measurements.item(), noise.skipped.item()]


def refusals(rank, world):
    """By argument, and tensor parallelism, alone and under fully_shard."""
    sharded = make_model()
    shard(sharded, sharded[0], sharded[3])
    optimizer = torch.optim.Adam(sharded.parameters())
    with refused("source"):
        NoiseScale(DistributedDataParallel(make_model()), source="accumulated")
    with refused("source"):
        NoiseScale(sharded, metric="preconditioned", optimizer=optimizer)
    for shape, names in [((2,), ("tp",)), ((1, 2), ("dp", "tp"))]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = make_model()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        if "dp" in names:
            fully_shard(model, mesh=mesh["dp"])
        with refused("tensor parallelism"):
            NoiseScale(model)
    return "refused"


def spoiled(rank, world):
    """An overflow on one rank only: every rank leaves the step out, none hangs."""
    model = DistributedDataParallel(make_model())
    noise = NoiseScale(model, samples=MICRO)
    for step in range(2):
        model.zero_grad()
        x, y = sample(step, 0, rank)
        if step == 1 and rank == 1:
            x[0, 0] = torch.inf
        loss_of(model, x, y).backward()
        noise.step()
    return [noise.estimate().measurements.item(), noise.skipped.item()]


def empty(model, rank):
    """The second rank's samples are all masked; its passes run all the same."""
    noise = NoiseScale(model)
    for step in range(3):
        for micro in range(2):
            x, y = sample(step, micro, rank)
            noise.samples(0 if rank else MICRO)
            (loss_of(model, x, y) * (rank == 0) / 2).backward()
        noise.step()
        model.zero_grad()
    return noise.state_dict()["ring"][:3].tolist()


def one_rank_is_empty(rank, world):
    return [empty(wrap(make_model()), rank) for wrap in (DistributedDataParallel, shard)]


def toggled(model, loss, sync):
    """The flag is set between the forward and the backward pass, where DDP reads another one."""
    model.require_backward_grad_sync = sync
    loss.backward()


def in_context(model, loss, sync):
    loss.backward()


def one_rank_more(model, loss, sync):
    loss.backward()
    if sync:
        # All ranks' parts are in the mean of their `.grad`; each has another half.
        next(model.parameters()).grad.mul_(1.5 - dist.get_rank())


# Where a pass of three is synchronised, and how it runs.
NOT_ALIKE = {
    "last": (2, in_context),
    "first": (0, in_context),
    "none": (3, in_context),
    "a flag": (0, toggled),
    "one gradient": (2, one_rank_more),
}


def copies_that_differ(rank, world):
    """Altered steps, and how many were measured."""
    found = {}
    for name, (synced, run) in NOT_ALIKE.items():
        model = DistributedDataParallel(make_model())
        noise = NoiseScale(model, samples=MICRO)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(2):
                model.zero_grad()
                for micro in range(3):
                    with contextlib.nullcontext() if micro == synced else model.no_sync():
                        loss = loss_of(model, *sample(step, micro, rank)) / 3
                        run(model, loss, micro == synced)
                noise.step()
        found[name] = [noise.altered.item(), noise.estimate().measurements.item()]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found, by function."""
    functions = [
        wrapped,
        one_rank_forgets,
        refusals,
        spoiled,
        one_rank_is_empty,
        copies_that_differ,
    ]
    return in_turn(2, functions, tmp_path_factory.mktemp("events"))


def test_ddp_is_found_in_any_wrapping(results):
    for found, messages in results["wrapped"]:
        kinds, traces = zip(*found, strict=True)
        assert set(kinds) == {"ddp"}
        assert traces == pytest.approx([traces[0]] * 3, rel=1e-12)
        assert len(messages) == 1
        assert "this process's samples" in messages[0]


def test_an_error_on_one_rank_does_not_hang_the_other(results):
    assert results["one_rank_forgets"] == [[0, 1], None]


def test_what_cannot_work_is_refused(results):
    assert results["refusals"] == ["refused"] * 2


def test_what_one_rank_notices_all_of_them_say(results):
    # Measured, and left out.
    assert results["spoiled"] == [[1, 1]] * 2


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_gradients_that_differ_between_copies_are_altered(results, name):
    expected = [0, 2] if name == "last" else [2, 0]
    assert [rank[name] for rank in results["copies_that_differ"]] == [expected] * 2


def test_a_rank_without_samples_counts_for_nothing(results):
    alone = torch.tensor(empty(make_model(), 0))
    for rings in results["one_rank_is_empty"]:
        for ring in rings:
            # 1e-9: other sums of the same float64 numbers.
            assert torch.allclose(torch.tensor(ring), alone, rtol=1e-9)
