"""DDP, FSDP2 and HSDP estimates equal one process's, by contexts and by passes found alike."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from steadygrad.noise import NoiseScale
from steadygrad.scale import LayerwiseGradScaler
from tests.distributed.ranks import in_turn, on_ranks
from tests.distributed.training import MICRO, loss_of, make_model, sample, shard

pytestmark = pytest.mark.distributed

STEPS = 4
POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


class Checkpointed(nn.Sequential):
    """Layers that are called again in the backward pass."""

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def wrapped(kind, options, world):
    """A model, and the context of a micro-batch: gradients are reduced after the last one."""
    model = make_model()
    if "checkpointed" in options:
        model = Checkpointed(*model)
    if kind == "ddp":
        model = DistributedDataParallel(model)
        return model, lambda last: nullcontext() if last else model.no_sync()
    if kind == "replicate":
        replicate(model)
    else:
        given = {}
        if kind == "hsdp":
            names = ("copy", "part")
            given["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        for name in options & set(POLICIES):
            given["mp_policy"] = POLICIES[name]
            model.float()
        if "offloaded" in options:
            given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        shard(model, model[0], model[3], **given)
    if "every pass reduced" in options:
        return model, lambda last: nullcontext()

    def accumulate(last):
        model.set_requires_gradient_sync(last)
        if "kept" in options:
            model.set_reshard_after_backward(last)
        return nullcontext()

    return model, accumulate


def train(
    model, accumulate, mine, *, way="contexts", sizes=None, source="microbatch",
    metric="euclidean", accumulation="mean", layerwise=False, steps=STEPS, alter=None, told=None,
):  # fmt: skip
    """Steps of micro-batches, each of the parts (micro, rank) in ``mine``, and what is found."""
    if metric == "euclidean":
        optimizer, more = torch.optim.SGD(model.parameters(), lr=0.05), {}
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        more = {"metric": metric, "optimizer": optimizer}
    scaler = None
    if layerwise:
        options = {"init_scale": 2.0**5, "growth_interval": 2}
        scaler = more["scaler"] = LayerwiseGradScaler(model, {"**.3": 2.0**9}, **options)
    if way == "found":
        more["samples"] = MICRO
    noise = NoiseScale(model, source=source, accumulation=accumulation, **more)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        for i, parts in enumerate(mine):
            data = [sample(step, *part, (sizes or {}).get(part[1], MICRO)) for part in parts]
            x, y = (torch.cat(own).to(dtype) for own in zip(*data, strict=True))
            with accumulate(i == len(mine) - 1):
                loss = loss_of(model, x, y) / len(mine)
                if scaler is not None:
                    loss = scaler.scale(loss)
                with noise.microbatch(len(x)) if way == "contexts" else nullcontext():
                    loss.backward()
        if alter is not None:
            alter(model)
        with CommDebugMode() as counter:
            noise.step(grad_scale=told)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif alter is None:
            optimizer.step()
        optimizer.zero_grad()
    got = noise.estimate()
    return {
        "estimate": got.as_dict(),
        "groups": {name: group.as_dict() for name, group in got.by_group.items()},
        "ring": noise.state_dict()["ring"][:STEPS].tolist(),
        "odd": [noise.skipped.item(), noise.altered.item()],
        "collectives": counter.get_total_counts(),
    }


def run(rank, world, kind, micros, options=frozenset(), **more):
    model, accumulate = wrapped(kind, options, world)
    mine = [[(micro, rank)] for micro in range(micros)]
    return train(model, accumulate, mine, layerwise="layerwise" in options, **more)


def alone(world, micros, source="microbatch", **more):
    """One process sees what all of them see: each rank's micro-batch, or whole micro-batches."""
    mine = [[(micro, rank)] for micro in range(micros) for rank in range(world)]
    if source == "accumulated":
        mine = [[(micro, rank) for rank in range(world)] for micro in range(micros)]
    return train(make_model(), lambda last: nullcontext(), mine, source=source, **more)


# One start of the processes runs every case of a world: starting them is what takes the time.
CASES = {
    2: {
        "ddp, one micro-batch": ("ddp", 1),
        "ddp, checkpointed": ("ddp", 3, {"checkpointed"}),
        "ddp, layerwise": ("ddp", 3, {"layerwise"}),
        "composable ddp": ("replicate", 3),
        "fsdp": ("fsdp", 3),
        "fsdp, every pass reduced": ("fsdp", 3, {"every pass reduced"}),
        "fsdp, checkpointed": ("fsdp", 3, {"checkpointed"}),
        "fsdp, layerwise": ("fsdp", 3, {"layerwise"}),
        "fsdp, kept gathered": ("fsdp", 3, {"layerwise", "kept"}),
        "fsdp, offloaded": ("fsdp", 3, {"offloaded"}),
        "fsdp, bf16": ("fsdp", 3, {"bf16"}),
        "fsdp, bf16 sums": ("fsdp", 3, {"bf16 sums"}),
    },
    4: {"fsdp": ("fsdp", 2), "hsdp": ("hsdp", 2)},
}
# What needs contexts, or another source.
OTHERS = {
    2: {
        # DDP averages the ranks' means, so with unequal ranks each part weighs the same.
        "ddp, unequal ranks": ("ddp", 2, {"sizes": {0: 4, 1: 9}}),
        "ddp, examples": ("ddp", 2, {"source": "per_example"}),
        "ddp, preconditioned": ("ddp", 3, {"metric": "preconditioned"}),
        "fsdp, reduced": ("fsdp", 3, {"source": "accumulated"}),
        "fsdp, by samples": ("fsdp", 3, {"source": "accumulated", "accumulation": "samples"}),
        "fsdp, examples": ("fsdp", 2, {"source": "per_example"}),
        "fsdp, preconditioned": (
            "fsdp", 3, {"source": "accumulated", "metric": "preconditioned"}
        ),
    },
    4: {"hsdp, reduced": ("hsdp", 2, {"source": "accumulated"})},
}  # fmt: skip
EVERY_PASS = frozenset({"every pass reduced"})


def cases(rank, world):
    found = {
        name: [run(rank, world, *case, way=way) for way in ("contexts", "found")]
        for name, case in CASES[world].items()
    }
    for name, (kind, micros, options) in OTHERS[world].items():
        # Of micro-batches that are parts over all ranks each one is reduced, as are examples.
        reduced = EVERY_PASS if "source" in options and kind != "ddp" else frozenset()
        found[name] = [run(rank, world, kind, micros, reduced, **options)]
    return found


def multiply(model, factor):
    for p in model.parameters():
        p.grad *= factor


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def altered(rank, world):
    """By kind of model and of change how many steps were noticed, and how many warnings."""
    found = []
    for name in ("ddp, one micro-batch", "fsdp", "fsdp, bf16"):
        for alter in (clip, partial(multiply, factor=0.5)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got = run(rank, world, *CASES[2][name], way="found", alter=alter)
            said = [w for w in caught if "noise.altered" in str(w.message)]
            found.append([got["odd"][1], len(said)])
    return found


def summed(rank, world):
    """Gradients of a mean over processes, and of a sum that is told."""
    found = []
    for told in (1.0, 2.0):
        alter = partial(multiply, factor=told)
        found.append(run(rank, world, "fsdp", 3, way="found", alter=alter, told=told)["ring"])
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By world size and function what each rank found."""
    return {
        2: in_turn(2, [cases, altered, summed], tmp_path_factory.mktemp("two")),
        4: in_turn(4, [cases], tmp_path_factory.mktemp("four")),
    }


def check(got, expected, name):
    if "bf16" in name:
        # bfloat16 has eight bits, and noise is a difference of squares.
        assert got["noise_trace"] == pytest.approx(expected["noise_trace"], rel=0.05)
        return
    for key in ("grad_sq_norm", "noise_trace", "value", "low", "high"):
        # Other orders of summation, and Adam's step count in float32; values far from zero.
        assert got[key] == pytest.approx(expected[key], rel=1e-5, nan_ok=True), key
    assert got["measurements"] == expected["measurements"]


@pytest.mark.parametrize(
    ("world", "name"),
    [(world, name) for world in CASES for name in [*CASES[world], *OTHERS[world]]],
)
def test_equals_one_process_to_whom_passes_belong_or_are_found(world, name, results):
    _, micros, *options = (CASES[world] | OTHERS[world])[name]
    expected = alone(world, micros, **(options[0] if name in OTHERS[world] else {}))
    for rank in results[world]["cases"]:
        first, *found = rank[name]
        check(first["estimate"], expected["estimate"], name)
        assert first["groups"].keys() == expected["groups"].keys()
        for group, got in first["groups"].items():
            check(got, expected["groups"][group], name)
        assert first["collectives"] == 1
        # Before its first step Adam has no state to measure with.
        skipped = int("preconditioned" in name)
        assert first["odd"] == [skipped, 0]
        assert first["estimate"]["measurements"] == STEPS - skipped
        # To the bit, and on all ranks.
        ring = results[world]["cases"][0][name][0]["ring"]
        assert [other["ring"] for other in rank[name]] == [ring] * len(rank[name])
        assert all(other["odd"] == [0, 0] for other in found)


def test_alterations_are_noticed_on_every_rank(results):
    for rank in results[2]["altered"]:
        assert rank == [[STEPS, 1]] * 6


def test_a_reduction_that_adds_up_can_be_told(results):
    for averaged, added in results[2]["summed"]:
        assert added == averaged


LONG = ("ddp, one micro-batch", "fsdp, checkpointed", "fsdp, bf16", "fsdp, bf16 sums")


def many_steps(rank, world):
    return [run(rank, world, *CASES[2][name], way="found", steps=100)["odd"] for name in LONG]


@pytest.mark.slow
def test_no_false_alarm_in_many_steps(tmp_path):
    assert on_ranks(2, many_steps, tmp_path) == [[[0, 0]] * 4] * 2
