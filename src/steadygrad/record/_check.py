"""Checks a record before somebody relies on it."""

from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.record._fields import COLUMNS, Fields, fields_of
from steadygrad.record._files import RecordError, wrong_line
from steadygrad.record._reader import Run
from steadygrad.record._words import shown

__all__ = ["check_run"]


def check_run(run: Run, *, to_resume: bool = False) -> None:
    """Checks that every line of a record holds what its event must, each of its kind.

    Args:
        run: What :func:`steadygrad.record.read_run` returned.
        to_resume: Also check what only going on with the run needs, the summary included.

    Raises:
        RecordError: For the first line that does not, with its number. A study or an event that
            this version does not know is left alone.
    """
    header = run.header
    # As they lie in the file: the header is line 1; 0 stands for the summary.
    entries = [(1, header), *enumerate(run.events, start=2)]
    if run.summary is not None:
        entries.append((0, {**run.summary, "event": "summary"}))
    for number, entry in entries:
        fields = fields_of(header, entry["event"], to_resume=to_resume)
        _check_fields(run, number, entry, fields)
    columns = [path for path in COLUMNS if path in fields_of(header, "run", to_resume=to_resume)]
    if columns:
        _check_plan(run, columns)


def _check_fields(run: Run, number: int, entry: Mapping[str, Any], fields: Fields) -> None:
    for path, kind in fields.items():
        there, found = _look_up(entry, path)
        if not (there and kind.holds(found)):
            expected = f"{path!r} to be {kind.words}"
            value = shown(found) if there else "none"
            raise RecordError(wrong_line(run.folder, number, expected, value))


def _check_plan(run: Run, columns: Sequence[str]) -> None:
    """Nothing may be about a point of training that the plan does not have."""
    lengths = {path: len(_look_up(run.header, path)[1]) for path in columns}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} in {path!r}" for path, length in lengths.items())
        raise RecordError(wrong_line(run.folder, 1, "one entry for each point", listed))
    points = lengths["plan.points"]
    for number, event in enumerate(run.events, start=2):
        if "point" in fields_of(run.header, event["event"]) and event["point"] >= points:
            expected = f"'point' to be below {points}, the number of points planned"
            raise RecordError(wrong_line(run.folder, number, expected, str(event["point"])))


def _look_up(entry: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Whether there is anything at a path, and what."""
    found: Any = entry
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            return False, None
        found = found[name]
    return True, found
