"""Compiled loops for CPUs, with the extra ``cpu`` (numba), and whether a step can go by them.

On a CUDA device: by kernels (:mod:`steadygrad.optim.kernels`), which must have been tried there.
"""

import importlib
import os
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from steadygrad.optim.checks import is_capturing
from steadygrad.optim.passes import BACKENDS, Types, runtime_of

# Why loops are not tried again in this process: by passes and types, or of all of them.
BROKEN: dict[Hashable, str] = {}
# Passes and types whose loops can be taken.
_READY: set[Hashable] = set()
ALL = "all"
# The process that read this file, which is always read before there is anything to compile.
_PROCESS = os.getpid()


def was_forked() -> bool:
    """Whether this is a child of the process that loaded this package, without its threads."""
    return os.getpid() != _PROCESS


@cache
def _why_no(package: str) -> str | None:
    try:
        found = importlib.import_module(package)
    except Exception as error:  # broken installations raise all sorts of things
        if isinstance(error, ImportError) and error.name == package:
            return f"{package} is not installed"
        return f"{package} cannot be loaded ({error})"
    return "NUMBA_DISABLE_JIT is set" if package == "numba" and found.config.DISABLE_JIT else None


def why_none(device: torch.device) -> str | None:
    """Why there are no loops or kernels for a device; None if there are."""
    if device.type not in BACKENDS:
        return f"there are none for {device.type} devices"
    if BACKENDS[device.type] == "kernels":
        return _why_no("triton")
    return BROKEN.get(ALL) or _why_no("numba")


def prepare(optimizer: Any, types: Types, device: torch.device) -> str | None:
    """Compiles loops before a step begins; why that cannot be for these types, or None.

    Kernels take a few steps of an optimizer like this one, and are compared with other ways.
    """
    passes = optimizer._needed(device)
    if not all(one.place(device) for one in passes):
        return "it has none"
    key = tuple(passes), types, device
    if key not in BROKEN and key not in _READY:
        is_kernel = BACKENDS[device.type] == "kernels"
        if is_kernel and is_capturing():
            return f"a CUDA graph records, and kernels have not been tried on {device} before"
        why = None
        try:
            for one in passes:
                runtime_of(device).prepare(one, types, len(optimizer._large), device)
            if is_kernel:
                check = importlib.import_module("steadygrad.optim.kernels.check")
                why = check.difference(optimizer, types, device)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            # A compiler may raise anything on an unknown machine.
            text = " ".join(str(error).split())
            why = f"it cannot be compiled for {device} ({text:.200})"
        if why is None:
            _READY.add(key)
        else:
            BROKEN[key] = why
    return BROKEN.get(key)
