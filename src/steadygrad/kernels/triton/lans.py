"""LANS as Triton kernels: the three passes of :mod:`steadygrad.formulas.lans`."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from steadygrad.formulas.lans import Coefficients, Normalizers, Rule
from steadygrad.kernels.triton.memory import (
    addresses_at,
    bounded,
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

TAKEN, INVERSE_NORM = place_of(Normalizers, "taken"), place_of(Normalizers, "inverse_norm")
UNBIAS1, UNBIAS2 = place_of(Normalizers, "unbias1"), place_of(Normalizers, "unbias2")
BY_TAKEN, BY_INVERSE = place_of(Coefficients, "taken"), place_of(Coefficients, "inverse_norm")
BY_UNBIAS2, KEEP = place_of(Coefficients, "unbias2"), place_of(Coefficients, "keep")
MOMENTUM, GRADIENT = place_of(Coefficients, "momentum"), place_of(Coefficients, "gradient")


def grad_sq_norms(batch: KernelBatch) -> Tensor:
    """As in :mod:`steadygrad.formulas.lans`."""
    launch(grad_kernel, batch.table)
    return batch.table.sums(1, batch.sum_dtype)


def update_moments(batch: KernelBatch, by: Normalizers, rule: Rule) -> Tensor:
    """As in :mod:`steadygrad.formulas.lans`. Masters take what was written to parameters."""
    launch(moments_kernel, batch.table, by, **rule._asdict())
    return batch.table.sums(3, batch.sum_dtype)


def apply(batch: KernelBatch, by: Coefficients, rule: Rule) -> None:
    """As in :mod:`steadygrad.formulas.lans`. 16-bit parameters are rounded from their masters."""
    launch(apply_kernel, batch.table, by, eps=rule.eps, clip_value=rule.clip_value)


@triton.jit(do_not_specialize=["tensors", "fields"])
def grad_kernel(
    addresses: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    factors: tl.tensor,
    tensors: tl.tensor,
    fields: tl.tensor,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Squared norms of gradients."""
    tensor, first, length = chunk_at(chunks)
    at, _x, _m, _v, _p = addresses_at(addresses, fields, tensor)
    exact: tl.constexpr = tl.float64 if weight == tl.float64 else tl.float32
    total, lanes = tl.zeros((block,), exact), tl.arange(0, block)
    if at != 0:
        full = length // block * block
        for begin in range(0, full, block):
            here = (first, begin + lanes, length)
            g = read_gradient(at, here, grad, aligned, False).to(exact)
            total += g * g
        if full < length:
            here = (first, full + lanes, length)
            g = read_gradient(at, here, grad, aligned, True).to(exact)
            total += g * g
    tl.store(sums + tl.program_id(0), tl.sum(total).to(tl.float64))


@triton.jit
def _move_moments(
    places: tl.tuple,
    numbers: tl.tuple,
    here: tl.tuple,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """Moves a block of the moments; squares of the weight and of both directions."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    at_g, at_x, at_m, at_v, at_p = places
    inverse, unbias1, unbias2, beta1, rest1, beta2, rest2, eps, decay, bound = numbers
    g = read_gradient(at_g, here, grad, aligned, masked).to(state)
    scaled = bounded(g * inverse, bound)
    m = beta1 * read(at_m, here, state, aligned, masked) + rest1 * scaled
    v = beta2 * read(at_v, here, state, aligned, masked) + rest2 * (scaled * scaled)
    write(at_m, here, m, state, aligned, masked)
    write(at_v, here, v, state, aligned, masked)
    x = widened(read(at_x, here, weight, aligned, masked), weight)
    if param != weight:
        x = sync_masters(x, at_x, at_p, here, param, aligned, masked)
    x = x.to(state)
    d = tl.sqrt(v * unbias2) + eps
    u_m = m * unbias1 / d + decay * x
    u_g = scaled / d + decay * x
    # Beyond the chunk's end all of them are zero.
    return x * x, u_m * u_m, u_g * u_g


@triton.jit(
    do_not_specialize=["tensors", "fields", "beta1", "beta2", "eps", "weight_decay", "clip_value"]
)
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
    clip_value: tl.int64,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Moves the moments; squared norms of weights and both directions."""
    tensor, first, length = chunk_at(chunks)
    total_x, total_m = tl.zeros((block,), state), tl.zeros((block,), state)
    total_g, lanes = tl.zeros((block,), state), tl.arange(0, block)
    if factor(factors, tensors, tensor, TAKEN) != 0:
        numbers = (
            factor(factors, tensors, tensor, INVERSE_NORM).to(state),
            factor(factors, tensors, tensor, UNBIAS1).to(state),
            factor(factors, tensors, tensor, UNBIAS2).to(state),
            number(beta1).to(state),
            (1 - number(beta1)).to(state),
            number(beta2).to(state),
            (1 - number(beta2)).to(state),
            number(eps).to(state),
            number(weight_decay).to(state),
            number(clip_value).to(state),
        )
        places, full = addresses_at(addresses, fields, tensor), length // block * block
        types: tl.constexpr = (grad, weight, state, param)
        for begin in range(0, full, block):
            here = (first, begin + lanes, length)
            x, u_m, u_g = _move_moments(places, numbers, here, types, aligned, False)
            total_x += x
            total_m += u_m
            total_g += u_g
        if full < length:
            here = (first, full + lanes, length)
            x, u_m, u_g = _move_moments(places, numbers, here, types, aligned, True)
            total_x += x
            total_m += u_m
            total_g += u_g
    own, width = sums + tl.program_id(0), tl.num_programs(0).to(tl.int64)
    tl.store(own, tl.sum(total_x).to(tl.float64))
    tl.store(own + width, tl.sum(total_m).to(tl.float64))
    tl.store(own + 2 * width, tl.sum(total_g).to(tl.float64))


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
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    at_g, at_x, at_m, at_v, at_p = places
    inverse, unbias2, by_m, by_g, keep, eps, bound = numbers
    g = read_gradient(at_g, here, grad, aligned, masked).to(state)
    m = read(at_m, here, state, aligned, masked)
    v = read(at_v, here, state, aligned, masked)
    x = widened(read(at_x, here, weight, aligned, masked), weight)
    d = tl.sqrt(v * unbias2) + eps
    moved = keep * x.to(keep.dtype) - (by_g * bounded(g * inverse, bound) + by_m * m) / d
    write(at_x, here, moved, weight, aligned, masked)
    if param != weight:
        write(at_p, here, moved, param, aligned, masked)


@triton.jit(do_not_specialize=["tensors", "fields", "eps", "clip_value"])
def apply_kernel(
    addresses: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    factors: tl.tensor,
    tensors: tl.tensor,
    fields: tl.tensor,
    eps: tl.int64,
    clip_value: tl.int64,
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
            factor(factors, tensors, tensor, BY_INVERSE).to(state),
            factor(factors, tensors, tensor, BY_UNBIAS2).to(state),
            factor(factors, tensors, tensor, MOMENTUM).to(state),
            factor(factors, tensors, tensor, GRADIENT).to(state),
            factor(factors, tensors, tensor, KEEP).to(exact),
            number(eps).to(state),
            number(clip_value).to(state),
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
