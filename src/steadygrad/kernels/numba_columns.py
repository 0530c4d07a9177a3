"""Small states of many tensors, such as their step counts, read and written in one call.

A field of the table is the address of one number; the first is of float32, others of the state's
type. The matrix, float64 with shape ``(fields, tensors)``, is where factors otherwise are.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from steadygrad.kernels.numba_parts import SOURCE, array_at
from steadygrad.kernels.tables import Job

__all__ = ["gather", "scatter"]

TENSORS, TENSOR_TABLE, FIELDS = int(Job.TENSORS), int(Job.TENSOR_TABLE), int(Job.FIELDS)
FACTORS, PLACES = int(Job.FACTORS), len(Job)


def gather(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Reads the numbers."""
    source = SOURCE

    def kernel(data: Any) -> None:
        job = carray(data, PLACES, np.int64)
        tensors, fields = job[TENSORS] + 0 * source, job[FIELDS]
        table = array_at(job[TENSOR_TABLE], (tensors, fields), np.int64)
        matrix = array_at(job[FACTORS], (fields, tensors), np.float64)
        for t in range(tensors):
            matrix[0, t] = array_at(table[t, 0], 1, np.float32)[0]
            for f in range(1, fields):
                matrix[f, t] = array_at(table[t, f], 1, state)[0]

    return kernel


def scatter(grad: Any, weight: Any, state: Any, parameter: Any) -> Callable[[Any], None]:
    """Writes them."""
    source = SOURCE

    def kernel(data: Any) -> None:
        job = carray(data, PLACES, np.int64)
        tensors, fields = job[TENSORS] + 0 * source, job[FIELDS]
        table = array_at(job[TENSOR_TABLE], (tensors, fields), np.int64)
        matrix = array_at(job[FACTORS], (fields, tensors), np.float64)
        for t in range(tensors):
            array_at(table[t, 0], 1, np.float32)[0] = matrix[0, t]
            for f in range(1, fields):
                array_at(table[t, f], 1, state)[0] = matrix[f, t]

    return kernel
