"""Compilation and launches of kernels.

One program works on one chunk. Its sums go to a place of its own, and another kernel adds up those
of each tensor, always in the same order.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.optim import codes
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import is_capturing
from steadygrad.optim.kernels.codes import BLOCK as CODES
from steadygrad.optim.kernels.codes import lanes_of, without_gaps
from steadygrad.optim.kernels.memory import STATES, factors_of, places_of
from steadygrad.optim.passes import Pass, Types, addresses_of, check_memory, named

# Elements of a chunk, the work of one program: with fewer a tensor's programs have more partial
# sums to add up, with more some processors have nothing left to do at the end.
CHUNK = 32768
# Elements that a program works on at a time.
BLOCK = 1024
# Partial sums that are added up side by side.
WIDTH = tl.constexpr(256)
# Sums that a pass may leave for each chunk, and its first options, which a kernel is given.
MOST_SUMS, MOST_OPTIONS = 3, 5
# Steps that CUDA graphs can record between two that are taken outside of them.
SPARES = 4
# Tables that graphs have recorded, with the memory they copy. CUDA does not say when one is gone.
_RECORDED: "list[tuple[Table, Tensor]]" = []


class Table:
    """Addresses and chunks of a batch's tensors, on their device.

    Addresses are copied to it where they have changed. A CUDA graph copies a table of its own at
    each replay, from pinned memory that later steps do not write to.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        types: Types,
        states: int,
        rows: Sequence[int],
        members: Sequence[int],
        device: torch.device,
    ) -> None:
        self.types, self.device, self.lengths = types, device, np.asarray(sizes, np.int64)
        self.kinds = [getattr(tl, str(dtype).removeprefix("torch.")) for dtype in types]
        # Places of the tensors in the batch.
        self.members, units, chunk = np.array(members), self.lengths, CHUNK
        lines = np.array(rows or [0] * len(sizes), np.int64)
        if rows:
            # Chunks of codes are of whole blocks, as if each row had whole ones.
            units = units // lines * (lines + -lines % codes.BLOCK)
            chunk = max(codes.BLOCK, CHUNK // codes.BLOCK * codes.BLOCK)
        counts = np.maximum(1, -(-units // chunk))
        tensors = np.repeat(np.arange(len(sizes)), counts)
        stops = np.cumsum(counts)
        starts = (np.arange(len(tensors)) - (stops - counts)[tensors]) * chunk
        parts = np.minimum(chunk, units[tensors] - starts)
        # Rows of tensor, first element and length, place in the batch, and elements of a row; then
        # of where the chunks of a tensor begin and end, and its place in the batch.
        columns = [tensors, starts, parts, self.members[tensors], lines[tensors]]
        self.chunks = torch.from_numpy(np.stack(columns, axis=1)).to(device)
        ends = np.stack([stops - counts, stops, self.members], axis=1)
        self.ends = torch.from_numpy(ends).to(device)
        self.one = torch.ones((), dtype=torch.float64, device=device)
        self.partial_sums = self.one.new_zeros(MOST_SUMS, len(tensors))
        # Zero for a gradient that is zero.
        self.addresses = np.zeros((len(sizes), STATES.value + states), np.int64)
        self.aligned, self._sent = True, self.addresses.copy()
        self._own = torch.from_numpy(self._sent).to(device, copy=True)
        self.device_addresses = self._own
        self._spares: list[Tensor] = []
        self._add_spares()

    def fill_states(self, moments: Sequence[Sequence[Tensor]]) -> None:
        """Writes where large states lie, given as a list for each of them."""
        for place, states in enumerate(moments[: self.addresses.shape[1] - STATES.value]):
            own = [states[i] for i in self.members]
            self.addresses[:, STATES.value + place] = addresses_of(own)

    def fill(self, addresses: NDArray[np.int64], has_grad: NDArray[np.bool_]) -> None:
        """Writes where all that may have moved lies now, and sends it without a wait.

        Addresses of gradients, zero for None, of parameters and of weights, ``(3, batch)``.
        """
        self.addresses[:, : STATES.value] = addresses[:, self.members].T
        check_memory(self.addresses, self.lengths, has_grad[self.members])
        self.aligned = not (self.addresses % 16).any()
        if is_capturing():
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
        """Has a graph send these addresses."""
        if not self._spares:
            raise RuntimeError(
                f"Expected at most {SPARES} recorded steps between two outside of CUDA graphs. "
                "Found one more. Remedy: a step outside before it."
            )
        host = self._spares.pop().copy_(torch.from_numpy(self.addresses))
        _RECORDED.append((self, host))
        self.device_addresses = torch.empty_like(self._own).copy_(host, non_blocking=True)

    def _add_spares(self) -> None:
        # A recording needs memory that was made before it.
        pinned = self.device.type == "cuda"
        while len(self._spares) < SPARES:
            self._spares.append(torch.zeros_like(self._own, device="cpu", pin_memory=pinned))

    def run(
        self, one: Pass, factors: Tensor, options: Sequence[float], inverse_scale: Tensor
    ) -> None:
        """Starts a pass's kernel; its sums are partial ones of chunks."""
        numbers = (*options, *[0.0] * MOST_OPTIONS)[:MOST_OPTIONS]
        pass_kernel[(len(self.chunks),)](
            self.device_addresses,
            self.chunks,
            self.partial_sums,
            factors,
            inverse_scale,
            factors.shape[1],
            self.addresses.shape[1],
            *numbers,
            *self.kinds,
            block=BLOCK,
            aligned=self.aligned,
            body=named(one.kernel),
            columns=one.columns,
            rows=one.rows,
            has_two=one.constants == (True,),
            # Each operation is rounded, as codes need it.
            enable_fp_fusion=False,
        )

    def add_up(self, found: Tensor) -> None:
        """Writes sums of the last pass over each tensor, into columns of ``(rows, batch)``."""
        given = self.partial_sums, self.ends, found, len(self.chunks), found.shape[1]
        sum_kernel[len(self.lengths), len(found)](*given)


def run(one: Pass, batch: ParamBatch, by: Sequence[Tensor], options: Sequence[Any]) -> Any:
    """Runs a pass's kernel over the tables of a batch.

    A tensor takes part if its first factor is not zero; in sums over gradients all do.

    Returns:
        This process's sums, with shape ``(rows, tensors)``; None without rows.
    """
    tables: Sequence[Any] = batch.tables
    # A pass without factors is handed what it does not read.
    factors = torch.stack([*by]).to(torch.float64) if len(by) else tables[0].partial_sums
    numbers = [float(x) for x in options[:MOST_OPTIONS]]
    scale = tables[0].one if batch.inverse_scale is None else batch.inverse_scale
    with torch.cuda.device_of(factors):
        for table in tables:
            table.run(one, factors, numbers, scale)
        if not one.rows:
            return None
        shape = one.rows, len(batch.params)
        found = torch.empty(shape, dtype=batch.sum_dtype, device=batch.device)
        for table in tables:
            table.add_up(found)
    return found


@triton.jit(do_not_specialize=["tensors"])
def pass_kernel(
    addresses: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    factors: tl.tensor,
    inverse_scale: tl.tensor,
    tensors: tl.tensor,
    fields: tl.constexpr,
    option0: tl.float64,
    option1: tl.float64,
    option2: tl.float64,
    option3: tl.float64,
    option4: tl.float64,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    exact: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
    body: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    has_two: tl.constexpr,
) -> None:
    """Works on a chunk, block by block, and adds up the blocks' sums.

    The work on a block is a function of four tuples: pointers to a tensor's gradient, weight, large
    states and parameter; the tensor's factors; the options, the last of which is one over the loss
    scale in the gradients; and the block, see :mod:`steadygrad.optim.kernels.memory`. Factors and
    options are of float64. Then come constants: whether there are two directions, the type of sums,
    and that to compute states in. It returns a tuple of blocks, whose elements are added up.
    """
    row = chunks + tl.program_id(0).to(tl.int64) * 5
    tensor, first, length = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32)
    member, line = tl.load(row + 3), tl.load(row + 4)
    coded: tl.constexpr = state == tl.uint8
    kind: tl.constexpr = (has_two, exact, tl.float32 if coded else state)
    places = places_of(addresses + tensor * fields, fields, (grad, weight, state, param))
    by = factors_of(factors + member, tensors, columns + 2 if coded and columns > 1 else columns)
    given = option0, option1, option2, option3, option4, tl.load(inverse_scale)
    options = [tl.full((), x, tl.float64) for x in given]
    lanes, totals = lanes_of(block, coded), tl.tuple(())
    for _ in tl.static_range(rows):
        totals += (tl.zeros(lanes.shape, exact),)
    # Sums over gradients, which have one factor at most, are of all tensors.
    if by[0] != 0 if columns > 1 else length >= 0:
        full = length // block * block
        if coded:
            # Rows of whole blocks lie in memory as if they were one.
            full = tl.where(line % CODES == 0, full, 0)
        for partial in tl.static_range(2):
            begin, stop = (full, length) if partial else (0, full)
            for start in range(begin, stop, block):
                blocks = start + tl.arange(0, block // CODES) * CODES
                numbers, known = first // CODES + blocks // CODES, blocks < length
                at, inside = without_gaps(start + lanes, numbers, line, coded and partial)
                inside &= start + lanes < length
                # Without a name: a block's flags would be constants no more.
                more = body(
                    places, by, options, (first, at, inside, aligned, partial, numbers, known), kind
                )
                found = tl.tuple(())
                for i in tl.static_range(rows):
                    found += (totals[i] + more[i],)
                totals = found
    own, width = sums + tl.program_id(0), tl.num_programs(0).to(tl.int64)
    for i in tl.static_range(rows):
        tl.store(own + i * width, tl.sum(totals[i]).to(tl.float64))


@triton.jit(do_not_specialize=["width", "batch"])
def sum_kernel(
    sums: tl.tensor, ends: tl.tensor, found: tl.tensor, width: tl.tensor, batch: tl.tensor
) -> None:
    """Sums of tensors from the sums of their chunks: a program for each tensor and row."""
    own, row = ends + tl.program_id(0) * 3, tl.program_id(1).to(tl.int64)
    first, member = tl.load(own), tl.load(own + 2)
    count = (tl.load(own + 1) - first).to(tl.int32)
    place = sums + row * width + first
    total = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, count, WIDTH):
        offsets = start + tl.arange(0, WIDTH)
        total += tl.load(place + offsets, mask=offsets < count, other=0.0)
    tl.store(found + row * batch + member, tl.sum(total))


@cache
def prepare(one: Pass, types: Types, states: int, device: torch.device) -> None:
    """Compiles and loads a kernel by running it over an empty tensor; compilers may raise."""
    coded = types[2] is torch.uint8
    table = Table([0], types, states * (1 + coded), [codes.BLOCK] * coded, [0], device)
    factors = torch.zeros(one.columns + 2, 1, dtype=torch.float64, device=device)
    with torch.cuda.device_of(factors):
        for table.aligned in (True, False):
            table.run(one, factors, (), table.one)
        table.add_up(torch.empty(1, 1, dtype=types[4], device=device))
