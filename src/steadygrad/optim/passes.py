"""Passes over all elements of a batch of parameters: what a rule is made of.

A rule alternates between arithmetic on columns, with one number for each parameter, and passes. A
pass is a function of multi-tensor calls. It may have a compiled loop that does the same on CPUs
(:mod:`steadygrad.optim.loops`), and a kernel for CUDA devices (:mod:`steadygrad.optim.kernels`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.numerics import exact, wide
from steadygrad.optim.buckets import Bucket
from steadygrad.optim.codes import least_ratio

if TYPE_CHECKING:
    from steadygrad.optim.batch import ParamBatch


# Types of gradients, weights, state, of the parameters that weights are rounded to, and of sums.
Types = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype]
# What works on devices of a type, besides multi-tensor calls.
BACKENDS = {"cpu": "loops", "cuda": "kernels"}
# NumPy's types of columns.
ARRAYS = {torch.float32: np.float32, torch.float64: np.float64}


# Of a bucket, factors in columns, and the options that all parameters share, to sums with shape
# `(rows, tensors of the bucket)`.
BucketPass = Callable[[Bucket, Any, Any], Tensor | None]


@dataclass(eq=False)
class Pass:
    """A pass over all elements, however it is computed."""

    function: BucketPass  # by multi-tensor calls
    rows: int = 0  # sums that it leaves for each parameter
    loop: str = ""  # where the maker of its compiled loop is, "module:name"; empty: it has none
    constants: tuple[Any, ...] = ()  # what else the maker is given
    kernel: str = ""  # where its kernel is, "module:name"; empty: it has none
    columns: int = 0  # factors that the kernel is given

    def __call__(self, batch: "ParamBatch", by: Any = (), options: Any = ()) -> Any:
        """Goes over all parameters of a batch.

        Args:
            batch: The parameters.
            by: Factors, each with shape ``(tensors)``; the first says who takes part.
            options: Numbers that hold for all of them.

        Returns:
            This process's sums, with shape ``(rows, tensors)``; None without rows.
        """
        if batch.tables:
            columns = (*by, *(() if batch.seeds is None else batch.seeds)) if len(by) else ()
            return runtime_of(batch.device).run(self, batch, columns, options)
        parts: list[Any] = []
        for places, lengths in batch.buckets:
            if any(batch.grads[i] is not None for i in places):
                parts.append(self.function(Bucket(batch, places, lengths), by, options))
            else:
                dtype, shape = wide(batch.weights[0].dtype), (self.rows, len(places))
                parts.append(torch.zeros(shape, dtype=dtype, device=batch.device))
        if not self.rows:
            return None
        sums = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return sums if batch.order is None else sums.index_select(1, batch.order)

    def place(self, device: torch.device) -> str:
        """Place of its loop or kernel for a device; empty: it has none."""
        return {"loops": self.loop, "kernels": self.kernel}.get(BACKENDS.get(device.type, ""), "")


def named(place: str) -> Any:
    """The function at a place, ``"module:name"``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def runtime_of(device: torch.device) -> Any:
    """The module that starts loops, which needs numba, or kernels, which needs Triton."""
    return import_module(f"steadygrad.optim.{BACKENDS[device.type]}.runtime")


# Arithmetic on columns: tensors, or arrays of NumPy's where loops work on the host, as an operation
# of its on a few numbers costs a quarter of one of torch's. Loops have a counterpart of some of it
# on numbers.


def library_of(column: Any) -> Any:
    """The library whose functions a column is for: torch or NumPy."""
    return torch if isinstance(column, Tensor) else np


def root(x: Any) -> Any:
    """Square root."""
    return library_of(x).sqrt(x)


def rounded_root(x: Any) -> Any:
    """Square root to the last digit, by which vectorised ones of float32 are off now and then."""
    if not isinstance(x, Tensor):
        return np.sqrt(x)
    return x.to(exact(x.device), copy=True).sqrt_().to(x.dtype)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """The number between two bounds that is nearest."""
    return x.clip(low, high)


def where(flag: Any, first: Any, second: Any) -> Any:
    """The first number where a flag holds, else the second."""
    return library_of(flag).where(flag, first, second)


def inverse(x: Any) -> Any:
    """One over a number."""
    return library_of(x).reciprocal(x)


def counted(row: Any) -> Any:
    """Places along the last axis of a column, from zero."""
    count = row.shape[-1]
    return torch.arange(count, device=row.device) if isinstance(row, Tensor) else np.arange(count)


def tensor_of(column: Any) -> Tensor:
    """A column as a tensor."""
    return column if isinstance(column, Tensor) else torch.from_numpy(np.asarray(column))


def cast(x: Any, dtype: Any) -> Any:
    """A column in another type: torch's, or that of another column."""
    return x.to(dtype) if isinstance(x, Tensor) else x.astype(ARRAYS.get(dtype, dtype), copy=False)


def decays_of(bucket: Bucket, betas: Iterable[float], taken: Tensor) -> list[Tensor]:
    """Factors on averages, each ``beta`` where an element takes the step, else one."""
    dtype = bucket.moments[0].dtype
    return [torch.ones_like(taken, dtype=dtype).masked_fill_(taken, beta) for beta in betas]


def average(bucket: Bucket, gradient: Tensor, betas: tuple[float, float], taken: Tensor) -> None:
    """Moves the averages of gradients and of their squares, the bucket's first two large states.

    The gradient is zero where an element does not take the step.
    """
    m, v = bucket.moments[:2]
    decay1, decay2 = decays_of(bucket, betas, taken)
    m.mul_(decay1)
    v.mul_(decay2)
    if bucket.is_exact:
        m.add_(gradient * (1 - betas[0]))
    else:
        m.add_(gradient, alpha=1 - betas[0])
    add_squares(bucket, v, gradient, 1 - betas[1])


def add_squares(bucket: Bucket, total: Tensor, more: Tensor, factor: float) -> None:
    """Adds squares of a tensor, times a factor."""
    if bucket.is_exact:
        total.add_((more * more).mul_(factor))
    else:
        total.addcmul_(more, more, value=factor)


def second_moment(bucket: Bucket, betas: tuple[float, float]) -> Tensor:
    """Second moment that a step goes by: not too small for the codes, or for the first one."""
    m, v = bucket.moments[:2]
    if not bucket.coded:
        return v
    least = (m * m).mul_(least_ratio(*betas))
    return torch.maximum(torch.maximum(least, bucket.floors(), out=least), v, out=least)


def move_by(bucket: Bucket, keep: Tensor, step: Tensor) -> None:
    """Moves weights of any floating type: times a factor, less a step."""
    weights = bucket.weights
    if weights.dtype == step.dtype:
        weights.mul_(keep).sub_(step)
    else:
        # Rounded to the weight's type once, not after each operation.
        work = torch.promote_types(weights.dtype, step.dtype)
        weights.copy_(weights.to(work).mul_(keep).sub_(step))
    bucket.keep_weights()


def sync_masters(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Copies values that were written to parameters into their masters, element by element.

    When other code writes to 16-bit weights (a checkpoint is loaded, an average is swapped in for
    an evaluation and out again), their masters must follow. Where a weight no longer equals its
    rounded master, the master takes its value; elsewhere it keeps all its digits. torch's version
    counters cannot replace the comparison: writes through ``parameter.data`` do not change them.
    """
    for own, master in zip(parameters, masters, strict=True):
        # Bits, because the CPU compares integers much faster than 16-bit floats.
        unchanged = master.to(own.dtype).view(torch.int16) == own.view(torch.int16)
        # Written in place: less memory at a time than the two temporaries of a step.
        torch.where(unchanged, master, own, out=master)


# Squared norms of gradients, by which a step is taken or not, in one row.
grad_sq_norms = Pass(
    lambda bucket, by, options: bucket.grad_squares()[None],
    1,
    "steadygrad.optim.loops.scaled_adam:sums_kernel",
    kernel="steadygrad.optim.kernels.scaled_adam:sums",
)


def addresses_of(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Address of each tensor's memory."""
    # Without a loop in Python: there are thousands of them a step.
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def check_memory(
    addresses: NDArray[np.int64], lengths: NDArray[np.int64], has_grad: NDArray[np.bool_]
) -> None:
    """Raises InputError if a tensor was freed; of rows of addresses, a gradient's the first."""
    if addresses.all():
        return
    freed = (addresses == 0) & (lengths > 0)[:, None]
    freed[:, 0] &= has_grad
    if freed.any():
        raise InputError(
            "Expected parameters, gradients and states with memory. Found one that was freed. "
            "Remedy: give it memory again before the step, or set a gradient to None."
        )
