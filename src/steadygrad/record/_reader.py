"""Reads a run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.record._files import RECORD, SUMMARY, RecordError
from steadygrad.record._json import loads

__all__ = ["SCHEMA", "Run", "read_record", "read_run", "strip_times"]

SCHEMA = 1


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
            version reads, or a line before the last one is broken.
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
    if parsed and parsed[-1] is None and len(parsed) > 1:
        parsed.pop()
    header = _check_header(path, parsed[0] if parsed else None)
    for number, entry in enumerate(parsed, start=1):
        if entry is None:
            raise RecordError(
                f"Line {number} of {str(path)!r} is broken, and it is not the last: the file was "
                "changed or damaged. Remedy: restore it from a copy, or start a new run."
            )
    whole = sum(len(line) + 1 for line in lines[: len(parsed)])
    return header, [entry for entry in parsed[1:] if entry is not None], whole, len(data)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        entry = loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("event"), str) else None


def _check_header(path: Path, header: dict[str, Any] | None) -> dict[str, Any]:
    if header is None or header["event"] != "run" or not isinstance(header.get("schema"), int):
        raise RecordError(
            f"Expected {str(path)!r} to begin with the header of a run. Found a truncated or "
            "foreign first line. Remedy: restore the file from a copy, or start a new run."
        )
    _check_schema(path, header["schema"])
    return header


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
