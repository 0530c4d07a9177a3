"""Compiled loops for CPUs, with the extra ``cpu`` (numba), and whether a step can go by them.

Or by kernels, where its parameters are on a CUDA device: :mod:`steadygrad.optim.kernels`.
"""

import importlib
import os
import warnings
from collections.abc import Hashable, Sequence
from functools import cache

import torch

from steadygrad._checks import install
from steadygrad.optim.passes import BACKENDS, Pass, Types, runtime_of

# Why loops are not tried again in this process: by passes and types, or of all of them.
BROKEN: dict[Hashable, str] = {}
ALL = "all"
# Optimizer and reason of each warning given.
_WARNED: set[tuple[str, str]] = set()
# The process that read this file, which is always read before there is anything to compile.
_PROCESS = os.getpid()


def was_forked() -> bool:
    """Whether this is a child of the process that loaded this package, without its threads."""
    return os.getpid() != _PROCESS


@cache
def _why_no_numba() -> str | None:
    try:
        numba = importlib.import_module("numba")
    except Exception as error:  # broken installations raise all sorts of things
        if isinstance(error, ImportError) and error.name == "numba":
            return "numba is not installed"
        return f"numba cannot be loaded ({error})"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else None


def why_none(device: torch.device) -> str | None:
    """Why there are no loops or kernels for a device; None if there are."""
    if device.type not in BACKENDS:
        return f"there are none for {device.type} devices"
    return BROKEN.get(ALL) or _why_no_numba() if BACKENDS[device.type] == "loops" else None


def prepare(passes: Sequence[Pass], types: Types, states: int, device: torch.device) -> str | None:
    """Compiles loops before a step begins; why that cannot be for these types, or None."""
    if not all(one.place(device) for one in passes):
        return "it has none"
    key = tuple(passes), types, device
    if key not in BROKEN:
        try:
            runtime_of(device).prepare(passes, types, states, device)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            # A compiler may raise anything on an unknown machine.
            text = " ".join(str(error).split())
            BROKEN[key] = f"it cannot be compiled for {device} ({text:.200})"
    return BROKEN.get(key)


def warn_once(optimizer: str, why: str) -> None:
    """Warns of multi-tensor calls in place of loops, once for each optimizer and reason."""
    if (optimizer, why) not in _WARNED:
        _WARNED.add((optimizer, why))
        warnings.warn(
            f"Expected a fused kernel for {optimizer}. Found none: {why}. Multi-tensor calls are "
            f"used. Remedy: contiguous() data, triton on CUDA devices, numba on a CPU: "
            f"{install('cpu')}; foreach=True chooses multi-tensor calls.",
            stacklevel=2,
        )
