"""Run records: what a study measured, kept so that a crash at any moment loses nothing.

A run is a folder with ``record.jsonl`` (append-only, one event a line, the header first),
``summary.json`` and ``report.html``. A line is whole when it ends with a newline: the writer puts
each line on the disk before it returns, so a killed process leaves at most one broken line, the
last, and readers drop it. This package imports no torch.
"""

from steadygrad.record._check import check_run
from steadygrad.record._environment import environment
from steadygrad.record._files import RecordError, replace_file, write_report
from steadygrad.record._json import dumps, loads
from steadygrad.record._reader import SCHEMA, Run, read_run, strip_times
from steadygrad.record._words import plural
from steadygrad.record._writer import RunWriter

__all__ = [
    "SCHEMA",
    "RecordError",
    "Run",
    "RunWriter",
    "check_run",
    "dumps",
    "environment",
    "loads",
    "plural",
    "read_run",
    "replace_file",
    "strip_times",
    "write_report",
]
