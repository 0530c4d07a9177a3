"""FSDP2's CPUOffloadPolicy changes no number: steps, noise, norms, and states through a file."""

import math

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.utils import clip_grad_norm_

from steadygrad.noise import NoiseScale
from steadygrad.watch import GradientWatch
from tests.distributed.optim_models import (
    BATCH,
    MAKERS,
    locals_of,
    loss_of,
    net,
    same_bits,
    shard_fsdp,
)
from tests.distributed.ranks import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Types of the shards, and the policy.
TYPES = {
    "float32": (torch.float32, MixedPrecisionPolicy()),
    "bfloat16": (torch.float32, HALF),
    "masters": (torch.bfloat16, HALF),
}


def trained(policy, types, maker, mode, world):
    model = shard_fsdp(net().to(types[0]), offload_policy=policy, mp_policy=types[1])
    optimizer, norms = maker(model.parameters(), **mode), []
    noise = NoiseScale(model, samples=BATCH // world)
    watch = GradientWatch(model)
    watch.close()  # norms need no hooks
    for step in range(6):
        optimizer.zero_grad()
        # One step is skipped.
        (loss_of(model, step, "fsdp") * (torch.inf if step == 3 else 1)).backward()
        noise.step()
        if step != 3:
            norms.append(math.hypot(*watch.norms().values()))
        clip_grad_norm_(model.parameters(), norms[0] / 2)
        optimizer.step()
    return model, optimizer, noise.estimate().as_dict(), norms


def everything(rank, world):
    """Differences that the policy makes: there should be none."""
    found = {}
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name, maker in MAKERS.items():
        for kind, mode in MODES.items():
            for numbers, types in TYPES.items():
                offload = CPUOffloadPolicy(pin_memory=False)
                rows = [
                    trained(policy, types, maker, mode, world)
                    for policy in (OffloadPolicy(), offload)
                ]
                (model, optimizer, noise, norms), (other, offloaded, *numbers_there) = rows
                same = same_bits(locals_of(model, optimizer), locals_of(other, offloaded))
                state = get_optimizer_state_dict(other, offloaded, options=whole)
                again = maker(other.parameters(), **mode)
                if rank:
                    state = {}
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_optimizer_state_dict(other, again, state, options=options)
                kept = same_bits(locals_of(other, again), locals_of(other, offloaded))
                measured = noise["measurements"] == 5 and int(offloaded.skipped) == 1
                found[f"{name} {kind} {numbers}"] = [
                    same, kept, [noise, norms] == numbers_there, measured
                ]  # fmt: skip
    return found


def test_offloading_changes_no_number(tmp_path):
    for found in on_ranks(2, everything, tmp_path):
        assert len(found) == len(MAKERS) * len(MODES) * len(TYPES)
        assert {key: row for key, row in found.items() if row != [True] * 4} == {}
