"""The events, settings and plan of every study, as types that need no torch.

Each study has a module here with its ``Header``, its ``Settings`` and the union ``EVENTS``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Any, get_args

from steadygrad._studies import STUDIES

__all__ = ["STUDIES", "Schema", "schema_of"]


@dataclass(frozen=True)
class Schema:
    """Types of one study's record.

    Attributes:
        header: Class of the first line.
        events: Union of the classes of all other lines.
        settings: Dataclass of what a user chooses; it is the command line as well.
        check: ``(header, event)`` to None, or to what was expected and found where an event does
            not fit the plan.
    """

    header: Any
    events: Any
    settings: Any
    check: Callable[[Any, Any], tuple[str, str] | None]

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """The classes of events by their names in a record."""
        return {kind.__struct_config__.tag: kind for kind in get_args(self.events)}


@cache
def schema_of(study: object) -> Schema | None:
    """The schema of a study; None if there is no such study."""
    if study not in STUDIES:
        return None
    module = import_module(f"{__name__}.{study}")
    return Schema(module.Header, module.EVENTS, module.Settings, module.check)
