"""`NoiseScale` on several processes: wrappers, refusals, and what goes wrong on one rank only."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.distributed.ranks import in_turn
from tests.distributed.training import MICRO, loss_of, make_model, sample, shard

pytestmark = pytest.mark.distributed


def measured(model, x, y):
    """A noise scale after one step of one micro-batch."""
    noise = NoiseScale(model)
    loss = loss_of(model, x, y)
    with noise.microbatch(MICRO):
        loss.backward()
    noise.step()
    return noise


def refusal(function, *arguments, **options):
    """What an error says."""
    with pytest.raises(InputError) as error:
        function(*arguments, **options)
    return str(error.value)


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
        noise = measured(model, *sample(0, 0, rank))
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
        return refusal(noise.step)
    noise.step()
    return [noise.estimate().measurements.item(), noise.skipped.item()]


def tensor_parallel(rank, world):
    """Tensor parallelism, alone and under fully_shard, is refused by name."""
    found = []
    for shape, names in [((2,), ("tp",)), ((1, 2), ("dp", "tp"))]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = make_model()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        if "dp" in names:
            fully_shard(model, mesh=mesh["dp"])
        found.append(refusal(NoiseScale, model))
    return found


def refusals(rank, world):
    sharded = shard(make_model())
    optimizer = torch.optim.Adam(sharded.parameters())
    return [
        refusal(NoiseScale, DistributedDataParallel(make_model()), source="accumulated"),
        refusal(NoiseScale, sharded, metric="preconditioned", optimizer=optimizer),
    ]


def spoiled(rank, world):
    """An overflow on one rank only: every rank leaves the step out, none hangs."""
    model = DistributedDataParallel(make_model())
    noise = NoiseScale(model)
    for step in range(2):
        model.zero_grad()
        x, y = sample(step, 0, rank)
        if step == 1 and rank == 1:
            x[0, 0] = torch.inf
        loss = loss_of(model, x, y)
        with noise.microbatch(MICRO):
            loss.backward()
        noise.step()
    return [noise.estimate().measurements.item(), noise.skipped.item()]


def mixed(rank, world):
    """bfloat16 compute with float32 reduction: the norms are those of bfloat16 gradients."""
    model = make_model().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mp_policy=policy)
    return measured(model, *(t.bfloat16() for t in sample(0, 0, rank))).estimate().as_dict()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found, by function."""
    functions = [wrapped, one_rank_forgets, tensor_parallel, refusals, spoiled, mixed]
    return in_turn(2, functions, tmp_path_factory.mktemp("events"))


def test_ddp_is_found_in_any_wrapping(results):
    for found, messages in results["wrapped"]:
        kinds, traces = zip(*found, strict=True)
        assert set(kinds) == {"ddp"}
        assert traces == pytest.approx([traces[0]] * 3, rel=1e-12)
        assert len(messages) == 1
        assert "this process's samples" in messages[0]


def test_an_error_on_one_rank_does_not_hang_the_other(results):
    first, second = results["one_rank_forgets"]
    assert first == [0, 1]
    assert "Found 0" in second


def test_tensor_parallelism_is_refused(results):
    for messages in results["tensor_parallel"]:
        assert len(messages) == 2
        assert all("tensor parallelism" in message for message in messages)


def test_what_cannot_work_is_refused(results):
    for ddp, fsdp in results["refusals"]:
        assert "`source`" in ddp
        assert "`source`" in fsdp


def test_overflow_on_one_rank_is_left_out_on_all(results):
    assert results["spoiled"] == [[1, 1], [1, 1]]


def test_fsdp_mixed_precision(results):
    model = make_model()
    noise = NoiseScale(model)
    for rank in range(2):
        with noise.microbatch(MICRO):
            (loss_of(model, *sample(0, 0, rank)) / 2).backward()
    noise.step()
    expected = noise.estimate().as_dict()
    for got in results["mixed"]:
        # 5 %: bfloat16 has eight bits, and noise is a difference of squares.
        assert got["noise_trace"] == pytest.approx(expected["noise_trace"], rel=0.05)
