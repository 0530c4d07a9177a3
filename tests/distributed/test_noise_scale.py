"""DDP, FSDP2 and HSDP estimates equal one process's on the same samples."""

import math

import pytest
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from steadygrad.noise import NoiseScale
from tests.distributed.ranks import on_ranks
from tests.distributed.training import (
    MICRO,
    STEPS,
    FsdpSync,
    Nothing,
    hsdp_mesh,
    loss_of,
    make_model,
    make_optimizer,
    sample,
    shard,
    single,
    train,
)

pytestmark = pytest.mark.distributed


def distributed(rank, world, kind, micros, sizes=None, source="microbatch", metric="euclidean"):
    """One rank's run; returns its estimate and how many collectives a measurement makes."""
    model = make_model()
    accumulate = Nothing
    if kind == "ddp":
        model = DistributedDataParallel(model)
        accumulate = lambda last: Nothing() if last else model.no_sync()
    elif kind == "replicate":
        replicate(model)
        accumulate = lambda last: FsdpSync(model, last)
    else:
        mesh = hsdp_mesh(world) if kind == "hsdp" else None
        shard(model, mesh)
        if source == "microbatch":
            accumulate = lambda last: FsdpSync(model, last)
    optimizer = make_optimizer(model, metric)
    options = {"metric": metric, "optimizer": optimizer} if metric != "euclidean" else {}
    noise = NoiseScale(model, source=source, **options)
    mine = [(micro, rank) for micro in range(micros)]
    got = train(model, optimizer, noise, mine, accumulate, sizes)
    for _ in range(2):
        with noise.microbatch(MICRO):
            loss_of(model, *sample(0, 0, rank)).backward()
    with CommDebugMode() as counter:
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
        "composable ddp, three micro-batches": ("replicate", 3),
        "fsdp, one micro-batch": ("fsdp", 1),
        "fsdp, three micro-batches": ("fsdp", 3),
        "fsdp, reduced": ("fsdp", 3, None, "accumulated"),
        "ddp, examples": ("ddp", 2, None, "per_example"),
        "fsdp, examples": ("fsdp", 2, None, "per_example"),
        "ddp, preconditioned": ("ddp", 3, None, "microbatch", "preconditioned"),
        "fsdp, preconditioned": ("fsdp", 3, None, "accumulated", "preconditioned"),
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


def check_metric(results, name, expected):
    """As :func:`check`, for metrics that need the optimizer's state."""
    for rank in results(2):
        whole, _, collectives = rank[name]
        assert collectives == 1
        # One step less: before its first step Adam has no state to measure with.
        assert whole["measurements"] == STEPS - 1
        for key in ("grad_sq_norm", "noise_trace"):
            # 1e-5: Adam's step count is in float32.
            assert whole[key] == pytest.approx(expected[key], rel=1e-5), key


def test_the_preconditioned_metric_on_sharded_state(results):
    expected = single(2, 3, metric="preconditioned", source="accumulated")
    check_metric(results, "fsdp, preconditioned", expected[0])


def test_the_preconditioned_metric_with_ddp(results):
    """Every rank's micro-batch is a part, weighed by the state that all ranks share."""
    check_metric(results, "ddp, preconditioned", single(2, 3, metric="preconditioned")[0])
