"""LAMB as Triton kernels: the passes of :mod:`steadygrad.formulas.lamb`."""

from typing import Any

import triton
import triton.language as tl

from steadygrad.formulas.lamb import Coefficients, Scales
from steadygrad.kernels.triton.lans import grad_sq_norms
from steadygrad.kernels.triton.memory import (
    cast,
    read,
    read_gradient,
    read_weight,
    write,
    write_weight,
)
from steadygrad.kernels.triton.runtime import Pass

__all__ = ["PASSES", "apply", "grad_sq_norms", "update_moments"]


@triton.jit
def move_moments(places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple) -> Any:
    """Moves a block of the moments; squares of the weight and of the direction."""
    at_g, at_x, at_m, at_v, at_p = places
    state: tl.constexpr = at_m.dtype.element_ty
    _taken, clip, unbias1, unbias2 = cast(by, state)
    beta1, beta2, eps, decay, _none, _scale = cast(options, state)
    rest1, rest2 = (1 - options[0]).to(state), (1 - options[1]).to(state)
    slope = read_gradient(at_g, here, options[5]).to(state) * clip
    m = beta1 * read(at_m, here) + rest1 * slope
    v = beta2 * read(at_v, here) + rest2 * (slope * slope)
    write(at_m, here, m)
    write(at_v, here, v)
    x = read_weight(at_x, at_p, here).to(state)
    u = m * unbias1 / (tl.sqrt(v * unbias2) + eps) + decay * x
    # Beyond the chunk's end both are zero.
    return x * x, u * u


@triton.jit
def move_weights(places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple) -> Any:
    """Moves a block of the weights, and of the parameters that are their roundings."""
    _g, at_x, at_m, at_v, at_p = places
    state: tl.constexpr = at_m.dtype.element_ty
    _taken, unbias2, by_m, _keep = cast(by, state)
    eps = options[2].to(state)
    m, v, x = read(at_m, here), read(at_v, here), read(at_x, here)
    keep = by[3].to(x.dtype)
    write_weight(at_x, at_p, here, keep * x - by_m * m / (tl.sqrt(v * unbias2) + eps))
    return ()


update_moments = Pass(move_moments, len(Scales._fields), rows=2, of_state=True)
apply = Pass(move_weights, len(Coefficients._fields))
PASSES = (grad_sq_norms, update_moments, apply)
