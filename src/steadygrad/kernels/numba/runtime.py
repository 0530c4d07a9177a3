"""Compiled loops for CPUs: how they are made and started. It needs numba, and numpy with it.

They are compiled when first needed, in about a quarter of a second each, and kept on disk: beside
this file, else in the user's cache folder, else not at all. ``NUMBA_CACHE_DIR`` says where instead.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from steadygrad.kernels import KernelError, give_up
from steadygrad.kernels.numba import threads
from steadygrad.kernels.numba.numbers import KernelArgs, compiled
from steadygrad.kernels.table import BLOCK, MOST_SUMS, PointerTable, Types

__all__ = ["KernelBatch", "Table", "launch", "prepare"]

# A kernel for some types: a function of one pointer, to the numbers of `KernelArgs`.
Maker = Callable[[Any, Any, Any, Any], Callable[[Any], None]]


class KernelBatch(Protocol):
    """Parameters of a batch, as kernels see them.

    Attributes:
        table: Addresses of their tensors.
        sum_dtype: Type of sums over a parameter.
    """

    table: PointerTable
    sum_dtype: torch.dtype


_NUMBERS = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    # Their bits, see `numbers`.
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}
_ZEROS = np.zeros(BLOCK)
# Numba's compiler is for one thread at a time; so are the entries here.
_LOCK = threading.Lock()


def _after_fork() -> None:
    if _LOCK.locked():
        # The thread that compiled was not forked along, and Numba's own lock stays locked.
        give_up("cpu", "this process was forked while another thread compiled")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


Table = PointerTable


def prepare(makers: Sequence[Maker], types: Types, device: torch.device) -> None:
    """Compiles kernels for some types, if they are not yet compiled.

    Raises:
        KernelError: If one cannot be compiled.
    """
    for make in makers:
        _address_of(make, types)


def _address_of(make: Maker, types: Types) -> int:
    with _LOCK:
        try:
            return _compiled_at(make, types)
        except Exception as error:
            # Whatever a compiler may raise on a machine nobody has seen.
            raise KernelError(" ".join(str(error).split())[:200]) from error


@cache
def _compiled_at(make: Maker, types: Types) -> int:
    function = make(*(_NUMBERS[dtype] for dtype in types))
    try:
        kernel = compiled(function, cache=True)
    except Exception:
        # No folder to write to, a full disk, or what was kept there is damaged, which may raise
        # anything: compiled for this process alone. What cannot be compiled raises again.
        kernel = compiled(function, cache=False)
    _KEPT.append(kernel)
    return int(kernel.address)


# An address is good as long as the kernel it was taken from lives.
_KEPT: list[object] = []


def launch(
    make: Maker,
    table: PointerTable,
    columns: Sequence[Tensor] = (),
    options: Sequence[float] = (),
) -> None:
    """Runs a kernel over a table, on as many threads as torch uses.

    Args:
        make: Maker of the kernel.
        table: The tensors.
        columns: Factors of each tensor, each with shape ``(tensors)``.
        options: Numbers that hold for all tensors.
    """
    factors = np.array([column.to(torch.float64).numpy() for column in columns])
    numbers = np.array(options, np.float64)
    # A line of cache to itself: every thread writes to it.
    counter = np.zeros(16, np.int64)
    args = KernelArgs(
        counter=counter.ctypes.data + 64,
        chunks=len(table.chunks),
        chunk_table=table.chunks.ctypes.data,
        tensors=len(table.addresses),
        addresses=table.addresses.ctypes.data,
        fields=table.addresses.shape[1],
        sums=table.partial_sums.ctypes.data,
        sum_columns=MOST_SUMS,
        factors=factors.ctypes.data,
        options=numbers.ctypes.data,
        zeros=_ZEROS.ctypes.data,
    )
    address = _address_of(make, table.types)
    threads.run(address, np.array(args, np.int64), table.elements)
