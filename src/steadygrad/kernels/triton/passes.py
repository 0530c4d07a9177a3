"""The kernel that all passes share: its chunks, its sums, and the arguments of a pass.

The work of a pass on one block is a function of four tuples:

- ``places``: pointers to a tensor's gradient, weight, large states and parameter;
- ``by``: the tensor's factors;
- ``options``: numbers that hold for all tensors, the last of which is one over the loss scale in
  the gradients; these and factors are of float64;
- ``here``: the block, see :mod:`steadygrad.kernels.triton.memory`.

It returns a tuple of blocks, one for each sum, whose elements are added up.
"""

from typing import Any

import triton
import triton.language as tl

from steadygrad.kernels.triton.memory import chunk_at, factors_of, number, places_of

__all__ = ["MOST_OPTIONS", "pass_kernel"]

# Options that the kernel takes; a pass with fewer is handed zeros besides its own.
MOST_OPTIONS = 5


@triton.jit
def _added(totals: tl.tuple, more: tl.tuple, rows: tl.constexpr) -> Any:
    found = tl.tuple(())
    for i in tl.static_range(rows):
        found += (totals[i] + more[i],)
    return found


def _name(specialization: Any) -> str:
    """The name of a kernel, as profilers show it: its pass's."""
    return str(specialization.constants["body"].__name__)


@triton.jit(
    do_not_specialize=["tensors", "option0", "option1", "option2", "option3", "option4"],
    repr=_name,
)
def pass_kernel(
    addresses: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    factors: tl.tensor,
    inverse_scale: tl.tensor,
    tensors: tl.tensor,
    fields: tl.constexpr,
    option0: tl.int64,
    option1: tl.int64,
    option2: tl.int64,
    option3: tl.int64,
    option4: tl.int64,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
    body: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    of_state: tl.constexpr,
    of_gradients: tl.constexpr,
) -> None:
    """Works on a chunk, block by block, and adds up the blocks' sums."""
    tensor, first, length = chunk_at(chunks)
    places = places_of(addresses, fields, tensor, grad, weight, state, param)
    by = factors_of(factors, tensors, tensor, columns)
    options = (
        number(option0),
        number(option1),
        number(option2),
        number(option3),
        number(option4),
        tl.load(inverse_scale).to(tl.float64),
    )
    exact: tl.constexpr = tl.float64 if weight == tl.float64 else tl.float32
    totals = tl.tuple(())
    for _ in tl.static_range(rows):
        totals += (tl.zeros((block,), state if of_state else exact),)
    there = of_gradients and places[0].to(tl.int64) != 0
    if columns > 0:
        there = there | (by[0] != 0)
    if there:
        lanes, full = tl.arange(0, block), length // block * block
        for begin in range(0, full, block):
            more = body(places, by, options, (first, begin + lanes, length, aligned, False))
            totals = _added(totals, more, rows)
        if full < length:
            more = body(places, by, options, (first, full + lanes, length, aligned, True))
            totals = _added(totals, more, rows)
    own, width = sums + tl.program_id(0), tl.num_programs(0).to(tl.int64)
    for i in tl.static_range(rows):
        tl.store(own + i * width, tl.sum(totals[i]).to(tl.float64))
