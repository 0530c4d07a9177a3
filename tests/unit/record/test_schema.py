"""Every line is checked against its type, and an error names the line and the field.

These are the shapes that a study never writes: each field missing, or of another type.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steadygrad.studies.folder import RunError, RunWriter, read_run
from steadygrad.studies.schema import STUDIES, End, schema_of
from tests.unit.record.helpers import (
    assert_one_line,
    make_branch,
    make_header,
    make_noise,
    make_point,
    make_scratch,
    rewrite,
)

LINES = {
    "run": make_header(),
    "point": make_point(),
    "noise": make_noise(),
    "branch": make_branch(curve=((64, 0.9),)),
    "scratch": make_scratch(),
    "end": End(status="complete"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record with one line of each kind, and one line more, so that none of them is the last."""
    header, *events = LINES.values()
    with RunWriter.create(tmp_path / "run", header) as writer:
        for event in [*events, events[-1]]:
            writer.append(event)
    return tmp_path / "run"


def complaint(folder: Path) -> str:
    with pytest.raises(RunError) as error:
        read_run(folder)
    assert_one_line(error, "Expected ", "Found ", "Remedy: ")
    return str(error.value)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all fields of a line, those of its first items included."""
    if isinstance(value, dict):
        inner = [paths_of(item, (*path, name)) for name, item in value.items()]
    elif isinstance(value, list) and value:
        inner = [paths_of(value[0], (*path, 0))]
    else:
        inner = []
    return [*([path] if path else []), *(deep for paths in inner for deep in paths)]


def cases(number: int, line: Any) -> list[Any]:
    names = paths_of(msgspec.to_builtins(line))
    return [pytest.param(number, path, id=".".join(map(str, path))) for path in names]


ALL = [case for number, line in enumerate(LINES.values()) for case in cases(number, line)]
# Any JSON value may stand there.
FREE = ("environment", "time")


@pytest.mark.parametrize(("number", "path"), ALL)
def test_a_field_of_another_type_is_named_with_its_line(folder: Path, number: int, path: tuple):
    def change(fields):
        for name in path[:-1]:
            fields = fields[name]
        was = fields[path[-1]]
        # A complex thing in place of a simple one, and the other way round.
        fields[path[-1]] = 7 if isinstance(was, (dict, list, str)) else {"x": []}

    rewrite(folder, number, change)
    if path[0] in FREE and len(path) > 1:
        assert read_run(folder).truncated is False
        return
    line = complaint(folder)
    if path in (("event",), ("study",), ("schema",)):
        return
    assert f"in line {number + 1} of " in line
    if number:
        where = re.search(r" in '(.+?)' in line", line)
        assert where is not None
        assert where[1] == re.sub(r"\.\[", "[", ".".join(f"[{p}]" if p == 0 else p for p in path))


# Records of an earlier day lack them.
LATER = ("time", "files", "first_losses")
REQUIRED = [
    case
    for case in ALL
    if len(case.values[1]) == 1 and case.values[1][0] not in ("event", "study", "schema", *LATER)
]


@pytest.mark.parametrize(("number", "path"), REQUIRED)
def test_a_missing_field_is_named_with_its_line(folder: Path, number: int, path: tuple):
    rewrite(folder, number, lambda fields: fields.pop(path[0]))
    line = complaint(folder)
    assert f"in line {number + 1} of " in line
    assert path[0] in line


@pytest.mark.parametrize("number", range(len(LINES)))
def test_null_is_no_value(folder: Path, number: int):
    rewrite(folder, number, lambda fields: fields.update(event=None))
    assert f"line {number + 1} of " in complaint(folder)


@pytest.mark.parametrize("value", [[], [1], 3, None, "text", True, {}, {"event": 1}], ids=repr)
def test_a_whole_line_that_is_no_event(folder: Path, value: Any):
    """With a right checksum: it was put there."""

    def replace(fields):
        fields.clear()
        fields.update(value)

    if isinstance(value, dict):
        rewrite(folder, 2, replace)
        assert f"line 3 of {str(folder / 'record.jsonl')!r}" in complaint(folder)
    else:
        lines = (folder / "record.jsonl").read_text().splitlines(keepends=True)
        lines[2] = json.dumps(value) + "\n"
        (folder / "record.jsonl").write_text("".join(lines))
        with pytest.raises(RunError, match=r"Line 3 of .* is damaged"):
            read_run(folder)


NUMBER = {name: number for number, name in enumerate(LINES)}


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("branch", "batch_size", 0, "int >= 1 in 'batch_size'"),
        ("branch", "batch_size", -31, "Found -31."),
        ("branch", "curve", [[1, 2.0], [-7, 2.0]], "Found -7."),
        ("branch", "samples", 10**400, "Expected int <= 4611686018427387903 in 'samples'"),
        ("branch", "steps", -1, "int >= 0 in 'steps'"),
        ("branch", "lr", 0.0, "float > 0.0 in 'lr'"),
        ("branch", "lr", "nan", "float > 0.0 in 'lr'"),
        ("branch", "lr", "inf", "float < 1e+300 in 'lr'"),
        ("branch", "curve", [[1]], "array of length 2"),
        ("branch", "curve", [[1, None]], "float in 'curve[0][1]'"),
        ("branch", "curve", [[1.5, 2.0]], "int in 'curve[0][0]'"),
        ("scratch", "purpose", "other", "in 'purpose'"),
        ("branch", "loss", None, "Expected float in 'loss' in line 4"),
        ("scratch", "stages", [{"from_samples": 0, "lr": 1.0}], "batch_size"),
        ("point", "point", 2, "'point' to be below 2, the number of points planned"),
        ("noise", "point", 17, "Found 17."),
        ("branch", "point", 2, "'point' to be below 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_no_study_writes(folder: Path, kind: str, field: str, value, message: str):
    rewrite(folder, NUMBER[kind], lambda fields: fields.update({field: value}))
    line = complaint(folder)
    assert message in line
    assert f"line {NUMBER[kind] + 1} of " in line


def test_a_number_that_is_not_finite_is_one(folder: Path):
    rewrite(folder, NUMBER["branch"], lambda fields: fields.update(loss="inf"))
    assert read_run(folder).events[2].loss == float("inf")


def test_unknown_kinds_and_fields_are_left_alone(folder: Path):
    """As a later version of the same schema may add them."""
    rewrite(folder, NUMBER["noise"], lambda fields: fields.update(event="weather", value=None))
    rewrite(folder, NUMBER["branch"], lambda fields: fields.update(colour="green"))
    run = read_run(folder)
    assert [type(event).__name__ for event in run.events] == [
        "Point",
        "Branch",
        "Scratch",
        "End",
        "End",
    ]
    with RunWriter.resume(folder) as writer:
        writer.append(make_point(1))
    assert b'"weather"' in (folder / "record.jsonl").read_bytes()


def test_the_lines_themselves_are_read(folder: Path):
    """Red here, and the tests above say nothing."""
    run = read_run(folder)
    assert [run.header, *run.events[:-1]] == list(LINES.values())


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_its_types(study: str):
    schema = schema_of(study)
    assert schema is not None
    assert "end" in schema.kinds
    assert schema.settings().task == "char-lm"
