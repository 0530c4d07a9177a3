"""Optimizer states saved on one number of processes and loaded on another: 2, 1, 4, then 3."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from steadygrad.noise import NoiseScale
from tests.distributed.optim_checkpoints import _everything, _start, _wrong
from tests.distributed.optim_models import MAKERS, feed, train
from tests.distributed.ranks import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORLDS = [2, 1, 4, 3]
STOPS = [0, 5, 10, 15, 20]


def save(path, model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def load(path, model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    together = {"model": weights, "optimizer": states}
    dcp.load(together, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def go_on(rank, world, folder, leg):
    """Loads what the last leg saved, compares all of it, trains on, and saves again."""
    unlike = {}
    for name, maker in MAKERS.items():
        model, optimizer = _start(maker, world)
        if leg:
            load(f"{folder}/{name}-{leg}", model, optimizer)
            saved = torch.load(f"{folder}/{name}-{leg}.pt", weights_only=True)
            unlike[name] = _wrong(_everything(model, optimizer), saved)
        feed(model, optimizer, range(STOPS[leg], STOPS[leg + 1]))
        save(f"{folder}/{name}-{leg + 1}", model, optimizer)
        everything = _everything(model, optimizer)
        if rank == 0:
            torch.save(everything, f"{folder}/{name}-{leg + 1}.pt")
        dist.barrier()
    return unlike


def measured(rank, world, folder):
    """A noise scale's state goes from four processes to any number."""
    model, optimizer = _start(MAKERS["lans"], world)
    model.float()
    noise = NoiseScale(model, samples=8 // world)
    if world == 4:
        for step in range(6):
            train(model, optimizer, [step], "fsdp")
            noise.step()
        if rank == 0:
            torch.save(noise.state_dict(), f"{folder}/noise.pt")
    else:
        noise.load_state_dict(torch.load(f"{folder}/noise.pt", weights_only=True))
    return noise.estimate().as_dict()


def test_every_state_is_loaded_to_the_bit_and_training_goes_on(tmp_path):
    for leg, world in enumerate(WORLDS):
        (place := tmp_path / f"leg-{leg}").mkdir()
        for unlike in on_ranks(world, go_on, place, str(tmp_path), leg):
            assert unlike == ({name: [] for name in MAKERS} if leg else {})
    for name, maker in MAKERS.items():
        model, optimizer = _start(maker, 1)
        feed(model, optimizer, range(STOPS[-1]))
        end = torch.load(tmp_path / f"{name}-{len(WORLDS)}.pt", weights_only=True)
        # Square sums of shards are added up in another order. A bfloat16 weight may round to its
        # neighbour: its master is compared.
        wrong = _wrong(end, _everything(model, optimizer), 1e-6)
        assert [k for k in wrong if end[k].dtype != torch.bfloat16] == []


def test_a_noise_scale_is_the_same_on_any_number_of_processes(tmp_path):
    rows = []
    for world in (4, 3):
        (place := tmp_path / str(world)).mkdir()
        rows += on_ranks(world, measured, place, str(tmp_path))
    assert rows[0]["measurements"] == 6
    assert all(row == rows[0] for row in rows)
