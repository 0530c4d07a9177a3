"""Backends of a step, and the choice among them.

A backend is a module with an optimizer's passes: the formulas themselves by multi-tensor calls,
compiled loops for CPUs (:mod:`steadygrad.kernels.numba`, with the extra ``cpu``), or Triton kernels
for CUDA devices (:mod:`steadygrad.kernels.triton`; torch brings Triton along where it supports it).
All have the same signatures. While torch compiles a step the formulas are taken.
"""

import importlib
import os
import warnings
from collections.abc import Hashable, Sequence
from functools import cache
from types import ModuleType

import torch

from steadygrad.kernels.table import PointerTable, Types

__all__ = [
    "BACKENDS",
    "BROKEN",
    "GAPS",
    "KernelError",
    "backend_of",
    "missing",
    "prepare",
    "table_for",
    "wants_fused",
    "warn_once",
    "was_forked",
]

# The package of kernels for each type of device, and what it needs.
BACKENDS = {"cpu": "numba", "cuda": "triton"}
_NEEDED = {"numba": ("numba",), "triton": ("numpy", "triton")}

# Why kernels are not tried again in this process, by optimizer, type of device and set of types; or
# by type of device, where it is all of them.
BROKEN: dict[Hashable, str] = {}
# A layout that kernels cannot take though it is easily changed.
GAPS = "elements with gaps between them"
# Optimizer and reason of each warning given.
_WARNED: set[tuple[str, str]] = set()
# The process that read this file, which is always read before there is anything to compile.
_PROCESS = os.getpid()


class KernelError(RuntimeError):
    """A kernel cannot be compiled here."""


def was_forked() -> bool:
    """Whether this is a child of the process that loaded this package, without its threads."""
    return os.getpid() != _PROCESS


def wants_fused(foreach: bool | None, fused: bool | None, device_type: str) -> bool:
    """Whether a step is to be fused where it can be."""
    # On other devices only where asked for: kernels have not been timed beside multi-tensor calls.
    default = fused is None and foreach is None and device_type == "cpu"
    # Torch's own compiler writes kernels of its own.
    return bool(fused or default) and not torch.compiler.is_compiling()


@cache
def _missing_package(backend: str) -> str | None:
    for name in _NEEDED[backend]:
        try:
            package = importlib.import_module(name)
        except Exception as error:
            # Broken installations raise all sorts of things.
            if isinstance(error, ImportError) and error.name == name:
                return f"{name} is not installed"
            return f"{name} cannot be loaded ({error})"
        if name == "numba" and package.config.DISABLE_JIT:
            return "NUMBA_DISABLE_JIT is set"
    return None


def missing(device_type: str) -> str | None:
    """Why there are no kernels for a type of device; None if there are."""
    if device_type not in BACKENDS:
        return f"there are none for {device_type} devices"
    return BROKEN.get(device_type) or _missing_package(BACKENDS[device_type])


def backend_of(formulas: ModuleType, device_type: str) -> ModuleType:
    """The module of an optimizer's passes as kernels for a type of device.

    Args:
        formulas: The module of its passes by multi-tensor calls, which has the same name.
        device_type: Type of the device, for which there are kernels.
    """
    return _module(device_type, formulas.__name__.rpartition(".")[2])


def _module(device_type: str, name: str) -> ModuleType:
    return importlib.import_module(f"steadygrad.kernels.{BACKENDS[device_type]}.{name}")


def prepare(formulas: ModuleType, device: torch.device, types: Types, states: int) -> str | None:
    """Compiles an optimizer's kernels, so that a failure to compile shows before a step begins.

    Errors of the device, such as a lack of memory, are passed on: they say nothing about kernels.

    Returns:
        Why they cannot be compiled for these types; None if they can.
    """
    key = formulas.__name__, device.type, types
    if key not in BROKEN:
        passes = backend_of(formulas, device.type).PASSES
        try:
            _module(device.type, "runtime").prepare(passes, types, states, device)
        except KernelError as error:
            BROKEN[key] = f"it cannot be compiled ({error})"
    return BROKEN.get(key)


def table_for(
    device: torch.device, sizes: Sequence[int], types: Types, states: int
) -> PointerTable:
    """A table of pointers for the kernels of a device.

    Args:
        device: The device.
        sizes: Elements of each tensor.
        types: Types of gradients, weights, states and parameters.
        states: Number of large states.
    """
    table: PointerTable = _module(device.type, "runtime").Table(sizes, types, states, device)
    return table


def warn_once(optimizer: str, why: str, parameter: torch.Tensor | None = None) -> None:
    """Warns of multi-tensor calls in place of kernels, once for each optimizer and reason.

    Args:
        optimizer: Name of the optimizer.
        why: Why there are no kernels.
        parameter: The parameter that they cannot take; None: there are none at all.
    """
    has_gaps = why.startswith(GAPS)
    if (key := (optimizer, GAPS if has_gaps else why)) in _WARNED:
        return
    _WARNED.add(key)
    if parameter is None:
        message = (
            f"Expected a fused kernel for {optimizer}. Found none: {why}. Multi-tensor calls are "
            "used. Remedy: pip install 'steadygrad[cpu]' for parameters on a CPU, or triton for "
            "those on a CUDA device; foreach=True chooses multi-tensor calls."
        )
    else:
        contiguous = "parameter.data = parameter.data.contiguous() before the optimizer is built"
        remedy = contiguous if has_gaps else "dense tensors of floating types"
        message = (
            f"Expected parameters that fused kernels can take in {optimizer}. Found {why} in one "
            f"of {parameter.dtype} with shape {tuple(parameter.shape)}; multi-tensor calls work on "
            f"it. Remedy: {remedy}, or foreach=True in a group of their own."
        )
    warnings.warn(message, stacklevel=2)
