"""LANS as Triton kernels: the three passes of :mod:`steadygrad.formulas.lans`."""

from typing import Any

import triton
import triton.language as tl

from steadygrad.formulas.lans import Coefficients, Normalizers
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

__all__ = ["PASSES", "apply", "grad_sq_norms", "update_moments"]


@triton.jit
def square_gradients(places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple) -> Any:
    """Squares of a block's gradients."""
    at_g, at_x, _m, _v, _p = places
    exact: tl.constexpr = tl.float64 if at_x.dtype.element_ty == tl.float64 else tl.float32
    g = read_gradient(at_g, here, options[5]).to(exact)
    return (g * g,)


@triton.jit
def move_moments(places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple) -> Any:
    """Moves a block of the moments; squares of the weight and of both directions."""
    at_g, at_x, at_m, at_v, at_p = places
    state: tl.constexpr = at_m.dtype.element_ty
    _taken, inverse, unbias1, unbias2 = cast(by, state)
    beta1, beta2, eps, decay, bound, _scale = cast(options, state)
    rest1, rest2 = (1 - options[0]).to(state), (1 - options[1]).to(state)
    scaled = bounded(read_gradient(at_g, here, options[5]).to(state) * inverse, bound)
    m = beta1 * read(at_m, here) + rest1 * scaled
    v = beta2 * read(at_v, here) + rest2 * (scaled * scaled)
    write(at_m, here, m)
    write(at_v, here, v)
    x = read_weight(at_x, at_p, here).to(state)
    d = tl.sqrt(v * unbias2) + eps
    u_m = m * unbias1 / d + decay * x
    u_g = scaled / d + decay * x
    # Beyond the chunk's end all of them are zero.
    return x * x, u_m * u_m, u_g * u_g


@triton.jit
def move_weights(places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple) -> Any:
    """Moves a block of the weights, and of the parameters that are their roundings."""
    at_g, at_x, at_m, at_v, at_p = places
    state: tl.constexpr = at_m.dtype.element_ty
    _taken, inverse, unbias2, by_m, by_g, _keep = cast(by, state)
    _beta1, _beta2, eps, _decay, bound, _scale = cast(options, state)
    scaled = bounded(read_gradient(at_g, here, options[5]).to(state) * inverse, bound)
    m, v, x = read(at_m, here), read(at_v, here), read(at_x, here)
    d, keep = tl.sqrt(v * unbias2) + eps, by[5].to(x.dtype)
    write_weight(at_x, at_p, here, keep * x - (by_g * scaled + by_m * m) / d)
    return ()


grad_sq_norms, update_moments, apply = PASSES = (
    Pass(square_gradients, rows=1, of_gradients=True),
    Pass(move_moments, len(Normalizers._fields), rows=3, of_state=True),
    Pass(move_weights, len(Coefficients._fields)),
)
