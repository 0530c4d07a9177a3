"""Arguments that stay attributes: checked whenever they are set, kept where they are used."""

from collections.abc import Callable
from functools import reduce
from typing import Any, Generic, TypeVar, overload

from steadygrad._checks import InputError, check_type

__all__ = ["Fixed", "Live", "Shared", "flag"]

T = TypeVar("T")
S = TypeVar("S", bound="Live[Any]")


class Live(Generic[T]):
    """An option that may be changed between steps, on every process alike.

    Args:
        path: Where it is kept, from the owner on.
        check: Given its name and a value, returns the value or raises.
    """

    def __init__(self, path: str, check: Callable[[str, Any], T]) -> None:
        *self.home, self.attribute = path.split(".")
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self: S, owner: None, kind: type) -> S: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> Any:
        """The option as it is now."""
        return self if owner is None else getattr(self._home(owner), self.attribute)

    def __set__(self, owner: object, value: T) -> None:
        setattr(self._home(owner), self.attribute, self.check(self.name, value))

    def _home(self, owner: object) -> Any:
        # Not `attrgetter`, which the compiler cannot read.
        return reduce(getattr, self.home, owner)


class Fixed(Live[T]):
    """An option that is what it was at construction.

    Args:
        path: Where it is kept, from the owner on.
        remedy: What to do instead of setting it.
    """

    def __init__(self, path: str, remedy: str) -> None:
        def refuse(name: str, value: Any) -> T:
            raise InputError(
                f"Attribute `{name}` should be left as it was made. Found it set to {value!r}. "
                f"Remedy: {remedy}."
            )

        super().__init__(path, refuse)


class Shared(Generic[T]):
    """Something that is used and not owned: a copy of its user has the same one.

    Args:
        value: It.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, object]) -> "Shared[T]":
        """Shares the value, but not which value it is."""
        return Shared(self.value)


def flag(name: str, value: Any) -> bool:
    """Returns ``value`` if it is True or False.

    Raises:
        InputError: If it is something else.
    """
    return check_type(name, value, bool, "True or False")
