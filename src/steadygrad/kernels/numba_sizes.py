"""What ScaledAdam decides between its two passes: sizes, and the factors of the update.

Some numbers for each tensor. They take part in memory that the passes have swept out of the caches:
there a hundred small torch operations cost as much as a tenth of the large ones' time.

Addresses of a tensor: step count (float32), and for tensors with a size its root mean square, the
mean square of the gradients of its logarithm, and the last of these, in the state's type.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit

from steadygrad.formulas.scaled_adam import CORRECTED_BELOW, LARGEST_SIZE_STEP
from steadygrad.kernels.numba_parts import SOURCE, array_at
from steadygrad.kernels.tables import Job, Learn, Number

__all__ = ["scaled_adam_enter", "scaled_adam_learn"]

TENSORS, TENSOR_TABLE, FIELDS = int(Job.TENSORS), int(Job.TENSOR_TABLE), int(Job.FIELDS)
FACTORS, SETTINGS, PLACES = int(Job.FACTORS), int(Job.SETTINGS), len(Job)
UNBIAS, BY_GRADIENT, BY_WEIGHT = (
    int(Number.SECOND_MOMENT),
    int(Number.GRADIENT),
    int(Number.WEIGHT),
)
INNER, SQUARE, ELEMENTS = int(Number.INNER), int(Number.SQUARE), int(Number.ELEMENTS)
NUMBERS, SETTING_COUNT = len(Number), len(Learn)
LR, BETA, EPS = int(Learn.LR), int(Learn.BETA2), int(Learn.EPS)
SCALAR_SCALE, MIN_RMS, MAX_RMS = (
    int(Learn.SCALAR_SCALE),
    int(Learn.MIN_RMS),
    int(Learn.MAX_RMS),
)
PERIOD, ORIGINAL, SCALAR = int(Learn.PERIOD), int(Learn.ORIGINAL), int(Learn.SCALAR)
SCALE = int(Learn.SCALE)


@njit(inline="always")
def tables(data: Any) -> Any:
    """Addresses of small states, numbers for each tensor, settings."""
    job = carray(data, PLACES, np.int64)
    addresses = array_at(job[TENSOR_TABLE], (job[TENSORS], job[FIELDS]), np.int64)
    numbers = array_at(job[FACTORS], (job[TENSORS], NUMBERS), np.float64)
    return addresses, numbers, array_at(job[SETTINGS], SETTING_COUNT, np.float64)


@njit(inline="always")
def enter(row: Any, step: Any, period: Any, value: Any, state: Any) -> None:
    """Enters a size's gradient among the last ones."""
    array_at(row[3 + np.int64(step) % period], 1, state)[0] = value


@njit(inline="always")
def bounded(raw: Any, rms: Any, s: Any) -> Any:
    """No smaller where a parameter is too small already, no larger where it is too large."""
    if rms < s[MIN_RMS]:
        raw = 0.0
    if s[ORIGINAL] != 0.0:
        return -s[LR] * s[SCALAR_SCALE] * s[PERIOD] if rms > s[MAX_RMS] else raw
    raw = min(max(raw, -LARGEST_SIZE_STEP), LARGEST_SIZE_STEP)
    return min(raw, (s[MAX_RMS] - rms) / rms)


@njit(inline="always")
def size_step(row: Any, step: Any, s: Any, state: Any) -> Any:
    """Learns a size from the last gradients, and returns the step that it takes."""
    period, total, squares = np.int64(s[PERIOD]), 0.0, 0.0
    for i in range(period):
        gradient = np.float64(array_at(row[3 + i], 1, state)[0])
        total += gradient
        squares += gradient * gradient
    beta = s[BETA] ** s[PERIOD]
    mean = array_at(row[2], 1, state)
    mean[0] = mean[0] * beta + squares / s[PERIOD] * (1 - beta)
    correction = 1 - beta ** ((np.int64(step) + 1) // period)
    root = math.sqrt(np.float64(mean[0])) + s[EPS]
    raw = -s[LR] * s[SCALAR_SCALE] * math.sqrt(correction) * total / root
    return bounded(raw, np.float64(array_at(row[1], 1, state)[0]), s)


@njit(inline="always")
def learn(row: Any, number: Any, step: Any, s: Any, state: Any) -> Any:
    """A tensor's root mean square and its size step, zero unless it is due."""
    period, rms = np.int64(s[PERIOD]), array_at(row[1], 1, state)
    turn = np.int64(step) % period == period - 1
    if turn or step == 0:
        enter(row, step, period, number[INNER] * s[SCALE], state)
        rms[0] = math.sqrt(number[SQUARE] / number[ELEMENTS])
    # With a period of one the first step is one too many: nothing has been averaged yet.
    size = size_step(row, step, s, state) if turn and step > 0 else 0.0
    return np.float64(rms[0]), size


def scaled_adam_learn(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Learns sizes where that is due, and leaves the factors of the update."""
    source = SOURCE

    def kernel(data: Any) -> None:
        addresses, numbers, s = tables(data)
        original, scalar = s[ORIGINAL] != 0.0, s[SCALAR] != 0.0
        for t in range(len(numbers) + 0 * source):
            row, number = addresses[t], numbers[t]
            step = np.float64(array_at(row[0], 1, np.float32)[0])
            relative, size = s[SCALAR_SCALE], 0.0
            if not scalar:
                rms, size = learn(row, number, step, s, state)
                relative = max(rms, s[MIN_RMS])
            correction = 1 - s[BETA] ** (step + 1)
            corrected = correction < CORRECTED_BELOW or (scalar and original)
            number[UNBIAS] = 1 / correction if corrected else 1.0
            number[BY_GRADIENT], number[BY_WEIGHT] = -s[LR] * relative, size

    return kernel


def scaled_adam_enter(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Enters the inner products, which may have come with the update, and counts the step."""
    source = SOURCE

    def kernel(data: Any) -> None:
        addresses, numbers, s = tables(data)
        for t in range(len(numbers) + 0 * source):
            count = array_at(addresses[t, 0], 1, np.float32)
            if s[SCALAR] == 0.0:
                own = state(numbers[t, INNER] * s[SCALE])
                # One that came late, and whose square would be infinite for good, is left out.
                if math.isfinite(own * own):
                    enter(addresses[t], count[0], np.int64(s[PERIOD]), own, state)
            count[0] += np.float32(1)

    return kernel
