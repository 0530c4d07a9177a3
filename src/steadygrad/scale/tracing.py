"""What a boundary can find out while its module's code is being compiled.

Compiled code must not change an object, and has no versions of tensors to look at. While it is
traced both can be had: these functions leave nothing in the compiled code.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from steadygrad._checks import InputError

__all__ = ["Watch", "note_call", "refuse_changes", "watch"]


class Watch:
    """Whether a module was called, and its arguments while it is traced.

    Args:
        name: The module's, for errors.

    Attributes:
        called: Whether it was ever called, or traced, with gradients to come.
        arguments: Traced tensors with their versions when they entered.
    """

    def __init__(self, name: str) -> None:
        self.name, self.called = name, False
        self.arguments: list[tuple[Any, int]] = []
        # What a traced function can hand to the callbacks is a constant: here a text.
        self.key = f"{name} {id(self)}"
        _WATCHES[self.key] = self


# Weak: a scaler that is gone takes its watches with it.
_WATCHES: "WeakValueDictionary[str, Watch]" = WeakValueDictionary()


def note_call(mine: Watch) -> None:
    """The module is called; a step that trusts in its scale may follow."""
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime  # a second; and only here is it needed

        key = mine.key
        comptime(_begin)
        del key
    else:
        mine.called = True


def watch(mine: Watch, tensor: Tensor) -> None:
    """Remembers the version of a traced tensor."""
    from torch._dynamo.comptime import comptime

    key = mine.key
    comptime(_remember)
    del key, tensor


def refuse_changes(mine: Watch) -> None:
    """Refuses to compile a module that has changed a watched tensor in place.

    Raises:
        InputError: If it has. Its caller would not see the change.
    """
    from torch._dynamo.comptime import comptime

    key = mine.key
    comptime(_compare)
    del key


def _found(context: Any) -> Watch:
    return _WATCHES[context.get_local("key").as_python_constant()]


def _begin(context: Any) -> None:
    found = _found(context)
    found.called = True
    found.arguments.clear()


def _remember(context: Any) -> None:
    fake = context.get_local("tensor").as_fake()
    _found(context).arguments.append((fake, fake._version))


def _compare(context: Any) -> None:
    found = _found(context)
    changed = any(fake._version != version for fake, version in found.arguments)
    found.arguments.clear()
    if changed:
        raise InputError(
            f"Expected modules that leave their arguments as they are, in compiled code. Found "
            f"that {found.name} changes one in place, which its caller would not see. Remedy: "
            "inplace=False, or choose a module around it."
        )
