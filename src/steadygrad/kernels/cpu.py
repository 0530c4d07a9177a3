"""Compiled loops for CPUs: where each of them starts. It needs numba, and numpy with it.

They are compiled when first needed, in about a quarter of a second each, and kept on disk: beside
this file, else in the user's cache folder, else not at all. ``NUMBA_CACHE_DIR`` says where instead.
"""

import importlib
import os
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from steadygrad.kernels import give_up_silently, threads
from steadygrad.kernels.tables import ChunkTable

__all__ = ["NoKernelError", "Types", "address_of", "launch"]

_ROOMS = {
    "square_sums": "numba_lans",
    "lans_directions": "numba_lans",
    "lans_apply": "numba_lans",
    "lans_norms": "numba_lans_numbers",
    "lans_begin": "numba_lans_numbers",
    "lans_ratios": "numba_lans_numbers",
    "lans_finish": "numba_lans_numbers",
    "scaled_adam_sums": "numba_scaled_adam",
    "scaled_adam_update": "numba_scaled_adam",
    "scaled_adam_add": "numba_sums",
    "scaled_adam_judge": "numba_sums",
    "scaled_adam_learn": "numba_sizes",
    "scaled_adam_enter": "numba_sizes",
}
_NUMBERS = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    # Of their bits, as numba_parts says.
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}
# Types of gradients, weights, state, and of the parameters that weights are rounded to.
Types = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]

# Numba's compiler is for one thread at a time; so are the entries here.
_LOCK = threading.Lock()


def _after_fork() -> None:
    if _LOCK.locked():
        # The thread that compiled was not forked along, and Numba's own lock stays locked.
        give_up_silently("this process was forked while another thread compiled")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class NoKernelError(RuntimeError):
    """A loop cannot be compiled here."""


def address_of(name: str, types: Types) -> int:
    """Where a kernel starts, compiled if it was not yet.

    Args:
        name: Of the kernel.
        types: What it works on.

    Raises:
        NoKernelError: If it cannot be compiled; nothing has been computed then.
    """
    with _LOCK:
        try:
            return _address_of(name, types)
        except Exception as error:
            # Whatever a compiler may raise on a machine nobody has seen.
            raise NoKernelError(" ".join(str(error).split())[:200]) from error


@cache
def _address_of(name: str, types: Types) -> int:
    parts = importlib.import_module("steadygrad.kernels.numba_parts")
    room = importlib.import_module(f"steadygrad.kernels.{_ROOMS[name]}")
    make = getattr(room, name)(*(_NUMBERS[dtype] for dtype in types))
    try:
        kernel = parts.compiled(make, cache=True)
    except Exception:
        # No folder to write to, a full disk, or what was kept there is damaged, which may raise
        # anything: compiled for this process alone. What cannot be compiled raises again.
        kernel = parts.compiled(make, cache=False)
    _KEPT.append(kernel)
    return int(kernel.address)


# An address is good as long as what it was taken from lives.
_KEPT: list[object] = []


def launch(
    name: str,
    types: Types,
    table: ChunkTable,
    factors: torch.Tensor | None = None,
    settings: torch.Tensor | None = None,
    *,
    alone: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Runs a kernel over a table, on as many threads as torch uses.

    Args:
        name: Of the kernel.
        types: What it works on.
        table: The tensors.
        factors: What it takes for each tensor, contiguous float64.
        settings: What it takes besides, contiguous float64.
        alone: Whether it does not share out its work: one thread only.
        meanwhile: What this thread may do before it helps the others.
    """
    given = [x for x in (factors, settings) if x is not None]
    # What the loops are handed they take for an address of this machine's memory.
    assert all(x.device.type == "cpu" and x.is_contiguous() for x in given)
    places = [0 if x is None else x.data_ptr() for x in (factors, settings)]
    elements = 0 if alone else table.elements
    threads.run(address_of(name, types), table.job(*places), elements, meanwhile)
