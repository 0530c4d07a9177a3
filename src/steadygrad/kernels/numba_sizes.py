"""What ScaledAdam decides between its two passes: sizes, and the factors of the update.

Small states of a tensor: its step count (float32), and for one with a size its root mean square,
the mean square of the gradients of its logarithm, and the last of these, in the state's type.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from steadygrad.formulas.scaled_adam import CORRECTED_BELOW, LARGEST_SIZE_STEP
from steadygrad.kernels.numba_parts import SOURCE, array_at, opened
from steadygrad.kernels.tables import COLUMNS, SMALL_STATES, Number, Setting

__all__ = ["scaled_adam_enter", "scaled_adam_learn"]

STEP, RMS = SMALL_STATES, SMALL_STATES + 1
MEAN_SQUARE, GRADIENTS = SMALL_STATES + 2, SMALL_STATES + 3
UNBIAS, BY_GRADIENT = int(Number.SECOND_MOMENT), int(Number.GRADIENT)
BY_WEIGHT, EARLY = int(Number.WEIGHT), int(Number.EARLY)
INNER, SQUARE, ELEMENTS = int(Number.INNER), int(Number.SQUARE), int(Number.ELEMENTS)
LR, BETA, EPS = int(Setting.LR), int(Setting.BETA2), int(Setting.EPS)
SCALAR_SCALE, MIN_RMS = int(Setting.SCALAR_SCALE), int(Setting.MIN_RMS)
MAX_RMS, PERIOD = int(Setting.MAX_RMS), int(Setting.PERIOD)
ORIGINAL, SCALAR = int(Setting.ORIGINAL), int(Setting.SCALAR)
SHARED, SCALE = int(Setting.SHARED), int(Setting.SIZE_SCALE)

# In place of a one: an inner product was not finite when it came, and the next is looked at early.
UNSURE = 2.0


@njit(inline="always")
def due(step: Any, s: Any) -> Any:
    """Whether a step needs inner products before it moves anything."""
    if s[SCALAR] != 0.0:
        return False
    period = np.int64(s[PERIOD])
    turn = np.int64(step) % period == period - 1
    return turn or step == 0 or s[SHARED] != 0.0


@njit(inline="always")
def enter(row: Any, step: Any, period: Any, value: Any, state: Any) -> None:
    """Enters a size's gradient among the last ones."""
    array_at(row[GRADIENTS + np.int64(step) % period], 1, state)[0] = value


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
        gradient = np.float64(array_at(row[GRADIENTS + i], 1, state)[0])
        total += gradient
        squares += gradient * gradient
    beta = s[BETA] ** s[PERIOD]
    mean = array_at(row[MEAN_SQUARE], 1, state)
    mean[0] = mean[0] * beta + squares / s[PERIOD] * (1 - beta)
    correction = 1 - beta ** ((np.int64(step) + 1) // period)
    root = math.sqrt(np.float64(mean[0])) + s[EPS]
    raw = -s[LR] * s[SCALAR_SCALE] * math.sqrt(correction) * total / root
    return bounded(raw, np.float64(array_at(row[RMS], 1, state)[0]), s)


@njit(inline="always")
def learn(row: Any, number: Any, step: Any, s: Any, state: Any) -> Any:
    """A tensor's root mean square and its size step, zero unless it is due."""
    period, rms = np.int64(s[PERIOD]), array_at(row[RMS], 1, state)
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
        _job, _chunks, addresses, _sums, numbers, s = opened(data, COLUMNS + 0 * source)
        original, scalar = s[ORIGINAL] != 0.0, s[SCALAR] != 0.0
        for t in range(len(numbers)):
            row, number = addresses[t], numbers[t]
            step = np.float64(array_at(row[STEP], 1, np.float32)[0])
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
    """Enters the inner products, which may have come with the update, and counts the step.

    Says to the next first pass what to take.
    """
    source = SOURCE

    def kernel(data: Any) -> None:
        _job, chunks, addresses, sums, numbers, s = opened(data, COLUMNS + 0 * source)
        for c in range(len(chunks)):
            number = numbers[chunks[c, 0]]
            if number[EARLY] == 0.0:
                # The first of a tensor's chunks has the first of its elements.
                number[INNER] = sums[c, 1] + (number[INNER] if chunks[c, 1] > 0 else 0.0)
        for t in range(len(numbers)):
            count, number = array_at(addresses[t, STEP], 1, np.float32), numbers[t]
            own, step = state(number[INNER] * s[SCALE]), count[0]
            count[0] += np.float32(1)
            number[EARLY] = 1.0 if due(count[0], s) else 0.0
            if s[SCALAR] == 0.0:
                # One that came late, and whose square would be infinite for good, is left out.
                if math.isfinite(own * own):
                    enter(addresses[t], step, np.int64(s[PERIOD]), own, state)
                else:
                    number[EARLY] = UNSURE

    return kernel
