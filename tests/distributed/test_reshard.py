"""Checkpoints of sharded training, read by another number of processes: 4, 3, 4, and 1."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from tests.distributed.optim_models import (
    MAKERS,
    feed,
    locals_of,
    net,
    same_bits,
    whole,
)
from tests.distributed.ranks import on_ranks
from tests.distributed.training import shard

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Each leg loads what the last one saved.
WORLDS = [4, 3, 4, 1]
LEG = 5  # steps
# This one in every form; the others in torch.distributed.checkpoint's own.
THOROUGH = "scaled_adam-8bit"
# Tensors that all parameters of a group share.
SHARED = {"skipped", "model_norms", "model_norm_threshold", "num_clipped", "clipping_step"}


def begin(maker, world):
    """Two groups, float32 and bfloat16 weights, masters for the latter; some offloaded."""
    model = net()
    for module in (model.second, model.third, model.last, model.unused):
        module.bfloat16()
    if world > 1:
        policy = CPUOffloadPolicy(pin_memory=False) if world == 3 else OffloadPolicy()
        shard(model, model.first, offload_policy=policy)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "lr": 5e-3},
    ]
    return model, maker(groups)


def everything(model, optimizer):
    """All weights and state, whole, by name."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name} {key}": whole(value) for key, value in optimizer.state[p].items()}
    return {key: value.clone() for key, value in found.items()}


def unlike(found, expected, tolerance=0.0):
    """Names of tensors that differ in their type or their values."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [
        key
        for key, value in found.items()
        if value.dtype != expected[key].dtype
        or not torch.allclose(value, expected[key], rtol=tolerance, atol=tolerance)
    ]


def tied(optimizer):
    """Whether the parameters of each group have shared state in common."""
    return all(
        len({id(optimizer.state[p][name]) for p in group["params"]}) == 1
        for group in optimizer.param_groups
        for name in SHARED & set(optimizer.state[group["params"][0]])
    )


def states_of(model, optimizer, flat, **options):
    own = StateDictOptions(flatten_optimizer_state_dict=flat, **options)
    return {
        "model": get_model_state_dict(model, options=StateDictOptions(**options)),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=own),
    }


def save(path, model, optimizer, forms):
    """In torch.distributed.checkpoint's own format, and everything whole in one file."""
    is_alone = not dist.is_initialized()
    for flat in forms:
        states = states_of(model, optimizer, flat)
        dcp.save(states, checkpoint_id=f"{path}-{flat}", no_dist=is_alone)
        together = states_of(model, optimizer, flat, full_state_dict=True, cpu_offload=True)
        if is_alone or dist.get_rank() == 0:
            torch.save(together, f"{path}-{flat}.pt")


def load(path, model, optimizer, way, flat):
    """From the folder, from the file, or from the file as the first process alone reads it."""
    options = states = StateDictOptions(flatten_optimizer_state_dict=flat)
    if way == "folder":
        together = states_of(model, optimizer, flat)
        is_alone = not dist.is_initialized()
        dcp.load(together, checkpoint_id=f"{path}-{flat}", no_dist=is_alone)
    else:
        together = torch.load(f"{path}-{flat}.pt", weights_only=True)
        if way == "broadcast" and dist.get_rank() > 0:
            together = {"model": {}, "optimizer": {}}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "broadcast")
        # torch fails to load a state that is both flat and whole, with its own optimizers too;
        # given as it is, this optimizer takes its own parts of it.
        states = states if flat else options
    before = [whole(p).clone() for p in model.parameters()]
    handle = optimizer.register_step_pre_hook(lambda *_: pytest.fail("A step was taken."))
    set_optimizer_state_dict(model, optimizer, together["optimizer"], options=states)
    handle.remove()
    assert same_bits(before, [whole(p) for p in model.parameters()]), "Loading moved the weights."
    set_model_state_dict(model, together["model"], options=options)


def go_on(rank, world, folder, leg):
    """By way of loading what differs from what was saved, and which ways' next steps differ."""
    found, steps = {}, range(leg * LEG, leg * LEG + LEG)
    for name, maker in MAKERS.items():
        ways = [("folder", False)]
        if name == THOROUGH:
            ways += [("folder", True), ("file", False), ("file", True)]
            ways += [("broadcast", False)] if world > 1 else []
        ends = []
        for way in ways if leg else [None]:
            model, optimizer = begin(maker, world)
            if leg:
                load(f"{folder}/{name}-{leg - 1}", model, optimizer, *way)
                saved = torch.load(f"{folder}/{name}-{leg - 1}.pt", weights_only=True)
                wrong = unlike(everything(model, optimizer), saved)
                found[f"{name} {way}"] = wrong if tied(optimizer) else ["not tied"]
            feed(model, optimizer, steps)
            ends.append(copy.deepcopy(locals_of(model, optimizer)))
        found[name] = [place for place, end in enumerate(ends) if not same_bits(ends[0], end)]
        forms = (False, True) if name == THOROUGH else (False,)
        save(f"{folder}/{name}-{leg}", model, optimizer, forms)
        end = everything(model, optimizer)
        if rank == 0:
            torch.save(end, f"{folder}/{name}-{leg}.pt")
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_state_is_loaded_to_the_bit_and_training_goes_on(tmp_path):
    for leg, world in enumerate(WORLDS):
        if world > 1:
            ranks = on_ranks(world, go_on, tmp_path / f"leg-{leg}", str(tmp_path), leg)
        else:
            ranks = [go_on(0, 1, str(tmp_path), leg)]
        for found in ranks:
            assert all(value == [] for value in found.values()), found
    for name, maker in MAKERS.items():
        model, optimizer = begin(maker, 1)
        feed(model, optimizer, range(len(WORLDS) * LEG))
        end = torch.load(tmp_path / f"{name}-{len(WORLDS) - 1}.pt", weights_only=True)
        # Square sums of shards are added up in another order. A bfloat16 weight may round to its
        # neighbour: its master is compared.
        wrong = unlike(end, everything(model, optimizer), 1e-6)
        assert [key for key in wrong if end[key].dtype != torch.bfloat16] == []
