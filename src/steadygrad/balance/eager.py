"""Keeping a function out of compiled graphs."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["eager"]

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a function as it is, also where `torch.compile` reads the code that calls it.

    What it does to buffers and process groups in a backward pass is no part of a graph; the
    compiled code ends before it and goes on after it.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Only here, because it imports the compiler, which takes a second.
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call
