"""The rules of layer-wise scaling in plain Python."""

import math

import torch


def histogram(values):
    """Counts by binary exponent; zeros at -inf, what is not finite at inf."""
    counts = {}
    for value in values:
        if not math.isfinite(value):
            exponent = math.inf
        elif value == 0:
            exponent = -math.inf
        else:
            exponent = math.frexp(value)[1] - 1
        counts[exponent] = counts.get(exponent, 0) + 1
    return counts


def fates(values, scale, dtype):
    """Shares of values that are zero, become zero, lose digits, or overflow under a scale."""
    info = torch.finfo(dtype)
    least = info.tiny * info.eps
    zero = flushed = subnormal = overflow = 0
    for value in values:
        size = abs(value) * scale
        zero += size == 0
        flushed += 0 < size < least / 2
        subnormal += least / 2 <= size < info.tiny
        overflow += not size < 2.0 ** math.ceil(math.log2(info.max))
    return [n / len(values) for n in (zero, flushed, subnormal, overflow)]
