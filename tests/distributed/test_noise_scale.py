"""DDP, FSDP2 and HSDP estimates equal one process's on the same samples."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed

MICRO = 6  # samples a rank and micro-batch
STEPS = 4


def make_model():
    torch.manual_seed(0)
    # The width 5 shards unevenly over 2 and 4; the bias of 3 leaves a rank of 4 with nothing.
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def sample(step, micro, rank, n=MICRO):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    x = torch.randn(n, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, y + x[:, :3]


def loss_of(model, x, y):
    return (model(x) - y).square().sum(-1).mean()


def train(model, optimizer, noise, micros, accumulate, sizes=None):
    """``micros(step)`` lists this process's micro-batches as (micro, rank)."""
    for step in range(STEPS):
        mine = micros(step)
        for i, (micro, rank) in enumerate(mine):
            n = sizes[rank] if sizes else MICRO
            last = i == len(mine) - 1
            with accumulate(last):
                loss = loss_of(model, *sample(step, micro, rank, n)) / len(mine)
                with noise.microbatch(n):
                    loss.backward()
        noise.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    got = noise.estimate()
    return [got.as_dict(), {k: g.as_dict() for k, g in got.by_group.items()}]


class Nothing:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class FsdpSync(Nothing):
    """The context that lets FSDP2 reduce only after the last micro-batch."""

    def __init__(self, model, last):
        model.set_requires_gradient_sync(last)


def make_optimizer(model, metric):
    if metric == "euclidean":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


def single(world, micros, *, sizes=None, metric="euclidean", source="microbatch"):
    """One process sees what all of them see: each rank's micro-batch, or whole micro-batches."""
    model = make_model()
    optimizer = make_optimizer(model, metric)
    options = {"metric": metric, "optimizer": optimizer} if metric != "euclidean" else {}
    if source == "per_example":
        options["source"] = source
    noise = NoiseScale(model, **options)
    merge = source == "accumulated"
    if merge:
        for step in range(STEPS):
            for micro in range(micros):
                data = [sample(step, micro, rank) for rank in range(world)]
                x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
                with noise.microbatch(len(x)):
                    (loss_of(model, x, y) / micros).backward()
            noise.step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        got = noise.estimate()
        return [got.as_dict(), {k: g.as_dict() for k, g in got.by_group.items()}]
    every = [(micro, rank) for micro in range(micros) for rank in range(world)]
    return train(model, optimizer, noise, lambda _: every, Nothing, sizes)


def shard(model, mesh=None, **options):
    kwargs = {**({"mesh": mesh} if mesh is not None else {}), **options}
    for layer in (model[0], model[3]):
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    return model


def _hsdp_mesh(world):
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def distributed(rank, world, kind, micros, sizes=None, source="microbatch", metric="euclidean"):
    """One rank's run; returns its estimate and how many collectives a measurement makes."""
    model = make_model()
    accumulate = Nothing
    if kind == "ddp":
        model = DistributedDataParallel(model)
        accumulate = lambda last: Nothing() if last else model.no_sync()  # noqa: E731
    else:
        mesh = _hsdp_mesh(world) if kind == "hsdp" else None
        shard(model, mesh)
        if source == "microbatch":
            accumulate = lambda last: FsdpSync(model, last)  # noqa: E731
    optimizer = make_optimizer(model, metric)
    options = {"metric": metric, "optimizer": optimizer} if metric != "euclidean" else {}
    noise = NoiseScale(model, source=source, **options)
    mine = [(micro, rank) for micro in range(micros)]
    got = train(model, optimizer, noise, lambda _: mine, accumulate, sizes)
    with CommDebugMode() as counter:
        noise._begin()
        noise._sums.add(1.0, 6, 2)
        noise._meter._loss_scale = 1.0
        noise.step()
    return [*got, counter.get_total_counts()]


def same(got, expected):
    """Equal to 1e-5, as the issue of unequal summation orders asks for; values far from zero."""
    for key in ("grad_sq_norm", "noise_trace", "value", "low", "high"):
        a, b = got[key], expected[key]
        if isinstance(b, float) and (math.isnan(b) or math.isinf(b)):
            assert str(a) == str(b), key
        else:
            assert a == pytest.approx(b, rel=1e-5), key
    assert got["measurements"] == expected["measurements"] == STEPS


def check(results, expected):
    whole, groups = expected
    for rank_whole, rank_groups, collectives in results:
        same(rank_whole, whole)
        assert collectives == 1
        assert set(rank_groups) == set(groups)
        for name in groups:
            same(rank_groups[name], groups[name])


# One start of the processes runs every case of a world: starting them is what takes the time.
CASES = {
    2: {
        "ddp, one micro-batch": ("ddp", 1),
        "ddp, three micro-batches": ("ddp", 3),
        "ddp, unequal ranks": ("ddp", 2, [4, 9]),
        "fsdp, one micro-batch": ("fsdp", 1),
        "fsdp, three micro-batches": ("fsdp", 3),
        "fsdp, reduced": ("fsdp", 3, None, "accumulated"),
        "ddp, examples": ("ddp", 2, None, "per_example"),
        "fsdp, examples": ("fsdp", 2, None, "per_example"),
        "fsdp, preconditioned": ("fsdp", 3, None, "accumulated", "preconditioned"),
        "fsdp, l1": ("fsdp", 3, None, "accumulated", "l1"),
    },
    4: {
        "ddp, two micro-batches": ("ddp", 2),
        "fsdp, two micro-batches": ("fsdp", 2),
        "hsdp, two micro-batches": ("hsdp", 2),
        "hsdp, reduced": ("hsdp", 2, None, "accumulated"),
    },
}


def every_case(rank, world):
    return {name: distributed(rank, world, *case) for name, case in CASES[world].items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Each rank's results of every case, by world size; the processes start once a world."""
    found = {}

    def get(world):
        if world not in found:
            found[world] = on_ranks(world, every_case, tmp_path_factory.mktemp(f"world{world}"))
        return found[world]

    return get


EUCLIDEAN = [
    (world, name) for world in CASES for name, case in CASES[world].items() if len(case) < 5
]


@pytest.mark.parametrize(("world", "name"), EUCLIDEAN)
def test_equals_one_process(world, name, results):
    _, micros, sizes, source = (*CASES[world][name], None, None)[:4]
    # Reduced micro-batches are parts over all ranks; else every rank's micro-batch is one.
    # DDP averages the ranks' means, so with unequal ranks each part weighs the same.
    expected = single(world, micros, sizes=sizes, source=source or "microbatch")
    check([rank[name] for rank in results(world)], expected)


@pytest.mark.parametrize("metric", ["preconditioned", "l1"])
def test_optimizer_metrics_on_sharded_state(metric, results):
    expected = single(2, 3, metric=metric, source="accumulated")
    for rank in results(2):
        whole, _, collectives = rank[f"fsdp, {metric}"]
        assert collectives == 1
        # One step less: before its first step Adam has no state to measure with.
        assert whole["measurements"] == STEPS - 1
        for key in ("grad_sq_norm", "noise_trace"):
            assert whole[key] == pytest.approx(expected[0][key], rel=1e-5)


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
            metric="l1",
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
        assert "Found DDP. Remedy: source='microbatch'" in ddp
        assert "Found source='microbatch'. Remedy: source='accumulated'" in fsdp


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
