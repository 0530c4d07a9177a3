"""Trains on 4 processes, saves, and goes on with the same optimizer state on 3."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from steadygrad.optim import LANS


def save(folder: str, model: nn.Module, optimizer: Optimizer) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: Optimizer) -> None:
    weights, states = get_state_dict(model, optimizer)  # says what to read, and which part of it
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def report(what: str, world: int, model: nn.Module, optimizer: Optimizer) -> None:
    """The momentum of the first layer: its norm, and how many of its 10 rows lie here."""
    momentum = optimizer.state[model[0].weight]["exp_avg"]
    norm, rows = momentum.full_tensor().norm(), momentum.to_local().shape[0]
    if dist.get_rank() == 0:
        print(f"{what} on {world} processes: |momentum| {norm:.8f}, {rows} of 10 rows on the first")


def train(rank: int, world: int, folder: str, begin: int, end: int) -> None:
    store = dist.FileStore(f"{folder}/store-{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 1)))
    optimizer = LANS(model.parameters(), lr=1e-2)
    if begin:
        load(f"{folder}/step-{begin}", model, optimizer)
        report("loaded", world, model, optimizer)
    for step in range(begin, end):
        # One batch of 12 samples, shared out among the processes that there are.
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))[rank::world]
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Into a new folder: overwriting a checkpoint is not safe if the job is killed meanwhile.
    save(f"{folder}/step-{end}", model, optimizer)
    report("saved", world, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.get_context("forkserver").set_forkserver_preload(["steadygrad.optim", "__main__"])
    with tempfile.TemporaryDirectory() as folder:
        for world, begin, end in [(4, 0, 10), (3, 10, 20)]:
            arguments = (world, folder, begin, end)
            mp.start_processes(train, arguments, nprocs=world, start_method="forkserver")
