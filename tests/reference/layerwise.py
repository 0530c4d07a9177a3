"""The rules of layer-wise scaling in plain Python."""

import math
from collections import Counter

import torch


def histogram(values):
    """Counts by binary exponent; zeros at -inf, what is not finite at inf."""
    finite = [value for value in values if math.isfinite(value)]
    exponents = [math.frexp(value)[1] - 1 if value else -math.inf for value in finite]
    return Counter(exponents + [math.inf] * (len(values) - len(finite)))


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
