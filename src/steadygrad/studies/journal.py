"""The results of a study's trials, each recorded once.

Every event has a key. Going through the trials again with the journal of an interrupted run
repeats no trial whose result is there and writes nothing twice.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from steadygrad.record import (
    End,
    Event,
    Key,
    RunWriter,
    checked_line,
    convert,
    parse_line,
    read_file,
    replace_file,
)

__all__ = ["Journal"]

E = TypeVar("E", bound=Event)


class Journal:
    """The events of a study: those recorded, in the order of the trials, then those that wait.

    A result waits while an earlier trial is not done. It is then a file, so that an interrupted
    study loses none.

    Args:
        writer: Appends new events; None on the ranks that do not write.
        events: The events of the run that is resumed.
        waiting: Folder of the results that wait. Default: none can wait.
        kinds: Types of the events in it.

    Attributes:
        differing: Trials that were repeated and gave other numbers than those known.
    """

    def __init__(
        self,
        writer: RunWriter | None = None,
        events: Iterable[Event] = (),
        waiting: Path | None = None,
        kinds: Any = Event,
    ) -> None:
        self._writer, self._folder = writer, waiting
        self._recorded = {event.key: event for event in events if not isinstance(event, End)}
        self._waiting: dict[Key, Event] = {}
        self.differing = 0
        for path in sorted(waiting.glob("*.json")) if waiting else ():
            with suppress(ValueError, OSError, RecursionError):
                event = convert(parse_line(read_file(path)[:-1]), kinds)
                self._waiting[event.key] = event

    def __contains__(self, key: Key) -> bool:
        return key in self._recorded or key in self._waiting

    def keep(self, event: Event) -> None:
        """Keeps a result in memory until its turn; one that is known is only compared."""
        old = self._recorded.get(event.key) or self._waiting.get(event.key)
        if old is None:
            self._waiting[event.key] = event
        elif _untimed(old) != _untimed(event):
            self.differing += 1

    def save(self, key: Key) -> None:
        """Writes a result to its file if it still waits."""
        if key in self._waiting and self._folder is not None:
            self._folder.mkdir(exist_ok=True)
            replace_file(_file(self._folder, key), checked_line(self._waiting[key].as_dict()))

    def record(self, key: Key) -> None:
        """Records a result that waits, and then deletes its file."""
        if key not in self._waiting:
            return
        event = self._waiting.pop(key)
        # A process that is killed here leaves a file of a result that is recorded.
        if key not in self._recorded:
            self._recorded[key] = event
            if self._writer is not None:
                self._writer.append(event)
        if self._folder is not None:
            _file(self._folder, key).unlink(missing_ok=True)
            with suppress(OSError):
                self._folder.rmdir()

    def add(self, event: Event) -> None:
        """Records an event, unless one with its key is recorded already."""
        self.keep(event)
        self.record(event.key)

    def end(self, status: str, **times: Any) -> None:
        """Records how this attempt at the study ended."""
        if self._writer is not None:
            self._writer.append(End(status=status, time=times))

    def events(self) -> list[Event]:
        """All events, in order."""
        return list({**self._recorded, **self._waiting}.values())

    def get(self, kind: type[E], *key: Any) -> E | None:
        """The event of a class with these key fields; None if there is none."""
        name = (str(kind.__struct_config__.tag), *key)
        found = self._recorded.get(name) or self._waiting.get(name)
        return found if isinstance(found, kind) else None

    def select(self, kind: type[E]) -> list[E]:
        """All events of one class, in order."""
        return [event for event in self.events() if isinstance(event, kind)]


def _file(folder: Path, key: Key) -> Path:
    return folder / f"{'-'.join(map(str, key))}.json"


def _untimed(event: Event) -> str:
    # By text, because a NaN is not equal to itself.
    return repr(msgspec.structs.replace(event, time={}))
