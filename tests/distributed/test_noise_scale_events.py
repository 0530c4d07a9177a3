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
from tests.distributed.ranks import on_ranks
from tests.distributed.training import MICRO, loss_of, make_model, sample, shard

pytestmark = pytest.mark.distributed


def in_a_module(model):
    """As a trainer holds its model: not the wrapper itself."""
    outer = nn.Sequential(DistributedDataParallel(model))
    return outer


def wrapped(rank, world):
    """The same step through every form a DDP model may come in, and without the wrapper."""
    found = []
    for wrap in (
        DistributedDataParallel,
        in_a_module,
        lambda m: torch.compile(DistributedDataParallel(m), backend="eager"),
    ):
        model = wrap(make_model())
        noise = NoiseScale(model)
        loss = loss_of(model, *sample(0, 0, rank))
        with noise.microbatch(MICRO):
            loss.backward()
        noise.step()
        found.append([noise.world.kind, noise.estimate().noise_trace.item()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        NoiseScale(DistributedDataParallel(make_model()).module)
    return found, [str(w.message) for w in caught]


def test_ddp_is_found_in_any_wrapping(tmp_path):
    for found, messages in on_ranks(2, wrapped, tmp_path):
        kinds, traces = zip(*found, strict=True)
        assert set(kinds) == {"ddp"}
        assert traces == pytest.approx([traces[0]] * 3, rel=1e-12)
        assert len(messages) == 1
        assert "only this process's samples are measured. Remedy: hand in" in messages[0]


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
    try:
        noise.step()
    except InputError as error:
        return str(error)
    return [noise.estimate().measurements.item(), noise.skipped.item()]


def test_an_error_on_one_rank_does_not_hang_the_other(tmp_path):
    first, second = on_ranks(2, one_rank_forgets, tmp_path)
    assert first == [0, 1]
    assert "at least 1 parts a step. Found 0" in second


def tensor_parallel(rank, world):
    """Tensor parallelism, alone and under fully_shard, is refused by name."""
    found = []
    for shape, names in [((2,), ("tp",)), ((1, 2), ("dp", "tp"))]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = make_model()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        if "dp" in names:
            fully_shard(model, mesh=mesh["dp"])
        try:
            NoiseScale(model)
        except InputError as error:
            found.append(str(error))
    return found


def test_tensor_parallelism_is_refused(tmp_path):
    for messages in on_ranks(2, tensor_parallel, tmp_path):
        assert len(messages) == 2
        assert all("Remedy: tensor parallelism is not supported" in m for m in messages)


def refusals(rank, world):
    found = []
    for make in (
        lambda: NoiseScale(DistributedDataParallel(make_model()), source="accumulated"),
        lambda: NoiseScale(
            model := shard(make_model()),
            metric="preconditioned",
            optimizer=torch.optim.Adam(model.parameters()),
        ),
    ):
        try:
            make()
        except InputError as error:
            found.append(str(error))
    return found


def test_what_cannot_work_is_refused(tmp_path):
    for ddp, fsdp in on_ranks(2, refusals, tmp_path):
        assert "`source` to be microbatch or per_example" in ddp
        assert "`source` to be accumulated for metric='preconditioned'" in fsdp


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


def test_overflow_on_one_rank_is_left_out_on_all(tmp_path):
    assert on_ranks(2, spoiled, tmp_path) == [[1, 1], [1, 1]]


def mixed(rank, world):
    """bfloat16 compute with float32 reduction: the norms are those of bfloat16 gradients."""
    model = make_model().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mp_policy=policy)
    noise = NoiseScale(model)
    x, y = sample(0, 0, rank)
    loss = loss_of(model, x.bfloat16(), y.bfloat16())
    with noise.microbatch(MICRO):
        loss.backward()
    noise.step()
    return noise.estimate().as_dict()


def test_fsdp_mixed_precision(tmp_path):
    model = make_model()
    noise = NoiseScale(model)
    for rank in range(2):
        with noise.microbatch(MICRO):
            (loss_of(model, *sample(0, 0, rank)) / 2).backward()
    noise.step()
    expected = noise.estimate().as_dict()
    for got in on_ranks(2, mixed, tmp_path):
        # 5 %: bfloat16 has eight bits, and noise is a difference of squares.
        assert got["noise_trace"] == pytest.approx(expected["noise_trace"], rel=0.05)
