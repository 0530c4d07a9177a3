"""Reads a run's folder."""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from steadygrad._checks import InputError
from steadygrad.record._events import Event, Header
from steadygrad.record._files import RECORD, SUMMARY, RecordError, read_file
from steadygrad.record._json import dumps, loads
from steadygrad.record.schema import Schema, schema_of

__all__ = [
    "SCHEMA",
    "Run",
    "checked_line",
    "checksum",
    "crc_of",
    "parse_line",
    "read_record",
    "read_run",
    "understanding",
]

SCHEMA = 2
BROKEN = object()
"""Stands for a line that is not JSON, or whose checksum is wrong."""

E = TypeVar("E", bound=Event)


def checked_line(fields: Mapping[str, Any], before: int = 0) -> bytes:
    """One line of a record with its checksum as its last field, and a newline.

    It is the CRC-32 of all texts up to this line's: a line that is another run's, or in another
    place, is noticed.

    Args:
        fields: Content of the line.
        before: Checksum of the line before.
    """
    text = dumps(fields)[:-1].encode()
    return b'%s, "crc": "%08x"}\n' % (text, zlib.crc32(text, before))


def crc_of(line: bytes) -> int:
    """The checksum at the end of a whole line."""
    return int(line.rstrip(b"\n")[-10:-2], 16)


def checksum(summary: Mapping[str, Any]) -> str:
    """The CRC-32 of a summary, as its file has it."""
    return f"{zlib.crc32(dumps(summary).encode()):08x}"


@dataclass(frozen=True)
class Run:
    """A record as it was read.

    Attributes:
        folder: Folder of the run.
        header: First line; its class is the study's own.
        events: All other whole lines of known kinds, in the order in which they were written.
        summary: Content of ``summary.json``; None when there is none yet.
        truncated: Whether a broken last line was dropped.
    """

    folder: Path
    header: Any
    events: list[Event]
    summary: dict[str, Any] | None
    truncated: bool

    def select(self, kind: type[E]) -> list[E]:
        """The events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]


def read_run(folder: Path) -> Run:
    """Reads a run's record, and its summary when there is one.

    A broken last line, left by a process that was killed while writing it, is dropped.

    Raises:
        RecordError: If there is no record, its schema or its study is not known, a line before the
            last one is damaged, or a line does not hold what its kind must.
    """
    folder = Path(folder)
    header, events, whole, size = read_record(folder)
    return Run(folder, header, events, _read_summary(folder), truncated=whole < size)


@contextmanager
def understanding(folder: Path) -> Iterator[None]:
    """Turns any error over a record whose lines are of the right types into a ``RecordError``."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise RecordError(
            f"Expected a record that makes sense in {str(folder)!r}. Found numbers or names that "
            f"no study writes ({reason}). Remedy: restore it from a copy, or see --debug."
        ) from error


def read_record(folder: Path) -> tuple[Header, list[Event], int, int]:
    """The header, the events, and the bytes: those of whole lines, and all."""
    path = folder / RECORD
    try:
        data = read_file(path)
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
    parsed, crc = list[Any](), 0
    for line in lines:
        parsed.append(parse_line(line, crc))
        if parsed[-1] is BROKEN or parsed[0].get("schema") != SCHEMA:
            break
        crc = crc_of(line)
    # A kill or a full disk damages the end only.
    if len(parsed) == len(lines) > 1 and parsed[-1] is BROKEN:
        parsed.pop()
    header, schema = _header(path, parsed[0] if parsed else BROKEN)
    numbered = enumerate(parsed[1:], start=2)
    events = [_event(path, number, entry, header, schema) for number, entry in numbered]
    whole = sum(len(line) + 1 for line in lines[: len(parsed)])
    return header, [event for event in events if event is not None], whole, len(data)


def parse_line(line: bytes, before: int = 0) -> Any:
    """The fields of a line without its newline; :data:`BROKEN` if its checksum is wrong."""
    text, mark, crc = line.rpartition(b', "crc": "')
    try:
        if mark and crc == b'%08x"}' % zlib.crc32(text, before):
            return loads(text + b"}")
        found = json.loads(line)
    except (ValueError, RecursionError):
        return BROKEN
    # A header of another version still says which version that is.
    foreign = isinstance(found, dict) and found.get("event") == "run"
    return found if foreign and found.get("schema") != SCHEMA else BROKEN


def _header(path: Path, entry: Any) -> tuple[Header, Schema]:
    version = entry.get("schema") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or entry.get("event") != "run" or type(version) is not int:
        raise _wrong(path, 1, "the header of a run", "a damaged or foreign line")
    _check_version(path, version)
    study = entry.get("study")
    schema = schema_of(study) if isinstance(study, str) else None
    if schema is None:
        raise RecordError(
            f"Expected the record of a known study. Found `study = {_shown(study)}` "
            f"in {str(path)!r}. Remedy: use the steadygrad that wrote it, or a newer one."
        )
    return _typed(path, 1, entry, schema.header), schema


def _check_version(path: Path, version: int) -> None:
    if version == SCHEMA:
        return
    age, remedy = (
        ("a newer", "pip install -U steadygrad")
        if version > SCHEMA
        else ("an older", "run the study again, or use the steadygrad that wrote it")
    )
    raise RecordError(
        f"{str(path)!r} was written by {age} steadygrad: schema {version}, this one reads "
        f"{SCHEMA}. Remedy: {remedy}."
    )


def _event(path: Path, number: int, entry: Any, header: Header, schema: Schema) -> Event | None:
    if entry is BROKEN:
        raise RecordError(
            f"Line {number} of {str(path)!r} is damaged, or does not follow the line before: the "
            "file was changed. Remedy: restore it from a copy, or start a new run."
        )
    name = entry.get("event") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise _wrong(path, number, "an object that names its 'event'", _shown(entry))
    if name not in schema.kinds:
        return None
    event: Event = _typed(path, number, entry, schema.events)
    wrong = schema.check(header, event)
    if wrong:
        raise _wrong(path, number, *wrong)
    return event


def _typed(path: Path, number: int, entry: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(entry, kind)
    # Half of a surrogate pair, where one of a few words should stand.
    except UnicodeError:
        raise _wrong(path, number, "text", "half of a surrogate pair") from None
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        place = place.rstrip("`").lstrip(".")
        expected, _, found = text.removeprefix("Expected ").partition(", got ")
        where = f" in {place!r}" if place else ""
        found = found.replace("`", "") or _shown(_value_at(entry, place))
        raise _wrong(path, number, expected.replace("`", "") + where, found) from None


def _value_at(entry: Any, place: str) -> Any:
    """The value at a path such as ``plan.points[0]``."""
    for part in re.findall(r"[^.\[\]]+", place):
        try:
            entry = entry[int(part) if isinstance(entry, list) else part]
        except (KeyError, ValueError, IndexError, TypeError):
            break
    return entry


def _wrong(path: Path, number: int, expected: str, found: str) -> RecordError:
    return RecordError(
        f"Expected {expected} in line {number} of {str(path)!r}. Found {found}. "
        "Remedy: restore the file from a copy, or start a new run."
    )


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:56]} ..."


class _Summary(msgspec.Struct):
    """Fields of every study's summary, besides the study's own."""

    schema: int
    status: str = ""
    words: list[str] = []


def _read_summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY
    try:
        summary: dict[str, Any] = loads(read_file(path))
        version = msgspec.convert(summary, _Summary).schema
        whole = summary.pop("crc", "") == checksum(summary)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        version, whole = SCHEMA, False
    _check_version(path, version)
    if not whole:
        raise RecordError(
            f"Expected the summary that the study wrote in {str(path)!r}. Found something else, "
            "or a file that cannot be read. Remedy: delete it; nothing is lost: --resume writes it "
            "again from the record."
        )
    return summary
