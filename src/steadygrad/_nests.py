"""Walks over the tensors in a module's inputs and outputs; one policy for every tool.

A nest is a tensor, or tensors in dicts, lists, tuples, named tuples, dataclasses (Hugging Face's
outputs are dataclasses) and classes that are registered with torch's pytree.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from steadygrad._checks import InputError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SEQUENCES = (tuple, list, set, frozenset, deque)
# How deep to search the containers in an object that cannot be taken apart.
_DEPTH = 3


def tree_map_tensors(function: Callable[[Tensor], Tensor], nest: Any, where: str) -> Any:
    """Replaces each tensor that requires a gradient, and keeps everything else.

    Args:
        function: Gives the replacement. It is called twice for a tensor that occurs twice.
        nest: The nest.
        where: Name of the nest, for the error.

    Returns:
        A nest of the same form; ``nest`` itself if no tensor was replaced.

    Raises:
        InputError: If a tensor that requires a gradient is in an object that cannot be taken apart.
    """
    if isinstance(nest, Tensor):
        return function(nest) if nest.requires_grad else nest
    replaced = False

    def visit(leaf: Any) -> Any:
        nonlocal replaced
        if isinstance(leaf, Tensor):
            new = function(leaf) if leaf.requires_grad else leaf
            replaced = replaced or new is not leaf
            return new
        if isinstance(leaf, _PLAIN):
            return leaf
        if _is_record(leaf):
            return _rebuild_record(leaf, walk)
        if isinstance(leaf, tuple) and hasattr(leaf, "_fields"):
            # A subclass of a named tuple, as torch's PackedSequence is.
            return tuple.__new__(type(leaf), [walk(part) for part in leaf])
        _refuse_hidden(leaf, where)
        return leaf

    def walk(part: Any) -> Any:
        return _pytree.tree_map(visit, part)

    rebuilt = walk(nest)
    return rebuilt if replaced else nest


def tree_tensors(nest: Any, where: str) -> list[Tensor]:
    """Collects the tensors that require a gradient, each once, in the nest's order.

    Raises InputError, with the nest's name, if such a tensor is in an object that cannot be taken
    apart.
    """
    tensors: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        return tensors.setdefault(id(tensor), tensor)

    tree_map_tensors(note, nest, where)
    return list(tensors.values())


def attributes(leaf: Any) -> list[Any]:
    """All attributes of a dataclass; the tensors among those of another object, as of a cache.

    For reading only: such an object cannot be taken apart and put together again.
    """
    if isinstance(leaf, (*_PLAIN, type, nn.Module)):
        return []
    if _is_record(leaf):
        names = [field.name for field in dataclasses.fields(leaf)]
        return [getattr(leaf, name) for name in names if hasattr(leaf, name)]
    return [value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, Tensor)]


def _is_record(leaf: Any) -> bool:
    """Whether an object is a dataclass whose attributes are all that it holds."""
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and not isinstance(leaf, (nn.Module, *_SEQUENCES))
    )


def _rebuild_record(record: Any, walk: Callable[[Any], Any]) -> Any:
    # Not replace(): it would run __post_init__ again, and needs every field as an argument.
    twin = copy.copy(record)
    names = [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]
    names += [name for name in getattr(record, "__dict__", {}) if name not in names]
    for name in names:
        object.__setattr__(twin, name, walk(getattr(record, name)))
    if isinstance(record, dict):
        for key, value in record.items():
            # Hugging Face keeps each field twice, as an attribute and as an item.
            same = key in names and getattr(record, key) is value
            dict.__setitem__(twin, key, getattr(twin, key) if same else walk(value))
    return twin


def _refuse_hidden(leaf: Any, where: str) -> None:
    if isinstance(leaf, (type, nn.Module)):
        return
    attributes = [] if type(leaf) in _SEQUENCES else getattr(leaf, "__dict__", {}).values()
    if not any(_holds_tensors(part, _DEPTH) for part in (leaf, *attributes)):
        return
    remedy = "`vars(y)`, the dict of what it holds"
    if isinstance(leaf, Mapping):
        remedy = "`dict(y)`, a plain one"
    elif isinstance(leaf, Iterable):
        remedy = "`list(y)` or `tuple(y)`, a plain one"
    raise InputError(
        f"Expected {where} to be a tensor, or a nest of dicts, lists, tuples and dataclasses with "
        f"tensors in it. Found `y`, a {type(leaf).__name__} with tensors in it, which cannot be "
        f"taken apart. Remedy: {remedy}; or torch.utils._pytree.register_pytree_node for its class."
    )


def _holds_tensors(value: Any, depth: int) -> bool:
    """Whether a tensor that requires a gradient is, or lies in a container, ``depth`` deep.

    Other objects are not searched. Hugging Face's layers are handed a cache of all layers' keys:
    an object with objects in it, of which each layer reads what it wrote itself.
    """
    if isinstance(value, Tensor):
        return value.requires_grad
    if depth == 0 or not isinstance(value, (Mapping, *_SEQUENCES)):
        return False
    parts = value.values() if isinstance(value, Mapping) else value
    return any(_holds_tensors(part, depth - 1) for part in parts)
