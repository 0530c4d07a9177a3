"""Triton kernels for accelerators: compilation, launches and arguments.

One program works on one chunk. Its sums go to a place of its own, and another kernel adds up those
of each tensor, always in the same order.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.kernels import KernelError
from steadygrad.kernels.table import MOST_SUMS, KernelBatch, PointerTable, Types, is_recording
from steadygrad.kernels.triton.passes import MOST_OPTIONS, pass_kernel

__all__ = ["Pass", "Table", "prepare"]

# Elements of a chunk, the work of one program: with fewer a tensor's programs have more partial
# sums to add up, with more some processors have nothing left to do at the end.
CHUNK = 32768
# Elements that a program works on at a time.
BLOCK = 1024
# Partial sums that are added up side by side.
WIDTH = tl.constexpr(256)
# Steps that CUDA graphs can record between two that are taken outside of them.
SPARES = 4


class Table(PointerTable):
    """A table of pointers whose addresses are copied to the device where they have changed.

    A CUDA graph copies a table of its own at each replay, from pinned memory that later steps do
    not write to. CUDA does not say when a graph is gone: such memory lives as long as this table,
    which an optimizer then keeps. Graphs with equal addresses share it.

    Args:
        sizes: Elements of each tensor.
        types: Types of the batch.
        states: Number of large states.
        device: Device of the tensors.

    Attributes:
        device_addresses: The addresses on the device, as they were last sent.
        device_chunks: The chunks on the device.
        device_sums: Sums of the last pass over each chunk, with shape ``(MOST_SUMS, chunks)``.
        aligned: Whether all memory starts at multiples of 16 bytes.
        one: Factor on gradients without a loss scale.
    """

    def __init__(
        self, sizes: Sequence[int], types: Types, states: int, device: torch.device
    ) -> None:
        super().__init__(sizes, types, states, device, CHUNK)
        self.device_chunks = torch.from_numpy(self.chunks).to(device)
        ends = np.append(self.firsts, len(self.chunks))
        self._bounds = torch.from_numpy(ends).to(device)
        shape = MOST_SUMS, len(self.chunks)
        self.device_sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.one = torch.ones((), dtype=torch.float64, device=device)
        self.aligned = True
        self._sent = self.addresses.copy()
        self._own = torch.from_numpy(self._sent).to(device, copy=True)
        self.device_addresses = self._own
        self._spares: list[tuple[Tensor, Tensor]] = []
        self._recorded: list[tuple[Tensor, Tensor]] = []
        self._add_spares()

    def fill(
        self,
        params: Sequence[Tensor],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> None:
        """Writes where everything lies now, and sends it; the host does not wait for that."""
        super().fill(params, weights, grads)
        self.aligned = not (self.addresses % 16).any()
        if is_recording(self.device):
            self._record()
            return
        self._add_spares()
        self.device_addresses = self._own
        if not np.array_equal(self._sent, self.addresses):
            self._sent = self.addresses.copy()
            sent = torch.from_numpy(self._sent)
            # Pinned memory goes back to its pool after the copy, not before.
            sent = sent.pin_memory() if self.device.type == "cuda" else sent
            self._own.copy_(sent, non_blocking=True)

    def _record(self) -> None:
        equal = (p for p in self._recorded if np.array_equal(p[0].numpy(), self.addresses))
        host, table = next(equal, None) or self._new_record()
        table.copy_(host, non_blocking=True)
        self.device_addresses = table

    def _new_record(self) -> tuple[Tensor, Tensor]:
        if not self._spares:
            raise RuntimeError(
                f"Expected at most {SPARES} recorded steps between two outside of CUDA graphs. "
                "Found one more. Remedy: a step outside before it."
            )
        self._recorded.append(self._spares.pop())
        self._recorded[-1][0].copy_(torch.from_numpy(self.addresses))
        return self._recorded[-1]

    def _add_spares(self) -> None:
        # A recording needs memory that was made before it.
        pinned = self.device.type == "cuda"
        while len(self._spares) < SPARES:
            host = torch.zeros(self._own.shape, dtype=torch.int64, pin_memory=pinned)
            self._spares.append((host, torch.zeros_like(self._own)))

    def sums(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Sums of the last pass over each tensor, with shape ``(rows, tensors)``."""
        tensors = len(self.addresses)
        found = torch.empty(rows, tensors, dtype=dtype, device=self.device)
        given = self.device_sums, self._bounds, found, len(self.chunks)
        _start(sum_kernel, (tensors, rows), self.device, *given)
        return found


class Pass(NamedTuple):
    """A pass over all elements. A tensor takes part if its first factor is not zero.

    Attributes:
        body: The work on a block.
        columns: Number of factors.
        rows: Number of sums.
        of_state: Whether blocks are added up in the state's type, not in the weight's.
        of_gradients: Whether a tensor with a gradient takes part in any case.
    """

    body: Any
    columns: int = 0
    rows: int = 0
    of_state: bool = False
    of_gradients: bool = False

    def __call__(
        self, batch: KernelBatch, by: Sequence[Tensor] = (), options: Sequence[float] = ()
    ) -> Any:
        """Starts it, as the formulas' function of its name.

        Args:
            batch: The parameters.
            by: Factors of each, each with shape ``(tensors)``.
            options: Numbers that hold for all of them.

        Returns:
            This process's sums, with shape ``(rows, tensors)``; None without rows.
        """
        table: Table = batch.table
        # A pass without factors is handed what it does not read.
        factors = torch.stack(tuple(by)).to(torch.float64) if by else table.device_sums
        scale = table.one if batch.inverse_scale is None else batch.inverse_scale
        _launch(self, table, factors, scale, options)
        return table.sums(self.rows, batch.sum_dtype) if self.rows else None


@triton.jit(do_not_specialize=["width"])
def sum_kernel(sums: tl.tensor, bounds: tl.tensor, found: tl.tensor, width: tl.tensor) -> None:
    """Sums of tensors from the sums of their chunks: a program for each tensor and row."""
    tensor, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tl.load(bounds + tensor)
    count = (tl.load(bounds + tensor + 1) - first).to(tl.int32)
    place = sums + row * width + first
    total = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, count, WIDTH):
        offsets = start + tl.arange(0, WIDTH)
        total += tl.load(place + offsets, mask=offsets < count, other=0.0)
    tl.store(found + row * tl.num_programs(0) + tensor, tl.sum(total))


def prepare(passes: Sequence[Pass], types: Types, states: int, device: torch.device) -> None:
    """Compiles passes for some types and number of states, if they are not yet compiled.

    Raises:
        KernelError: If one cannot be compiled. Errors of the device are passed on.
    """
    for one in passes:
        _prepare(one, types, states, device)


# Errors of the device, which no compiler raises; older versions of torch lack AcceleratorError.
_OF_DEVICE = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


@cache
def _prepare(kernel: Pass, types: Types, states: int, device: torch.device) -> None:
    """Compiles a pass and loads it, by a run over an empty tensor."""
    table = Table([0], types, states, device)
    factors = torch.zeros(max(1, kernel.columns), 1, dtype=torch.float64, device=device)
    try:
        for table.aligned in (True, False):
            _launch(kernel, table, factors, table.one, ())
        table.sums(1, torch.promote_types(types[1], torch.float32))
    except _OF_DEVICE:
        raise
    except Exception as error:
        # A compiler may raise anything on an unknown machine.
        message = " ".join(str(error).split())
        if message.startswith(("CUDA error", "Triton Error")):
            raise
        raise KernelError(message[:200]) from error


def _launch(
    kernel: Pass, table: Table, factors: Tensor, inverse_scale: Tensor, options: Sequence[float]
) -> None:
    numbers = np.zeros(MOST_OPTIONS)
    numbers[: len(options)] = options
    _start(
        pass_kernel,
        (len(table.chunks),),
        table.device,
        table.device_addresses,
        table.device_chunks,
        table.device_sums,
        factors,
        inverse_scale,
        *table.addresses.shape,
        # Bits, which Triton hands over whole, and which are not what a kernel is compiled for.
        *numbers.view(np.int64).tolist(),
        *map(_type, table.types),
        block=BLOCK,
        aligned=table.aligned,
        **kernel._asdict(),
    )


def _start(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *given: Any, **named: Any
) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*given, **named)


@cache
def _type(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))
