"""ScaledAdam as compiled loops: both passes of :mod:`steadygrad.formulas.scaled_adam`.

Factors of a tensor and settings are those of :mod:`steadygrad.kernels.tables`.

Addresses of a tensor: gradient, weight, ``v``, ``delta``, and where the weight goes in the type of
a 16-bit parameter.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from steadygrad.kernels.numba_parts import (
    SOURCE,
    follow,
    gradient_at,
    narrow,
    opened,
    part_at,
    take,
    wide,
    widen,
)
from steadygrad.kernels.tables import BLOCK, COLUMNS, Number, Setting

__all__ = ["scaled_adam_sums", "scaled_adam_update"]

UNBIAS = int(Number.SECOND_MOMENT)
BY_GRADIENT, BY_WEIGHT = int(Number.GRADIENT), int(Number.WEIGHT)
EARLY = int(Number.EARLY)
BETA1, BETA2, EPS = int(Setting.BETA1), int(Setting.BETA2), int(Setting.EPS)
SCALE, BEFORE, AFTER = int(Setting.SCALE), int(Setting.BEFORE), int(Setting.AFTER)


def scaled_adam_sums(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Squared norms of gradients, inner products with weights, squared norms of weights.

    Where `EARLY` is zero the first one only, which spares half of the memory's work.
    """
    source, exact, rounded = SOURCE, wide(weight), parameter is not weight

    def kernel(data: Any) -> None:
        job, chunks, table, sums, factors, _settings = opened(data, COLUMNS + 0 * source)
        while True:
            c = take(job)
            if c < 0:
                return
            tensor, start, stop = chunks[c, 0], chunks[c, 1], chunks[c, 1] + chunks[c, 2]
            total_g, total_pg, total_p = 0.0, 0.0, 0.0
            for block in range(start, stop, BLOCK):
                size = min(BLOCK, stop - block)
                g = gradient_at(job, table[tensor, 0], block, size, grad)
                p = part_at(table[tensor, 1], block, size, weight)
                part_g, part_pg, part_p = exact(0), exact(0), exact(0)
                # The same loop whether products follow or not: two may add up in two orders, and a
                # step after a resume, which takes products, would be another.
                for i in range(size):
                    slope = exact(widen(g[i]))
                    part_g += slope * slope
                if factors[tensor, EARLY] != 0.0:
                    if rounded:
                        follow(p, part_at(table[tensor, 4], block, size, parameter), size)
                    for i in range(size):
                        here = exact(widen(p[i]))
                        part_pg += exact(widen(g[i])) * here
                        part_p += here * here
                total_g += np.float64(part_g)
                total_pg += np.float64(part_pg)
                total_p += np.float64(part_p)
            sums[c, 0], sums[c, 1], sums[c, 2] = total_g, total_pg, total_p

    return kernel


def scaled_adam_update(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Moves ``v``, ``delta`` and weights, and the parameters that are roundings of these.

    Adds up the inner products of gradients with the weights as they were.
    """
    source, exact, rounded = SOURCE, wide(weight), parameter is not weight

    def kernel(data: Any) -> None:
        job, chunks, table, sums, factors, settings = opened(data, COLUMNS + 0 * source)
        beta1, beta2 = state(settings[BETA1]), state(settings[BETA2])
        rest1, rest2 = state(1 - settings[BETA1]), state(1 - settings[BETA2])
        eps, scale = state(settings[EPS]), state(settings[SCALE])
        before, after = exact(settings[BEFORE]), exact(settings[AFTER])
        while True:
            c = take(job)
            if c < 0:
                return
            tensor, start, stop = chunks[c, 0], chunks[c, 1], chunks[c, 1] + chunks[c, 2]
            unbias, by_g = state(factors[tensor, UNBIAS]), state(factors[tensor, BY_GRADIENT])
            by_p, total = state(factors[tensor, BY_WEIGHT]), 0.0
            for block in range(start, stop, BLOCK):
                size = min(BLOCK, stop - block)
                g = gradient_at(job, table[tensor, 0], block, size, grad)
                p = part_at(table[tensor, 1], block, size, weight)
                v = part_at(table[tensor, 2], block, size, state)
                delta = part_at(table[tensor, 3], block, size, state)
                out = part_at(table[tensor, 4], block, size, parameter)
                if rounded:
                    follow(p, out, size)
                part = exact(0)
                for i in range(size):
                    here = exact(widen(p[i]))
                    part += exact(widen(g[i])) * here
                    slope = state(widen(g[i])) * scale
                    v[i] = beta2 * v[i] + rest2 * (slope * slope)
                    move = by_g * slope / (math.sqrt(v[i] * unbias) + eps)
                    # A weight that is not finite is not to reach `delta` by way of zero.
                    move += by_p * (state(here) if by_p != 0.0 else state(0))
                    delta[i] = beta1 * delta[i] + rest1 * move
                    moved = min(max(here, -before), before) + exact(delta[i])
                    p[i] = narrow(min(max(moved, -after), after), p[i])
                total += np.float64(part)
                if rounded:
                    for i in range(size):
                        out[i] = narrow(p[i], out[i])
            sums[c, 1] = total

    return kernel
