"""ScaledAdam as Triton kernels: both passes of :mod:`steadygrad.formulas.scaled_adam`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.formulas.scaled_adam import Rule, StepScales
from steadygrad.kernels.table import KernelBatch
from steadygrad.kernels.triton.memory import (
    bounded,
    cast,
    read,
    read_gradient,
    read_weight,
    write,
    write_weight,
)
from steadygrad.kernels.triton.runtime import Pass

__all__ = ["PASSES", "sums", "update"]


def sums(batch: KernelBatch, needed: Tensor) -> Tensor:
    """Sums of :mod:`steadygrad.formulas.scaled_adam`. Masters take what was written to weights."""
    found: Tensor = SUMS(batch, [needed])
    return found


def update(batch: KernelBatch, by: StepScales, rule: Rule) -> Tensor:
    """Update of :mod:`steadygrad.formulas.scaled_adam`. 16-bit weights follow their masters."""
    weight = torch.zeros_like(by.gradient) if by.weight is None else by.weight
    options = (*rule.betas, rule.eps, *rule.bounds(is_scalar=by.weight is None))
    found: Tensor = UPDATE(batch, [*by[:4], weight], options)[0]
    return found


@triton.jit
def square_sums(places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple) -> Any:
    """A block's squares of gradients; if needed, products with weights and squares of these."""
    at_g, at_p, _v, _d, at_out = places
    exact: tl.constexpr = tl.float64 if at_p.dtype.element_ty == tl.float64 else tl.float32
    g = read_gradient(at_g, here, options[5]).to(exact)
    p = tl.zeros_like(g)
    if by[0] != 0:
        p = read_weight(at_p, at_out, here)
    return g * g, g * p, p * p


@triton.jit
def move_all(places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple) -> Any:
    """Moves a block of ``v``, ``delta`` and weights; gradients times the weights as they were."""
    at_g, at_p, at_v, at_d, at_out = places
    state: tl.constexpr = at_v.dtype.element_ty
    _taken, clip, unbias, by_g, by_p = cast(by, state)
    beta1, beta2, eps, _before, _after, _scale = cast(options, state)
    rest1, rest2 = (1 - options[0]).to(state), (1 - options[1]).to(state)
    g = read_gradient(at_g, here, options[5])
    slope = g.to(state) * clip
    v = beta2 * read(at_v, here) + rest2 * (slope * slope)
    write(at_v, here, v)
    p = read_weight(at_p, at_out, here)
    # A weight that is not finite must not reach `delta` by way of zero.
    move = by_g * slope / (tl.sqrt(v * unbias) + eps) + tl.where(by_p != 0, by_p * p.to(state), 0.0)
    delta = beta1 * read(at_d, here) + rest1 * move
    write(at_d, here, delta)
    before, after = options[3].to(p.dtype), options[4].to(p.dtype)
    write_weight(at_p, at_out, here, bounded(bounded(p, before) + delta.to(p.dtype), after))
    return (g.to(p.dtype) * p,)


SUMS = Pass(square_sums, 1, rows=3, of_gradients=True)
UPDATE = Pass(move_all, len(StepScales._fields), rows=1)
PASSES = (SUMS, UPDATE)
