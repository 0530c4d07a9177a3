"""Which pieces of a study are recorded already.

Every event has a key that says what it is about. Going through the study again with the ledger of
an interrupted run repeats nothing that is recorded and writes nothing twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.record import RunWriter, strip_times

__all__ = ["Ledger"]

Key = tuple[Any, ...]

_KEYS = {
    "train": ("point", "samples"),
    "point": ("point",),
    "noise": ("point",),
    "branch": ("point", "repeat", "multiple"),
    "critical": ("point",),
    "part": ("phase", "part"),
    "phase": ("phase",),
    "proposal": (),
}


class Ledger:
    """The events of a study, in the order of the work.

    Args:
        writer: Where new events are appended; None on the ranks that do not write.
        events: The events of the run that is resumed.
    """

    def __init__(self, writer: RunWriter | None, events: Sequence[Mapping[str, Any]] = ()) -> None:
        self._writer = writer
        self._events: dict[Key, dict[str, Any]] = {}
        self.differing = 0
        for event in events:
            if event["event"] in _KEYS:
                self._events[_key(event)] = dict(event)

    def find(self, event: str, *key: Any) -> dict[str, Any] | None:
        """The recorded event with this key, or None."""
        return self._events.get((event, *key))

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        """Records an event, unless one with its key is recorded already."""
        new = {"event": event, **fields}
        old = self._events.get(_key(new))
        if old is None:
            old = self._events[_key(new)] = new
            if self._writer is not None:
                self._writer.append(event, **fields)
        elif _untimed(old) != _untimed(new):
            self.differing += 1
        return old

    def end(self, status: str, **fields: Any) -> None:
        """Records how the study ended, this time."""
        if self._writer is not None:
            self._writer.append("end", status=status, **fields)

    def select(self, event: str) -> list[dict[str, Any]]:
        """All events of one kind, in order."""
        return [dict(fields) for key, fields in self._events.items() if key[0] == event]


def _key(event: Mapping[str, Any]) -> Key:
    return (event["event"], *(event[name] for name in _KEYS[event["event"]]))


def _untimed(event: dict[str, Any]) -> str:
    # By text, because a NaN is not equal to itself.
    return repr(sorted(strip_times(event).items()))
