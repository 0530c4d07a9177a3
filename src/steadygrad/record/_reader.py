"""Reads a run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.record._files import RECORD, SUMMARY, RecordError, wrong_line
from steadygrad.record._json import loads
from steadygrad.record._words import shown

__all__ = ["SCHEMA", "Run", "read_record", "read_run", "strip_times"]

SCHEMA = 1
# A line that is no JSON.
BROKEN = object()


def strip_times(event: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the key ``time``: all that may differ between two runs with one seed lives there."""
    return {key: value for key, value in event.items() if key != "time"}


@dataclass(frozen=True)
class Run:
    """A record as it was read.

    Attributes:
        folder: Where it lies.
        header: The first line: ``study``, ``seed``, ``task``, ``settings``, ``environment``, ...
        events: All other whole lines, in the order in which they were written.
        summary: What ``summary.json`` holds, or ``None`` when there is none yet.
        truncated: Whether a broken last line was dropped.
    """

    folder: Path
    header: dict[str, Any]
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    truncated: bool

    def select(self, event: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [entry for entry in self.events if entry["event"] == event]


def read_run(folder: Path) -> Run:
    """Reads a run's record, and its summary when there is one.

    A broken last line, left by a process that was killed while writing it, is dropped.

    Args:
        folder: The run's folder.

    Raises:
        RecordError: If there is no record, its header is truncated, its schema is newer than this
            version reads, a line before the last one is broken, or a line is whole and no event.
            What an event holds is for :func:`steadygrad.record.check_run`.
    """
    folder = Path(folder)
    header, events, whole, size = read_record(folder)
    return Run(folder, header, events, _read_summary(folder), truncated=whole < size)


def read_record(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int, int]:
    """The header, the events, and the bytes: those of whole lines, and all."""
    path = folder / RECORD
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(
            f"Expected the folder of a run, with a {RECORD} in it. Found none in {str(folder)!r}. "
            "Remedy: pass the folder that --out named."
        ) from None
    except OSError as error:
        raise RecordError(
            f"Cannot read {str(path)!r}: {error.strerror}. Remedy: make it a readable file."
        ) from error
    lines = data.split(b"\n")[:-1]
    parsed = [_parse_line(line) for line in lines]
    # Whatever a kill or a full disk leaves at the end is not JSON; a whole value was written there.
    if len(parsed) > 1 and parsed[-1] is BROKEN:
        parsed.pop()
    _check_header(path, parsed[0] if parsed else BROKEN)
    for number, entry in enumerate(parsed, start=1):
        _check_event(path, number, entry)
    whole = sum(len(line) + 1 for line in lines[: len(parsed)])
    return parsed[0], parsed[1:], whole, len(data)


def _parse_line(line: bytes) -> Any:
    try:
        return loads(line)
    except (ValueError, RecursionError):
        return BROKEN


def _check_event(path: Path, number: int, entry: Any) -> None:
    if entry is BROKEN:
        raise RecordError(
            f"Line {number} of {str(path)!r} is broken, and it is not the last: the file was "
            "changed or damaged. Remedy: restore it from a copy, or start a new run."
        )
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        expected = "an object that names its 'event'"
        raise RecordError(wrong_line(path.parent, number, expected, shown(entry)))


def _check_header(path: Path, header: Any) -> None:
    known = isinstance(header, dict) and header.get("event") == "run"
    # Not isinstance: true is an int.
    if not known or type(header.get("schema")) is not int or header["schema"] < 1:
        raise RecordError(
            f"Expected the header of a run in line 1 of {str(path)!r}. Found a truncated or "
            "foreign line. Remedy: restore the file from a copy, or start a new run."
        )
    _check_schema(path, header["schema"])


def _check_schema(path: Path, schema: int) -> None:
    if schema > SCHEMA:
        raise RecordError(
            f"{str(path)!r} was written by a newer steadygrad: schema {schema}, this one reads up "
            f"to {SCHEMA}. Remedy: pip install -U steadygrad"
        )


def _read_summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY
    try:
        summary = loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        summary = None
    if not isinstance(summary, dict) or not isinstance(summary.get("schema", SCHEMA), int):
        raise RecordError(
            f"Expected a summary in {str(path)!r}. Found something else, or a file that cannot be "
            "read. Remedy: delete it; a report can be drawn without it."
        )
    _check_schema(path, summary.get("schema", SCHEMA))
    return summary
