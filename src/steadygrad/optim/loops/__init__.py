"""Compiled loops for CPUs, with the extra ``cpu`` (numba): whether a step can go by them."""

import importlib
import os
import warnings
from collections.abc import Hashable, Sequence
from functools import cache

import torch

from steadygrad.optim.passes import Pass

# Types of gradients, weights, state, and of the parameters that weights are rounded to.
Types = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]

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
    except Exception as error:
        # Broken installations raise all sorts of things.
        if isinstance(error, ImportError) and error.name == "numba":
            return "numba is not installed"
        return f"numba cannot be loaded ({error})"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else None


def why_none() -> str | None:
    """Why there are no compiled loops here; None if there are."""
    return BROKEN.get(ALL) or _why_no_numba()


def prepare(passes: Sequence[Pass], types: Types) -> str | None:
    """Compiles loops before a step begins; why that cannot be for these types, or None."""
    if not all(one.loop for one in passes):
        return "it has none"
    key = tuple(passes), types
    if key not in BROKEN:
        try:
            importlib.import_module("steadygrad.optim.loops.runtime").prepare(passes, types)
        except MemoryError:
            raise
        except Exception as error:
            # A compiler may raise anything on an unknown machine.
            BROKEN[key] = f"it cannot be compiled ({' '.join(str(error).split()):.200})"
    return BROKEN.get(key)


def warn_once(optimizer: str, why: str) -> None:
    """Warns of multi-tensor calls in place of loops, once for each optimizer and reason."""
    if (optimizer, why) not in _WARNED:
        _WARNED.add((optimizer, why))
        warnings.warn(
            f"Expected a fused kernel for {optimizer}. Found none: {why}. Multi-tensor calls are "
            "used. Remedy: pip install 'steadygrad[cpu]', and parameters on a CPU whose data is "
            "contiguous(); foreach=True chooses multi-tensor calls.",
            stacklevel=2,
        )
