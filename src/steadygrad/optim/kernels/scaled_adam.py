"""ScaledAdam as kernels: both passes of :mod:`steadygrad.optim.scaled_adam_rule`."""

from typing import Any

import triton
import triton.language as tl

from steadygrad.optim.kernels.codes import read_moments, used, write_moments
from steadygrad.optim.kernels.memory import bounded, read_gradient, read_weight, write_weight


@triton.jit
def sums(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, kind: tl.constexpr
) -> Any:
    """A block's squares of gradients; if asked for, products with weights and squares of these."""
    at_g, at_p, at_out = places[0], places[1], places[-1]
    gradient = read_gradient(at_g, here, options[5])
    g = gradient.to(kind[1])
    found = (g * g,)
    if len(by) > 0:
        p = tl.zeros(g.shape, tl.float64 if at_p.dtype.element_ty == tl.float64 else tl.float32)
        if by[0] != 0:
            p = read_weight(at_p, at_out, here)
        x = p.to(kind[1])
        # A product is rounded before it is added up, as in the update.
        found += ((gradient.to(p.dtype) * p).to(kind[1]), x * x)  # type: ignore[assignment]
    return found


@triton.jit
def update(
    places: tl.tuple, by: tl.tuple, options: tl.tuple, here: tl.tuple, kind: tl.constexpr
) -> Any:
    """Moves a block of ``delta``, ``v`` and weights; gradients times the weights as they were."""
    at_g, at_p, at_out = places[0], places[1], places[-1]
    state: tl.constexpr = kind[2]
    beta1, beta2 = options[0].to(state), options[1].to(state)
    root, rest1, rest2 = tl.sqrt(by[2]), 1 - options[0], (1 - options[1]).to(state)
    clip, eps, along_g = by[1].to(state), (options[2] / root).to(state), by[3] / root * rest1
    along_p = by[4].to(state) * rest1.to(state)
    g = read_gradient(at_g, here, options[5])
    slope, p = g.to(state) * clip, read_weight(at_p, at_out, here)
    delta, v, floor = read_moments(places, here)
    v = beta2 * v + rest2 * (slope * slope)
    # A weight that is not finite must not reach `delta` by way of zero.
    size = tl.where(along_p != 0, along_p * p.to(state), 0.0)
    enough = used(places, v, floor, floor)
    # To the last digit, which the compiler's own are not in float32.
    if state == tl.float32:
        step = tl.div_rn(slope, tl.sqrt_rn(enough) + eps)
    else:
        step = slope / (tl.sqrt(enough) + eps)
    delta = beta1 * delta + (step * along_g.to(state) + size)
    write_moments(places, here, by, delta, v)
    before, after = options[3].to(p.dtype), options[4].to(p.dtype)
    write_weight(at_p, at_out, here, bounded(bounded(p, before) + delta.to(p.dtype), after))
    return ((g.to(p.dtype) * p).to(kind[1]),)
