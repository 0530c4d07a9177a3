"""Step counts of many tensors, read and written in one call.

The numbers, float64 with shape ``(tensors)``, are where factors otherwise are.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from steadygrad.kernels.numba_parts import SOURCE, array_at, opened
from steadygrad.kernels.tables import SMALL_STATES

__all__ = ["read_steps", "write_steps"]


def read_steps(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Reads them."""
    source = SOURCE

    def kernel(data: Any) -> None:
        _job, _chunks, table, _sums, steps, _settings = opened(data, 1 + 0 * source)
        for t in range(len(steps)):
            steps[t, 0] = array_at(table[t, SMALL_STATES], 1, np.float32)[0]

    return kernel


def write_steps(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Writes them."""
    source = SOURCE

    def kernel(data: Any) -> None:
        _job, _chunks, table, _sums, steps, _settings = opened(data, 1 + 0 * source)
        for t in range(len(steps)):
            array_at(table[t, SMALL_STATES], 1, np.float32)[0] = steps[t, 0]

    return kernel
