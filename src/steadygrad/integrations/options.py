"""Options that adapters hand over to :class:`NoiseScale`, checked before training begins."""

import dis
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from steadygrad._checks import InputError, check_count
from steadygrad.noise import NoiseScale

__all__ = ["check_noise_options", "reads", "sample_counter"]


def sample_counter(samples: Callable[[Any], int] | int) -> Callable[[Any], int]:
    """A function from a micro-batch to its number of samples.

    Raises:
        InputError: If it is neither a function nor a positive number.
    """
    if callable(samples):
        return samples
    count = check_count("samples", samples)
    return lambda batch: count


def check_noise_options(options: Mapping[str, Any], own: Iterable[str]) -> None:
    """Checks the names of options.

    Args:
        options: Options of :class:`NoiseScale`.
        own: Options that the adapter sets.

    Raises:
        InputError: If one is not known.
    """
    known = {*inspect.signature(NoiseScale).parameters} - {"model", *own}
    for name in options:
        if name not in known:
            raise InputError(
                f"Expected options of NoiseScale: {', '.join(sorted(known))}. Found {name!r}. "
                "Remedy: another name, or leave it out."
            )


def reads(function: Callable[..., Any], name: str) -> bool:
    """Whether a function's code reads an argument; True where that cannot be seen."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or (code.co_flags & inspect.CO_VARKEYWORDS and name not in code.co_varnames):
        return True
    loads = (step.argrepr for step in dis.get_instructions(code) if "LOAD" in step.opname)
    return name in code.co_cellvars or any(name in text.split(", ") for text in loads)
