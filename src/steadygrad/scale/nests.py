"""Applies a function to every differentiable tensor in what a module takes or returns."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from steadygrad._checks import InputError

__all__ = ["map_differentiable"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def map_differentiable(function: Callable[[Tensor], Tensor], nest: Any, where: str) -> Any:
    """Replaces each tensor that a gradient flows through, and keeps everything else.

    Args:
        function: What to do with such a tensor. One that comes twice is handed in twice.
        nest: Tensors in tuples, lists, dictionaries, data classes and registered pytrees.
        where: What the nest is, for the error.

    Returns:
        A nest of the same form.

    Raises:
        InputError: If a tensor is hidden in an object that cannot be taken apart.
    """

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf) if leaf.requires_grad else leaf
        if isinstance(leaf, _PLAIN):
            return leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _rebuilt(leaf, lambda part: map_differentiable(function, part, where))
        _refuse_hidden(leaf, where)
        return leaf

    return _pytree.tree_map(visit, nest)


def _rebuilt(record: Any, visit: Callable[[Any], Any]) -> Any:
    # Not replace(): it would run __post_init__ again, and needs every field as an argument.
    twin = copy.copy(record)
    for entry in dataclasses.fields(record):
        if hasattr(record, entry.name):
            object.__setattr__(twin, entry.name, visit(getattr(record, entry.name)))
    return twin


def _refuse_hidden(leaf: Any, where: str) -> None:
    for name, value in getattr(leaf, "__dict__", {}).items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise InputError(
                f"Expected tensors in tuples, lists, dictionaries or data classes. Found one in "
                f"{type(leaf).__name__}.{name}, {where}. Remedy: "
                "torch.utils._pytree.register_pytree_node for this class."
            )
