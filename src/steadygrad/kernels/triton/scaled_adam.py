"""ScaledAdam as Triton kernels: both passes of :mod:`steadygrad.formulas.scaled_adam`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.formulas.scaled_adam import Rule, StepScales
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

__all__ = ["KERNELS", "sums", "update"]

TAKEN, UNSCALE = place_of(StepScales, "taken"), place_of(StepScales, "unscale")
SECOND_MOMENT = place_of(StepScales, "second_moment")
GRADIENT, WEIGHT = place_of(StepScales, "gradient"), place_of(StepScales, "weight")


def sums(batch: KernelBatch, needed: Tensor | None) -> Tensor:
    """As in :mod:`steadygrad.formulas.scaled_adam`. Masters take what was written to parameters."""
    if needed is None:
        needed = torch.ones(len(batch.table.addresses), device=batch.table.device)
    launch(sums_kernel, batch.table, [needed])
    return batch.table.sums(3, batch.sum_dtype)


def update(batch: KernelBatch, by: StepScales, rule: Rule) -> Tensor:
    """As in :mod:`steadygrad.formulas.scaled_adam`. 16-bit parameters follow their masters."""
    bound = torch.inf if by.weight is not None else rule.scalar_max
    before, after = (bound, torch.inf) if rule.original else (torch.inf, bound)
    weight = torch.zeros_like(by.gradient) if by.weight is None else by.weight
    beta1, beta2 = rule.betas
    launch(
        update_kernel,
        batch.table,
        by._replace(weight=weight),
        beta1=beta1,
        beta2=beta2,
        eps=rule.eps,
        before=before,
        after=after,
    )
    return batch.table.sums(1, batch.sum_dtype)[0]


@triton.jit
def _products(
    places: tl.tuple,
    needed: tl.tensor,
    here: tl.tuple,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """A block's squares of gradients; if needed, products with weights and squares of these."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    param: tl.constexpr = types[3]
    exact: tl.constexpr = types[4]
    at_g, at_p, _at_v, _at_d, at_out = places
    g = read_gradient(at_g, here, grad, aligned, masked).to(exact)
    p = tl.zeros_like(g)
    if needed:
        stored = widened(read(at_p, here, weight, aligned, masked), weight)
        if param != weight:
            stored = sync_masters(stored, at_p, at_out, here, param, aligned, masked)
        p = stored.to(exact)
    return g * g, g * p, p * p


@triton.jit(do_not_specialize=["tensors", "fields"])
def sums_kernel(
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
    """Squared norms of gradients; where needed, products with weights and their norms too."""
    tensor, first, length = chunk_at(chunks)
    needed = factor(factors, tensors, tensor, 0) != 0
    exact: tl.constexpr = tl.float64 if weight == tl.float64 else tl.float32
    types: tl.constexpr = (grad, weight, state, param, exact)
    total_g, total_pg = tl.zeros((block,), exact), tl.zeros((block,), exact)
    total_p, lanes = tl.zeros((block,), exact), tl.arange(0, block)
    places = addresses_at(addresses, fields, tensor)
    if places[0] == 0 and not needed:
        length = 0
    full = length // block * block
    for begin in range(0, full, block):
        here = (first, begin + lanes, length)
        g, pg, p = _products(places, needed, here, types, aligned, False)
        total_g += g
        total_pg += pg
        total_p += p
    if full < length:
        here = (first, full + lanes, length)
        g, pg, p = _products(places, needed, here, types, aligned, True)
        total_g += g
        total_pg += pg
        total_p += p
    own, width = sums + tl.program_id(0), tl.num_programs(0).to(tl.int64)
    tl.store(own, tl.sum(total_g).to(tl.float64))
    tl.store(own + width, tl.sum(total_pg).to(tl.float64))
    tl.store(own + 2 * width, tl.sum(total_p).to(tl.float64))


@triton.jit
def _move(
    places: tl.tuple,
    numbers: tl.tuple,
    here: tl.tuple,
    types: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
) -> Any:
    """Moves a block of ``v``, ``delta`` and weights; gradients times the weights as they were."""
    grad: tl.constexpr = types[0]
    weight: tl.constexpr = types[1]
    state: tl.constexpr = types[2]
    param: tl.constexpr = types[3]
    exact: tl.constexpr = types[4]
    at_g, at_p, at_v, at_d, at_out = places
    scale, unbias, by_g, by_p, beta1, rest1, beta2, rest2, eps, before, after = numbers
    g = read_gradient(at_g, here, grad, aligned, masked)
    slope = g.to(state) * scale
    v = beta2 * read(at_v, here, state, aligned, masked) + rest2 * (slope * slope)
    write(at_v, here, v, state, aligned, masked)
    p = widened(read(at_p, here, weight, aligned, masked), weight)
    if param != weight:
        p = sync_masters(p, at_p, at_out, here, param, aligned, masked)
    p = p.to(exact)
    # A weight that is not finite must not reach `delta` by way of zero.
    move = by_g * slope / (tl.sqrt(v * unbias) + eps) + tl.where(by_p != 0, by_p * p.to(state), 0.0)
    delta = beta1 * read(at_d, here, state, aligned, masked) + rest1 * move
    write(at_d, here, delta, state, aligned, masked)
    moved = bounded(bounded(p, before) + delta.to(exact), after)
    write(at_p, here, moved, weight, aligned, masked)
    if param != weight:
        write(at_out, here, moved, param, aligned, masked)
    return g.to(exact) * p


@triton.jit(do_not_specialize=["tensors", "fields", "beta1", "beta2", "eps", "before", "after"])
def update_kernel(
    addresses: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    factors: tl.tensor,
    tensors: tl.tensor,
    fields: tl.tensor,
    beta1: tl.int64,
    beta2: tl.int64,
    eps: tl.int64,
    before: tl.int64,
    after: tl.int64,
    grad: tl.constexpr,
    weight: tl.constexpr,
    state: tl.constexpr,
    param: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Moves ``v``, ``delta`` and weights; products of gradients with the weights as they were."""
    tensor, first, length = chunk_at(chunks)
    exact: tl.constexpr = tl.float64 if weight == tl.float64 else tl.float32
    total, lanes = tl.zeros((block,), exact), tl.arange(0, block)
    if factor(factors, tensors, tensor, TAKEN) != 0:
        numbers = (
            factor(factors, tensors, tensor, UNSCALE).to(state),
            factor(factors, tensors, tensor, SECOND_MOMENT).to(state),
            factor(factors, tensors, tensor, GRADIENT).to(state),
            factor(factors, tensors, tensor, WEIGHT).to(state),
            number(beta1).to(state),
            (1 - number(beta1)).to(state),
            number(beta2).to(state),
            (1 - number(beta2)).to(state),
            number(eps).to(state),
            number(before).to(exact),
            number(after).to(exact),
        )
        places, full = addresses_at(addresses, fields, tensor), length // block * block
        types: tl.constexpr = (grad, weight, state, param, exact)
        for begin in range(0, full, block):
            here = (first, begin + lanes, length)
            total += _move(places, numbers, here, types, aligned, False)
        if full < length:
            here = (first, full + lanes, length)
            total += _move(places, numbers, here, types, aligned, True)
    tl.store(sums + tl.program_id(0), tl.sum(total).to(tl.float64))


KERNELS = (sums_kernel, update_kernel)
