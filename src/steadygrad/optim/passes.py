"""Passes over all elements of a batch of parameters: what a rule is made of.

A rule alternates between arithmetic on columns, with one number for each parameter, and passes. A
pass is a function of multi-tensor calls. It may have a compiled loop that does the same on CPUs
(:mod:`steadygrad.optim.loops`), and a kernel for CUDA devices (:mod:`steadygrad.optim.kernels`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.numerics import exact, square_sums, wide
from steadygrad.optim.codes import CODES, decode, encode, floors, least_ratio

if TYPE_CHECKING:
    from steadygrad.optim.batch import ParamBatch


# Types of gradients, weights, state, of the parameters that weights are rounded to, and of sums.
Types = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype]
# What works on devices of a type, besides multi-tensor calls.
BACKENDS = {"cpu": "loops", "cuda": "kernels"}


@dataclass(frozen=True)
class Codes:
    """Scales, rows and random bits of moments that are codes: :mod:`steadygrad.optim.codes`."""

    exponents: tuple[list[Tensor], ...]  # of their scales, like the moments
    rows: list[int]  # elements of a row of each parameter
    seeds: Tensor  # random bits of the batch's parameters, `(2, tensors)`


@dataclass(frozen=True)
class Bucket:
    """Some parameters of a batch that one multi-tensor call works on, each with a gradient."""

    places: list[int]  # in the batch
    weights: list[Tensor]  # local, or the float32 masters of 16-bit ones
    grads: list[Tensor]  # local, in any floating type
    moments: tuple[list[Tensor], ...]  # local large states, all in one type
    sum_dtype: torch.dtype  # of sums over elements
    inverse_scale: Tensor | None = None  # on every gradient that is read
    codes: "Codes | None" = None  # None: the moments are numbers

    @property
    def is_exact(self) -> bool:
        """Whether each operation is rounded, as compiled loops do: both come to the same codes.

        Torch's own calls may take a product and a sum in one.
        """
        return self.sum_dtype != wide(self.weights[0].dtype)

    def decoded(self) -> "Bucket":
        """This bucket with moments in float32, which are copies where they are codes."""
        assert self.codes is not None
        kinds = zip(self.moments, self.codes.exponents, CODES, strict=True)
        moments = [
            [decode(*one, code) for one in zip(own, exponents, self.codes.rows, strict=True)]
            for own, exponents, code in kinds
        ]
        return replace(self, moments=tuple(moments))

    def write(self, moments: Sequence[Sequence[Tensor]], taken: Tensor) -> None:
        """Rounds moments to their codes, of parameters that take the step."""
        assert self.codes is not None
        ok, *columns = self.pick((taken, *self.codes.seeds), torch.int64)
        seeds = [*zip(*columns, strict=True)]
        kinds = zip(self.moments, self.codes.exponents, moments, CODES, strict=True)
        for own, exponents, new, code in kinds:
            given = zip(own, exponents, new, self.codes.rows, ok, seeds, strict=True)
            for old, scale, numbers, row, is_taken, seed in given:
                pair = encode(numbers, seed, row, code)
                old.copy_(torch.where(is_taken, pair[0], old))
                scale.copy_(torch.where(is_taken, pair[1].view_as(scale), scale))

    def floors(self) -> list[Tensor]:
        """Least second moments to go by; none where moments are numbers."""
        if self.codes is None:
            return []
        given = zip(self.codes.exponents[1], self.weights, self.codes.rows, strict=True)
        return [floors(exponents, weight.shape, row) for exponents, weight, row in given]

    def unscaled(self) -> list[Tensor]:
        """Gradients without their loss scale, in float32 at least; as they are if there is none."""
        if self.inverse_scale is None:
            return self.grads
        types = [wide(g.dtype) for g in self.grads]
        return [
            g.to(dtype) * self.inverse_scale.to(dtype)
            for g, dtype in zip(self.grads, types, strict=True)
        ]

    def sanitized(self, taken: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Copies of gradients without their loss scale; zeros where the step is not taken.

        Decided on the device: the host does not wait to learn which.
        """
        pairs = zip(self.unscaled(), taken, strict=True)
        if self.inverse_scale is not None:
            return [g.masked_fill_(~ok, 0.0).to(dtype) for g, ok in pairs]
        return [
            torch.where(ok, g, 0.0)
            if g.dtype == dtype
            else g.to(dtype, copy=True).masked_fill_(~ok, 0.0)
            for g, ok in pairs
        ]

    def pick(self, columns: Iterable[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
        """Entries of these parameters in columns ``(tensors)``, as scalars."""
        first, stop, entries = min(self.places), max(self.places) + 1, []
        for column in columns:
            # Unbinds the range of this bucket only: there may be as many buckets as parameters.
            part = column[first:stop]
            values = (part if part.dtype is torch.bool else part.to(dtype)).unbind()
            entries.append([values[i - first] for i in self.places])
        return entries


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
    writes: bool = False  # whether it moves moments that are codes
    in_waves: bool = False  # whether its loop takes two turns at a few tensors, then at the next

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
            given = batch.tables, self, columns, options, batch.sum_dtype, batch.inverse_scale
            return runtime_of(batch.device).run(*given)
        parts = []
        for bucket in batch.buckets:
            numbers = bucket if bucket.codes is None else bucket.decoded()
            parts.append((bucket.places, self.function(numbers, by, options)))
            if self.writes and bucket.codes is not None:
                bucket.write(numbers.moments, by[0])
        return joined(batch.weights, parts, self.rows) if self.rows else None

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


def joined(weights: Sequence[Tensor], parts: Sequence[tuple[list[int], Any]], rows: int) -> Tensor:
    """Sums of buckets, each with its places and ``(rows, places)``, as columns of a batch.

    Zeros for parameters that took no part.
    """
    places = [i for own, _ in parts for i in own]
    if places == [*range(len(weights))]:
        return torch.cat([sums for _, sums in parts], dim=1)
    dtype = parts[0][1].dtype if parts else wide(weights[0].dtype)
    zero = torch.zeros(rows, dtype=dtype, device=weights[0].device)
    # Stacked, because an index by a list would be copied to the device and waited for.
    columns = {i: sums[:, k] for own, sums in parts for k, i in enumerate(own)}
    return torch.stack([columns.get(i, zero) for i in range(len(weights))], dim=1)


# Arithmetic on columns for which compiled loops have a counterpart on numbers.


def root(x: Any) -> Any:
    """Square root."""
    return x.sqrt()


def clamp(x: Any, low: Any, high: Any) -> Any:
    """The number between two bounds that is nearest."""
    return x.clamp(low, high)


def where(flag: Any, first: Any, second: Any) -> Any:
    """The first number where a flag holds, else the second."""
    return torch.where(flag, first, second)


def sum_type(bucket: Bucket) -> torch.dtype:
    """The wider type of its weights and states."""
    return torch.promote_types(bucket.weights[0].dtype, bucket.moments[0][0].dtype)


def decays_of(bucket: Bucket, betas: Iterable[float], taken: Tensor) -> list[list[Tensor]]:
    """Factors on averages: each ``beta`` where a parameter takes the step, else one."""
    dtype = bucket.moments[0][0].dtype
    rest = torch.ones(taken.shape, dtype=dtype, device=taken.device)
    columns = [torch.where(taken, torch.full_like(rest, beta), rest) for beta in betas]
    return bucket.pick(columns, dtype)


def average(
    bucket: Bucket, gradients: list[Tensor], betas: tuple[float, float], taken: Tensor
) -> None:
    """Moves the averages of gradients and of their squares, the bucket's first two large states.

    The gradients are zeros where a parameter does not take the step.
    """
    m, v = bucket.moments[:2]
    # A parameter that skips the step keeps its averages: the decay is 1, and zero is added.
    decay1, decay2 = decays_of(bucket, betas, taken)
    torch._foreach_mul_(m, decay1)
    torch._foreach_mul_(v, decay2)
    if bucket.is_exact:
        torch._foreach_add_(m, torch._foreach_mul(gradients, 1 - betas[0]))
    else:
        torch._foreach_add_(m, gradients, alpha=1 - betas[0])
    add_squares(bucket, v, gradients, 1 - betas[1])


def add_squares(bucket: Bucket, sums: list[Tensor], more: list[Tensor], factor: float) -> None:
    """Adds squares of tensors, times a factor."""
    if bucket.is_exact:
        squares = torch._foreach_mul(more, more)
        torch._foreach_mul_(squares, factor)
        torch._foreach_add_(sums, squares)
    else:
        torch._foreach_addcmul_(sums, more, more, value=factor)


def roots(bucket: Bucket, tensors: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    """Square roots."""
    if not bucket.is_exact:
        return list(torch._foreach_sqrt(tensors))
    # Vectorised roots in float32 are off by a last digit now and then.
    return [t.to(exact(t.device)).sqrt_().to(t.dtype) for t in tensors]


def second_moments(bucket: Bucket, betas: tuple[float, float]) -> list[Tensor]:
    """Second moments that a step goes by: not too small for the codes, or for the first ones."""
    if bucket.codes is None:
        return bucket.moments[1]
    least = torch._foreach_mul(bucket.moments[0], bucket.moments[0])
    torch._foreach_mul_(least, least_ratio(*betas))
    torch._foreach_maximum_(least, bucket.floors())
    torch._foreach_maximum_(least, bucket.moments[1])
    return list(least)


def moved_by(weights: list[Tensor], keep: list[Tensor], steps: list[Tensor]) -> None:
    """Moves weights of any floating type: each times a factor, less a step in the state's type."""
    if weights[0].dtype == steps[0].dtype:
        torch._foreach_mul_(weights, keep)
        torch._foreach_sub_(weights, steps)
        return
    for weight, factor, step in zip(weights, keep, steps, strict=True):
        # Rounded to the weight's type once, not after each operation.
        work = torch.promote_types(weight.dtype, step.dtype)
        weight.copy_(weight.to(work).mul_(factor).sub_(step))


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


def _grad_sq_norms(bucket: Bucket, by: tuple[()], options: tuple[()]) -> Tensor:
    return square_sums(bucket.unscaled(), bucket.sum_dtype)[None]


# Squared norms of gradients, by which a step is taken or not, in one row.
grad_sq_norms = Pass(
    _grad_sq_norms,
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
