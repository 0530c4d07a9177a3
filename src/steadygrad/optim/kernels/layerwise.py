"""LANS and LAMB as kernels: the passes of :mod:`steadygrad.optim.layerwise_rule`."""

from typing import Any

import triton
import triton.language as tl

from steadygrad.optim.kernels.memory import (
    bounded,
    cast,
    read,
    read_gradient,
    read_weight,
    write,
    write_weight,
)


@triton.jit
def move_moments(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, has_two: tl.constexpr
) -> Any:
    """Moves a block of the moments; squares of the weight and of each direction."""
    at_g, at_x, at_m, at_v, at_p = places
    state: tl.constexpr = at_m.dtype.element_ty
    _taken, scale, unbias1, unbias2 = cast(by, state)
    beta1, beta2, eps, decay, bound, _scale = cast(options, state)
    rest1, rest2 = (1 - options[0]).to(state), (1 - options[1]).to(state)
    slope = bounded(read_gradient(at_g, here, options[5]).to(state) * scale, bound)
    m = beta1 * read(at_m, here) + rest1 * slope
    v = beta2 * read(at_v, here) + rest2 * (slope * slope)
    write(at_m, here, m)
    write(at_v, here, v)
    x = read_weight(at_x, at_p, here).to(state)
    d = tl.sqrt(v * unbias2) + eps
    u_m = m * unbias1 / d + decay * x
    # Beyond the chunk's end all of them are zero.
    found = (x * x, u_m * u_m)
    if has_two:
        u_g = slope / d + decay * x
        found += (u_g * u_g,)  # type: ignore[assignment]
    return found


@triton.jit
def move_weights(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, has_two: tl.constexpr
) -> Any:
    """Moves a block of the weights, and of the parameters that are their roundings."""
    at_g, at_x, at_m, at_v, at_p = places
    state: tl.constexpr = at_m.dtype.element_ty
    _taken, scale, unbias2, along_m, along_g, _keep = cast(by, state)
    _beta1, _beta2, eps, _decay, bound, _scale = cast(options, state)
    m, v, x = read(at_m, here), read(at_v, here), read(at_x, here)
    step = along_m * m
    if has_two:
        slope = bounded(read_gradient(at_g, here, options[5]).to(state) * scale, bound)
        step += along_g * slope
    d, keep = tl.sqrt(v * unbias2) + eps, by[5].to(x.dtype)
    write_weight(at_x, at_p, here, keep * x - step / d)
    return ()
