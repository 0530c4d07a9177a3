"""Joining and leaving the processes that ``torchrun`` started."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from steadygrad._checks import launched

__all__ = ["check_gloo", "join_processes", "leave_processes"]


def join_processes(device: torch.device) -> tuple[int, int, torch.device]:
    """Joins the processes that ``torchrun`` started; alone without it.

    Args:
        device: Kind of device to train on.

    Returns:
        This process's rank, the number of processes, and this process's own device.
    """
    _, size = launched()
    if size == 1:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # A rank that died without closing its sockets must not hold the others for long.
        dist.init_process_group(backend, timeout=timedelta(minutes=5))
    return dist.get_rank(), size, device


def leave_processes() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_gloo() -> None:
    """Makes a group of this process alone, and adds a number over it.

    Raises:
        Exception: As torch does, where gloo is missing or finds no address of this machine.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(()))
    finally:
        leave_processes()
