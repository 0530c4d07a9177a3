"""Checkpoints on 4 processes, read again on 4, 2 and 1; the assertions are in test_optim.py."""

import copy

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

from tests.distributed.optim_models import (
    MAKERS,
    feed,
    locals_of,
    net,
    same_bits,
    shard_fsdp,
    split_types,
    two_groups,
    whole,
)

STOP, END = 7, 12
FORMS = {"nested": False, "flat": True}


def _start(maker, world):
    """Two groups, float32 and bfloat16 weights, masters for the latter."""
    model = split_types(net())
    if world > 1:
        shard_fsdp(model)
    optimizer = maker(two_groups(model))
    return model, optimizer


def _everything(model, optimizer):
    """All weights and state, whole, by name."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name} {key}": whole(value) for key, value in optimizer.state[p].items()}
    return {key: value.clone() for key, value in found.items()}


def _wrong(found, expected, tolerance=None):
    """Names of tensors that differ in their type or their values, to the bit or a tolerance."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [
        key
        for key, value in found.items()
        if value.dtype != expected[key].dtype
        or not (
            torch.equal(value, expected[key])
            if tolerance is None
            else torch.allclose(value, expected[key], rtol=tolerance, atol=tolerance)
        )
    ]


def _load(model, optimizer, state, options):
    """Through the state-dict API, which may not take a step for it, nor move the weights."""
    before = [whole(p).clone() for p in model.parameters()]

    def step(*_):
        raise AssertionError("A step was taken while loading.")

    optimizer.step = step
    set_optimizer_state_dict(model, optimizer, state, options=options)
    del optimizer.step
    after = [whole(p) for p in model.parameters()]
    assert same_bits(before, after), "Loading the optimizer moved the weights."


def _tied(optimizer):
    """How many different tensors each group's shared state is."""
    names = {"skipped", "model_norms", "model_norm_threshold", "num_clipped", "clipping_step"}
    return [
        len({id(optimizer.state[p][name]) for p in group["params"]})
        for group in optimizer.param_groups
        for name in sorted(names & set(optimizer.state[group["params"][0]]))
    ]


def save(world, folder):
    """Saves in every form, goes on, and resumes on the same processes."""
    found = {}
    for name, maker in MAKERS.items():
        model, optimizer = _start(maker, world)
        feed(model, optimizer, range(STOP))
        saved = _everything(model, optimizer)
        states = {}
        for form, flat in FORMS.items():
            parts = StateDictOptions(flatten_optimizer_state_dict=flat)
            states[form] = get_optimizer_state_dict(model, optimizer, options=parts)
            together = {"model": get_model_state_dict(model), "optimizer": states[form]}
            dcp.save(together, checkpoint_id=f"{folder}/{name}-{form}")
            full = StateDictOptions(
                full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat
            )
            together = {
                "model": get_model_state_dict(model, options=full),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=full),
            }
            if dist.get_rank() == 0:
                torch.save(together, f"{folder}/{name}-{form}.pt")
        states = copy.deepcopy(states)
        weights = copy.deepcopy(get_model_state_dict(model))
        feed(model, optimizer, range(STOP, END))
        after = _everything(model, optimizer)
        if dist.get_rank() == 0:
            torch.save([saved, after], f"{folder}/{name}.pt")
        for form, flat in FORMS.items():
            second, resumed = _start(maker, world)
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            _load(second, resumed, copy.deepcopy(states[form]), options)
            set_model_state_dict(second, copy.deepcopy(weights))
            feed(second, resumed, range(STOP, END))
            same = same_bits(locals_of(model, optimizer), locals_of(second, resumed))
            found[f"{name} {form}"] = [same, _tied(resumed)]
    return found


def _from_folder(path, model, optimizer, flat):
    """torch.distributed.checkpoint's own format, cut anew for these processes."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    together = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(together, checkpoint_id=path, no_dist=not dist.is_initialized())
    _load(model, optimizer, together["optimizer"], options)
    set_model_state_dict(model, together["model"])


def _from_file(path, model, optimizer, flat, broadcast):
    """One file with everything whole, read by every process or by the first one alone."""
    together = torch.load(f"{path}.pt", weights_only=True)
    if broadcast and dist.get_rank() > 0:
        together = {"model": {}, "optimizer": {}}
    whole_ones = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    # torch fails to load a state that is both flat and whole, with its own optimizers too; given as
    # it is, this optimizer takes its own parts of it.
    options = StateDictOptions(flatten_optimizer_state_dict=True) if flat else whole_ones
    _load(model, optimizer, together["optimizer"], options)
    set_model_state_dict(model, together["model"], options=whole_ones)


def load(world, folder):
    """Reads every form on fewer processes: to the bit, and then on as if never interrupted."""
    ways = {"folder": _from_folder, "file": lambda *args: _from_file(*args, broadcast=False)}
    broadcast = {"broadcast": lambda *args: _from_file(*args, broadcast=True)}
    found = {}
    for name, maker in MAKERS.items():
        saved, after = torch.load(f"{folder}/{name}.pt", weights_only=True)
        for form, flat in FORMS.items():
            more = broadcast if world > 1 and not flat else {}
            for way, read in {**ways, **more}.items():
                model, optimizer = _start(maker, world)
                read(f"{folder}/{name}-{form}", model, optimizer, flat)
                wrong = _wrong(_everything(model, optimizer), saved)
                tied = _tied(optimizer)
                feed(model, optimizer, range(STOP, END))
                end = _wrong(_everything(model, optimizer), after, 1e-6)
                # bfloat16 weights may round to the neighbour: their masters are compared.
                end = [key for key in end if after[key].dtype != torch.bfloat16]
                found[f"{name} {form} {way}"] = [wrong, end, tied]
    return found
