"""LANS and LAMB as kernels: the passes of :mod:`steadygrad.optim.layerwise_rule`."""

from typing import Any

import triton
import triton.language as tl

from steadygrad.optim.kernels import memory
from steadygrad.optim.kernels.codes import read_moments, used, write_moments
from steadygrad.optim.kernels.memory import bounded, read, read_gradient


@triton.jit
def _slope(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, state: tl.constexpr
) -> Any:
    """A block's scaled gradients."""
    g = read_gradient(places[0], here, options[5]).to(state)
    return bounded(g * by[1].to(state), options[4].to(state))


@triton.jit
def _moved(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, state: tl.constexpr
) -> Any:
    """A block's scaled gradients, moments with them, and second moments to go by."""
    beta1, beta2 = options[0].to(state), options[1].to(state)
    rest1, rest2 = (1 - options[0]).to(state), (1 - options[1]).to(state)
    slope = _slope(places, by, options, here, state)
    m, v, floor = read_moments(places, here)
    m, v = beta1 * m + rest1 * slope, beta2 * v + rest2 * (slope * slope)
    # As in `codes.least_ratio`.
    square, before, over = options[0] * options[0], 1 - options[1], 1 - options[0]
    ratio = before * (1 - square / options[1]) / (over * over)
    least = m * m * tl.where(square < options[1], ratio, 0.0).to(state)
    return slope, m, v, used(places, v, floor, least)


@triton.jit
def move_moments(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, kind: tl.constexpr
) -> Any:
    """Moves a block of the moments, unless they are codes; squares of the weight and directions."""
    state: tl.constexpr = kind[2]
    unbias1, unbias2 = by[2].to(state), by[3].to(state)
    eps, decay = options[2].to(state), options[3].to(state)
    slope, m, v, enough = _moved(places, by, options, here, state)
    if places[2].dtype.element_ty != tl.uint8:
        write_moments(places, here, by, m, v)
    x = memory.read_weight(places[1], places[-1], here).to(state)
    d = tl.sqrt(enough * unbias2) + eps
    u_m = m * unbias1 / d + decay * x
    # What is not there is zero in all of them.
    found = (x * x, u_m * u_m)
    if kind[0]:
        u_g = slope / d + decay * x
        found += (u_g * u_g,)  # type: ignore[assignment]
    return found


@triton.jit
def move_weights(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, kind: tl.constexpr
) -> Any:
    """Moves a block of the weights, of the parameters that are their roundings, and of codes."""
    at_x, at_p = places[1], places[-1]
    state: tl.constexpr = kind[2]
    unbias2, along_m, along_g = by[2].to(state), by[3].to(state), by[4].to(state)
    if places[2].dtype.element_ty == tl.uint8:
        slope, m, v, enough = _moved(places, by, options, here, state)
        write_moments(places, here, by, m, v)
    else:
        m, enough, slope = read(places[2], here), read(places[3], here), 0.0
        if kind[0]:
            slope = _slope(places, by, options, here, state)
    x, step = read(at_x, here), along_m * m
    if kind[0]:
        step += along_g * slope
    d, keep = tl.sqrt(enough * unbias2) + options[2].to(state), by[5].to(x.dtype)
    memory.write_weight(at_x, at_p, here, keep * x - step / d)
    return ()
