"""Run records: the results of a study, kept so that a crash at any moment loses nothing.

A run is a folder with ``record.jsonl`` (append-only, one event a line with a checksum, the header
first), ``summary.json`` and ``report.html``. The writer puts each line on the disk before it
returns, so a killed process leaves at most one broken line, the last, and readers drop it. What
each line holds is typed in ``schema``. This package imports no torch.
"""

try:
    from msgspec import convert
except ModuleNotFoundError as error:
    # Its modules and the reports need it too, and import this package first.
    raise ModuleNotFoundError(
        "Expected the package 'msgspec'. Found none. Remedy: pip install \"steadygrad[cli]\".",
        name="msgspec",
    ) from error

from steadygrad.record._environment import environment
from steadygrad.record._events import End, Event, Header, Key, Runtime, TaskInfo, listed, plural
from steadygrad.record._files import RecordError, open_file, read_file, replace_file, write_report
from steadygrad.record._json import dumps, loads
from steadygrad.record._read import SCHEMA, Run, checked_line, parse_line, read_run, understanding
from steadygrad.record._write import RunWriter

__all__ = [
    "SCHEMA",
    "End",
    "Event",
    "Header",
    "Key",
    "RecordError",
    "Run",
    "RunWriter",
    "Runtime",
    "TaskInfo",
    "checked_line",
    "convert",
    "dumps",
    "environment",
    "listed",
    "loads",
    "open_file",
    "parse_line",
    "plural",
    "read_file",
    "read_run",
    "replace_file",
    "understanding",
    "write_report",
]
