"""Runs a function on several gloo processes on this machine, and hands back what they found."""

import json
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from steadygrad._checks import InputError
from tests.contracts.problems import small_codes

# One process reads torch in, and every rank is a copy of it: that takes seconds otherwise, each.
mp.get_context("forkserver").set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint.state_dict",
    ]
)


def start(
    world: int, function: Callable[..., Any], folder: Path, *args: Any, alone: bool = False
) -> mp.ProcessContext:
    """Starts ``function(rank, world, *args)`` on every rank.

    Args:
        world: Number of processes.
        function: A top-level function that returns something JSON can hold.
        folder: For the rendezvous and the results; empty, or yet to be made.
        args: What else the function is given.
        alone: The function joins the other processes by itself.
    """
    folder.mkdir(exist_ok=True)
    given = (world, function, str(folder), args, alone)
    return mp.start_processes(_entry, given, nprocs=world, join=False, start_method="forkserver")


def join(context: mp.ProcessContext, seconds: float = math.inf) -> None:
    """Waits for all ranks; raises when one of them fails."""
    end = time.monotonic() + seconds
    while not context.join(timeout=5):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError("the ranks do not end")


def results_of(world: int, folder: Path) -> list[Any]:
    """Reads what each rank returned."""
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world)]


def on_ranks(world: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Calls ``function(rank, world, *args)`` on every rank; what each of them returned."""
    join(start(world, function, folder, *args))
    return results_of(world, folder)


def in_turn(world: int, functions: list[Callable[..., Any]], folder: Path) -> dict[str, list[Any]]:
    """Calls several functions on the ranks of one start.

    Returns:
        By each function's name what each rank returned.
    """
    found = on_ranks(world, _in_turn, folder, functions)
    return {f.__name__: [rank[f.__name__] for rank in found] for f in functions}


def _in_turn(rank: int, world: int, functions: list[Callable[..., Any]]) -> dict[str, Any]:
    return {function.__name__: function(rank, world) for function in functions}


def start_studies(world: int, calls: list[Callable[[], Any]], folder: Path) -> mp.ProcessContext:
    """Starts calls, one after the other, on ranks as ``torchrun`` sets them up.

    Each may leave the process group at its end, as studies do.
    """
    return start(world, _studies, folder, str(folder), calls, alone=True)


def studies(world: int, calls: list[Callable[[], Any]], folder: Path) -> list[list[Any]]:
    """What each of several calls returned, or what its error says, on all ranks."""
    join(start_studies(world, calls, folder), seconds=400)
    return [list(found) for found in zip(*results_of(world, folder), strict=True)]


def _studies(rank: int, world: int, folder: str, calls: list[Callable[[], Any]]) -> list[Any]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # a store stands for them
    found = []
    for number, call in enumerate(calls):
        if not dist.is_initialized():
            # A rank waits a minute for another one.
            _meet(rank, world, f"{folder}/store-{number}", timedelta(minutes=1))
        try:
            found.append(call())
        except InputError as error:
            found.append(str(error))
    return found


def _meet(rank: int, world: int, path: str, timeout: timedelta | None = None) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _entry(
    rank: int, world: int, function: Callable[..., Any], folder: str, args: Any, alone: bool
) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    if not alone:
        _meet(rank, world, f"{folder}/store")
    try:
        with small_codes():
            result = function(rank, world, *args)
        Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
        if dist.is_initialized():  # a study leaves the processes by itself
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
