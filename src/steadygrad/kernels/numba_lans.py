"""LANS as compiled loops: the three passes of :mod:`steadygrad.formulas.lans`.

Addresses of a tensor: gradient, weight, ``m``, ``v``, and where the weight goes in the type of a
16-bit parameter. Factors and settings are those of :mod:`steadygrad.kernels.tables`.
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
from steadygrad.kernels.tables import BLOCK, COLUMNS, LansNumber, LansSetting

__all__ = ["lans_apply", "lans_directions", "square_sums"]

INVERSE, FIRST = int(LansNumber.INVERSE), int(LansNumber.FIRST)
SECOND, MOMENTUM = int(LansNumber.SECOND), int(LansNumber.MOMENTUM)
GRADIENT, KEEP = int(LansNumber.GRADIENT), int(LansNumber.KEEP)
BETA1, BETA2, EPS = int(LansSetting.BETA1), int(LansSetting.BETA2), int(LansSetting.EPS)
DECAY, BOUND = int(LansSetting.DECAY), int(LansSetting.BOUND)


def square_sums(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Squared norms of gradients, in the first column of sums."""
    source = SOURCE

    def kernel(data: Any) -> None:
        job, chunks, table, sums, _factors, _settings = opened(data, 1 + 0 * source)
        while True:
            c = take(job)
            if c < 0:
                return
            tensor, start, stop = chunks[c, 0], chunks[c, 1], chunks[c, 1] + chunks[c, 2]
            total = 0.0
            for block in range(start, stop, BLOCK):
                size = min(BLOCK, stop - block)
                g = gradient_at(job, table[tensor, 0], block, size, grad)
                part = state(0)
                for i in range(size):
                    x = state(widen(g[i]))
                    part += x * x
                total += np.float64(part)
            sums[c, 0] = total

    return kernel


def lans_directions(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Moves the moments; squared norms of weights and both directions. Masters follow."""
    source, rounded = SOURCE, parameter is not weight

    def kernel(data: Any) -> None:
        job, chunks, table, sums, factors, settings = opened(data, COLUMNS + 0 * source)
        beta1, beta2 = state(settings[BETA1]), state(settings[BETA2])
        rest1, rest2 = state(1 - settings[BETA1]), state(1 - settings[BETA2])
        eps, decay, bound = state(settings[EPS]), state(settings[DECAY]), state(settings[BOUND])
        while True:
            c = take(job)
            if c < 0:
                return
            tensor, start, stop = chunks[c, 0], chunks[c, 1], chunks[c, 1] + chunks[c, 2]
            inverse = state(factors[tensor, INVERSE])
            unbias1, unbias2 = state(factors[tensor, FIRST]), state(factors[tensor, SECOND])
            total_x, total_m, total_g = 0.0, 0.0, 0.0
            for block in range(start, stop, BLOCK):
                size = min(BLOCK, stop - block)
                g = gradient_at(job, table[tensor, 0], block, size, grad)
                x = part_at(table[tensor, 1], block, size, weight)
                m = part_at(table[tensor, 2], block, size, state)
                v = part_at(table[tensor, 3], block, size, state)
                if rounded:
                    follow(x, part_at(table[tensor, 4], block, size, parameter), size)
                part_x, part_m, part_g = state(0), state(0), state(0)
                for i in range(size):
                    scaled = state(widen(g[i])) * inverse
                    scaled = min(max(scaled, -bound), bound)
                    m[i] = beta1 * m[i] + rest1 * scaled
                    v[i] = beta2 * v[i] + rest2 * (scaled * scaled)
                    over = state(1) / (math.sqrt(v[i] * unbias2) + eps)
                    here = state(widen(x[i]))
                    u_m = m[i] * unbias1 * over + decay * here
                    u_g = scaled * over + decay * here
                    part_x += here * here
                    part_m += u_m * u_m
                    part_g += u_g * u_g
                total_x += np.float64(part_x)
                total_m += np.float64(part_m)
                total_g += np.float64(part_g)
            sums[c, 0], sums[c, 1], sums[c, 2] = total_x, total_m, total_g

    return kernel


def lans_apply(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Moves the weights, and the parameters that are their roundings."""
    source, exact, rounded = SOURCE, wide(weight), parameter is not weight

    def kernel(data: Any) -> None:
        job, chunks, table, _sums, factors, settings = opened(data, COLUMNS + 0 * source)
        eps, bound = state(settings[EPS]), state(settings[BOUND])
        while True:
            c = take(job)
            if c < 0:
                return
            tensor, start, stop = chunks[c, 0], chunks[c, 1], chunks[c, 1] + chunks[c, 2]
            inverse, unbias2 = state(factors[tensor, INVERSE]), state(factors[tensor, SECOND])
            by_m, by_g = state(factors[tensor, MOMENTUM]), state(factors[tensor, GRADIENT])
            keep = exact(factors[tensor, KEEP])
            for block in range(start, stop, BLOCK):
                size = min(BLOCK, stop - block)
                g = gradient_at(job, table[tensor, 0], block, size, grad)
                x = part_at(table[tensor, 1], block, size, weight)
                m = part_at(table[tensor, 2], block, size, state)
                v = part_at(table[tensor, 3], block, size, state)
                p = part_at(table[tensor, 4], block, size, parameter)
                for i in range(size):
                    scaled = state(widen(g[i])) * inverse
                    scaled = min(max(scaled, -bound), bound)
                    d = math.sqrt(v[i] * unbias2) + eps
                    moved = keep * exact(widen(x[i])) - (by_g * scaled + by_m * m[i]) / d
                    x[i] = narrow(moved, x[i])
                if rounded:
                    for i in range(size):
                        p[i] = narrow(x[i], p[i])

    return kernel
