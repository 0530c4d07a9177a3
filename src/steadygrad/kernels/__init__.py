"""Fast twins of the formulas, and the choice among them.

For CPUs there are compiled loops, see :mod:`steadygrad.kernels.cpu`; they need the extra ``cpu``.
For CUDA devices there are Triton kernels, see :mod:`steadygrad.kernels.device`; torch brings Triton
along where it supports it. Elsewhere, while torch compiles a step, and for the few tensors they
cannot take, the multi-tensor path computes the same.
"""

import importlib
import os
import warnings
from functools import cache

import torch

__all__ = [
    "DEVICES",
    "choose_mode",
    "give_up",
    "give_up_device",
    "give_up_silently",
    "missing",
    "missing_on_device",
    "wants_fused",
    "warn_about",
    "warn_once",
    "was_forked",
]

# Where Triton's kernels run.
DEVICES = {"cuda"}

_WARNED: set[str] = set()
# Why compiled loops, and Triton's kernels, are not tried again in this process.
_BROKEN: list[str] = []
_BROKEN_DEVICE: list[str] = []
# The process that read this file, which is always read before there is anything to compile.
_PROCESS = os.getpid()


def was_forked() -> bool:
    """Whether this is a child of the process that loaded this package, without its threads."""
    return os.getpid() != _PROCESS


@cache
def missing() -> str | None:
    """Why there are no compiled loops here; None if there are."""
    try:
        numba = importlib.import_module("numba")
    except Exception as error:
        # Broken installations raise all sorts of things.
        if isinstance(error, ImportError) and error.name == "numba":
            return "numba is not installed"
        return f"numba cannot be loaded ({error})"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else None


@cache
def _missing_packages() -> str | None:
    for name in ("numpy", "triton"):
        try:
            importlib.import_module(name)
        except Exception as error:
            if isinstance(error, ImportError) and error.name == name:
                return f"{name} is not installed"
            return f"{name} cannot be loaded ({error})"
    return None


def missing_on_device() -> str | None:
    """Why there are no kernels for accelerators here; None if there are."""
    return _BROKEN_DEVICE[0] if _BROKEN_DEVICE else _missing_packages()


def wants_fused(foreach: bool | None, fused: bool | None) -> bool:
    """Whether a step is to be fused where it can be."""
    # Torch's own compiler writes kernels of its own.
    return bool(fused or (fused is None and foreach is None)) and not torch.compiler.is_compiling()


def choose_mode(
    optimizer: str, foreach: bool | None, fused: bool | None, *, on_cpu: bool = True
) -> str:
    """How a step is computed.

    Args:
        optimizer: Its class's name, for the warning.
        foreach: The user's wish; None: the best there is.
        fused: The user's wish for a fused kernel; None: the best there is.
        on_cpu: Whether parameters are on the CPU, where others are several times slower.

    Returns:
        ``"fused"``, for the tensors that kernels can take; ``"foreach"`` or ``"single"``.
    """
    if wants_fused(foreach, fused):
        found = _BROKEN[0] if _BROKEN else missing()
        if found is None:
            return "fused"
        if fused or on_cpu:
            warn_once(optimizer, found)
    return "single" if foreach is False else "foreach"


def give_up(optimizer: str, error: Exception) -> None:
    """Leaves compiled loops alone from now on, as they cannot be compiled, and says so once."""
    _BROKEN.append(f"numba cannot compile it ({error})")
    warn_once(optimizer, _BROKEN[0])


def give_up_silently(why: str) -> None:
    """Leaves compiled loops alone from now on; who asks for them is told why."""
    _BROKEN.append(why)


def give_up_device(optimizer: str, error: Exception) -> None:
    """Leaves Triton's kernels alone from now on, as they cannot be compiled, and says so once."""
    _BROKEN_DEVICE.append(f"Triton cannot compile it ({' '.join(str(error).split())[:200]})")
    warn_once(optimizer, _BROKEN_DEVICE[0])


def warn_once(optimizer: str, found: str) -> None:
    """Says that an optimizer does without a fused kernel."""
    _warn(
        optimizer,
        f"Expected a fused kernel for {optimizer}. Found none: {found}. The multi-tensor path is "
        "used. Remedy: pip install 'steadygrad[cpu]' for parameters on a CPU, or triton for "
        "those on a CUDA device; foreach=True chooses that path.",
    )


def warn_about(optimizer: str, parameter: torch.Tensor) -> None:
    """Says that an optimizer has a parameter that compiled loops do not take."""
    what = f"{type(parameter).__name__} of {parameter.dtype} on {parameter.device}"
    _warn(
        optimizer,
        f"Expected dense tensors on the CPU in {optimizer}, with gradients and states alike. Found "
        f"others, the first a {what} with shape {tuple(parameter.shape)} and strides "
        f"{parameter.stride()}. The multi-tensor path takes these. Remedy: foreach=True in a group "
        "of their own says so.",
    )


def _warn(optimizer: str, message: str) -> None:
    if optimizer in _WARNED:
        return
    _WARNED.add(optimizer)
    warnings.warn(message, stacklevel=2)
