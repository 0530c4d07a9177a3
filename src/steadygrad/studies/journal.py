"""The results of a study's trials, each recorded once.

Every event has a key. Going through the trials again with the journal of an interrupted run
repeats no trial that is recorded and writes nothing twice.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from steadygrad.record import End, Event, Key, RunWriter

__all__ = ["Journal"]

E = TypeVar("E", bound=Event)


class Journal:
    """The events of a study, in the order of the trials.

    Args:
        writer: Appends new events; None on the ranks that do not write.
        events: The events of the run that is resumed.

    Attributes:
        differing: Trials that were repeated and gave other numbers than those recorded.
    """

    def __init__(self, writer: RunWriter | None = None, events: Iterable[Event] = ()) -> None:
        self._writer = writer
        self._events = {event.key: event for event in events if not isinstance(event, End)}
        self.differing = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._events

    def add(self, event: Event) -> None:
        """Records an event, unless one with its key is recorded already."""
        old = self._events.get(event.key)
        if old is None:
            self._events[event.key] = event
            if self._writer is not None:
                self._writer.append(event)
        elif _untimed(old) != _untimed(event):
            self.differing += 1

    def events(self) -> list[Event]:
        """All events, in order."""
        return list(self._events.values())

    def end(self, status: str, **times: Any) -> None:
        """Records how this attempt at the study ended."""
        if self._writer is not None:
            self._writer.append(End(status=status, time=times))

    def get(self, kind: type[E], *key: Any) -> E | None:
        """The event of a class with these key fields; None if it is not recorded."""
        found = self._events.get((str(kind.__struct_config__.tag), *key))
        return found if isinstance(found, kind) else None

    def select(self, kind: type[E]) -> list[E]:
        """All events of one class, in order."""
        return [event for event in self._events.values() if isinstance(event, kind)]


def _untimed(event: Event) -> str:
    # By text, because a NaN is not equal to itself.
    return repr(msgspec.structs.replace(event, time={}))
