"""Runs a function on several gloo processes on this machine, and hands back what rank 0 found."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from steadygrad.optim import codes

# One process reads torch in, and every rank is a copy of it: that takes seconds otherwise, each.
mp.get_context("forkserver").set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint.state_dict",
    ]
)


def on_ranks(world: int, function: Callable[..., Any], tmp_path: Path, *args: Any) -> list[Any]:
    """Calls ``function(rank, world, *args)`` on every rank.

    Args:
        world: Number of processes.
        function: A top-level function that returns something JSON can hold.
        tmp_path: An empty folder for the rendezvous and the results.

    Returns:
        What each rank returned.
    """
    mp.start_processes(
        _entry, args=(world, function, str(tmp_path), args), nprocs=world, start_method="forkserver"
    )
    return [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(world)]


def in_turn(world: int, functions: list[Callable[..., Any]], folder: Path) -> dict[str, list[Any]]:
    """Calls several functions on the ranks of one start, which is what takes the time.

    Returns:
        By each function's name what each rank returned.
    """
    found = on_ranks(world, _in_turn, folder, functions)
    return {f.__name__: [rank[f.__name__] for rank in found] for f in functions}


def _in_turn(rank: int, world: int, functions: list[Callable[..., Any]]) -> dict[str, Any]:
    return {function.__name__: function(rank, world) for function in functions}


def code_small_parameters() -> None:
    """Parameters of tests have moments in eight bits, where an optimizer is asked for them."""
    codes.LEAST, codes.SHORTEST = 1, 2


def _entry(rank: int, world: int, function: Callable[..., Any], folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    code_small_parameters()
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        result = function(rank, world, *args)
        Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
