"""LAMB as Triton kernels: the passes of :mod:`steadygrad.formulas.lamb`."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from steadygrad.formulas.lamb import Coefficients, Rule, Scales
from steadygrad.kernels.triton.lans import grad_kernel, grad_sq_norms
from steadygrad.kernels.triton.memory import (
    addresses_at,
    chunk_at,
    factor,
    number,
    read,
    read_gradient,
    sync_masters,
    widened,
    write,
)
from steadygrad.kernels.triton.runtime import KernelBatch, launch, place_of

__all__ = ["KERNELS", "apply", "grad_sq_norms", "update_moments"]

TAKEN, SCALE = place_of(Scales, "taken"), place_of(Scales, "gradient")
UNBIAS1, UNBIAS2 = place_of(Scales, "unbias1"), place_of(Scales, "unbias2")
BY_TAKEN, BY_UNBIAS2 = place_of(Coefficients, "taken"), place_of(Coefficients, "unbias2")
MOMENTUM, KEEP = place_of(Coefficients, "momentum"), place_of(Coefficients, "keep")


def update_moments(batch: KernelBatch, by: Scales, rule: Rule) -> Tensor:
    """As in :mod:`steadygrad.formulas.lamb`. Masters take what was written to parameters."""
    launch(moments_kernel, batch.table, by, **rule._asdict())
    return batch.table.sums(2, batch.sum_dtype)


def apply(batch: KernelBatch, by: Coefficients, rule: Rule) -> None:
    """As in :mod:`steadygrad.formulas.lamb`. 16-bit parameters are rounded from their masters."""
    launch(apply_kernel, batch.table, by, eps=rule.eps)


@triton.jit
def _move_moments(
    places: tl.tuple,
    numbers: tl.tuple,
    here: tl.tuple,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """Moves a block of the moments; squares of the weight and of the direction."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    at_g, at_x, at_m, at_v, at_p = places
    scale, unbias1, unbias2, beta1, rest1, beta2, rest2, eps, decay = numbers
    slope = read_gradient(at_g, here, grad, aligned, masked).to(state) * scale
    m = beta1 * read(at_m, here, state, aligned, masked) + rest1 * slope
    v = beta2 * read(at_v, here, state, aligned, masked) + rest2 * (slope * slope)
    write(at_m, here, m, state, aligned, masked)
    write(at_v, here, v, state, aligned, masked)
    x = widened(read(at_x, here, weight, aligned, masked), weight)
    if param != weight:
        x = sync_masters(x, at_x, at_p, here, param, aligned, masked)
    x = x.to(state)
    u = m * unbias1 / (tl.sqrt(v * unbias2) + eps) + decay * x
    # Beyond the chunk's end both are zero.
    return x * x, u * u


@triton.jit(do_not_specialize=["tensors", "fields", "beta1", "beta2", "eps", "weight_decay"])
def moments_kernel(
    addresses: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    factors: tl.tensor,
    tensors: tl.tensor,
    fields: tl.tensor,
    beta1: tl.int64,
    beta2: tl.int64,
    eps: tl.int64,
    weight_decay: tl.int64,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Moves the moments; squared norms of weights and directions."""
    tensor, first, length = chunk_at(chunks)
    total_x, total_u = tl.zeros((block,), state), tl.zeros((block,), state)
    lanes = tl.arange(0, block)
    if factor(factors, tensors, tensor, TAKEN) != 0:
        numbers = (
            factor(factors, tensors, tensor, SCALE).to(state),
            factor(factors, tensors, tensor, UNBIAS1).to(state),
            factor(factors, tensors, tensor, UNBIAS2).to(state),
            number(beta1).to(state),
            (1 - number(beta1)).to(state),
            number(beta2).to(state),
            (1 - number(beta2)).to(state),
            number(eps).to(state),
            number(weight_decay).to(state),
        )
        places, full = addresses_at(addresses, fields, tensor), length // block * block
        types: tl.constexpr = (grad, weight, state, param)
        for begin in range(0, full, block):
            here = (first, begin + lanes, length)
            x, u = _move_moments(places, numbers, here, types, aligned, False)
            total_x += x
            total_u += u
        if full < length:
            here = (first, full + lanes, length)
            x, u = _move_moments(places, numbers, here, types, aligned, True)
            total_x += x
            total_u += u
    own, width = sums + tl.program_id(0), tl.num_programs(0).to(tl.int64)
    tl.store(own, tl.sum(total_x).to(tl.float64))
    tl.store(own + width, tl.sum(total_u).to(tl.float64))


@triton.jit
def _move_weights(
    places: tl.tuple,
    numbers: tl.tuple,
    here: tl.tuple,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    """Moves a block of the weights, and of the parameters that are their roundings."""
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    _g, at_x, at_m, at_v, at_p = places
    unbias2, by_m, keep, eps = numbers
    m = read(at_m, here, state, aligned, masked)
    v = read(at_v, here, state, aligned, masked)
    x = widened(read(at_x, here, weight, aligned, masked), weight)
    moved = keep * x.to(keep.dtype) - by_m * m / (tl.sqrt(v * unbias2) + eps)
    write(at_x, here, moved, weight, aligned, masked)
    if param != weight:
        write(at_p, here, moved, param, aligned, masked)


@triton.jit(do_not_specialize=["tensors", "fields", "eps"])
def apply_kernel(
    addresses: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    factors: tl.tensor,
    tensors: tl.tensor,
    fields: tl.tensor,
    eps: tl.int64,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Moves the weights, and the parameters that are their roundings."""
    tensor, first, length = chunk_at(chunks)
    if factor(factors, tensors, tensor, BY_TAKEN) != 0:
        exact: tl.constexpr = tl.float64 if weight == tl.float64 else tl.float32
        numbers = (
            factor(factors, tensors, tensor, BY_UNBIAS2).to(state),
            factor(factors, tensors, tensor, MOMENTUM).to(state),
            factor(factors, tensors, tensor, KEEP).to(exact),
            number(eps).to(state),
        )
        places, full = addresses_at(addresses, fields, tensor), length // block * block
        types: tl.constexpr = (grad, weight, state, param)
        lanes = tl.arange(0, block)
        for begin in range(0, full, block):
            here = (first, begin + lanes, length)
            _move_weights(places, numbers, here, types, aligned, False)
        if full < length:
            here = (first, full + lanes, length)
            _move_weights(places, numbers, here, types, aligned, True)


KERNELS = (grad_kernel, moments_kernel, apply_kernel)
