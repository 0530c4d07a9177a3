"""Records whose lines are JSON, and not what a record holds: one line each, and nothing written."""

import json
import shutil

import pytest

from steadygrad.cli import main
from tests.unit.studies.helpers import study

# What no command needs, or reads only if it is there.
OPTIONAL = {
    ("run", "time"),
    ("run", "task", "parameters"),
    ("run", "task", "train_size"),
    ("run", "task", "valid_size"),
    ("run", "plan", "multiples"),
    ("run", "plan", "micro_batches"),
    ("noise", "effective"),
    ("critical", "level"),
    ("point", "time"),
    ("noise", "time"),
    ("branch", "time"),
}
# A page is drawn without these; going on is not possible.
TO_RESUME = {
    ("run", "environment"),
    ("run", "task", "spec"),
    ("run", "task", "provenance"),
    ("run", "settings", "threads"),
    ("run", "plan", "multiples_by_point"),
    ("run", "plan", "noise_steps"),
    ("run", "plan", "batch_size"),
    ("run", "plan", "samples_per_second"),
    ("run", "plan", "work"),
}
KINDS = ["run", "train", "point", "noise", "branch", "critical", "end"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small complete run with a summary and without a report."""
    return study(tmp_path_factory.mktemp("malformed") / "run", budget=60.0).folder


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(capsys, folder, *command):
    """Runs the program on a record; gives its one line."""
    before = contents(folder)
    code = main([*command, str(folder)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert contents(folder) == before
    assert err.startswith("steadygrad: ")
    assert err.count("\n") == 1
    assert "Remedy: " in err
    return err


RESUME, REPORT = ("advise", "--resume"), ("report",)


def lines_of(folder):
    return (folder / "record.jsonl").read_text().splitlines()


def first_of(folder, kind):
    """Number of the first line of a kind, from 0, and what it says."""
    events = [json.loads(line) for line in lines_of(folder)]
    number = next(i for i, event in enumerate(events) if event["event"] == kind)
    return number, events[number]


def rewrite(folder, number, value):
    lines = lines_of(folder)
    lines[number] = json.dumps(value)
    (folder / "record.jsonl").write_text("\n".join(lines) + "\n")


def paths_of(kind, event):
    """The fields of an event, and those of the objects that a header holds."""
    for name, value in event.items():
        yield (name,)
        if kind == "run" and name in ("task", "settings", "plan"):
            yield from ((name, inner) for inner in value)


def without(event, path):
    *outer, last = path
    changed = json.loads(json.dumps(event))
    place = changed[outer[0]] if outer else changed
    value = place.pop(last)
    return changed, place, last, value


def wrong(value):
    """Values of another type than this one; a text that says "nan" is a number."""
    text = isinstance(value, str) and value not in ("nan", "inf", "-inf")
    return [None, {"x": []}, [[]], *([7] if text else ["x"]), *([] if value is True else [True])]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_may_be_missing_or_of_another_type(kind, folder, capsys):
    number, event = first_of(folder, kind)
    tried = 0
    for path in paths_of(kind, event):
        if (kind, *path) in OPTIONAL:
            continue
        changed, place, last, value = without(event, path)
        cases = [changed]
        for bad in wrong(value):
            if isinstance(bad, type(value)) and isinstance(value, (dict, bool)):
                continue  # an object of other things: its fields have their turn
            place[last] = bad
            cases.append(json.loads(json.dumps(changed)))
            del place[last]
        for case in cases:
            rewrite(folder, number, case)
            line = refused(capsys, folder, *RESUME)
            if (kind, *path) not in TO_RESUME:
                line = refused(capsys, folder, *REPORT)
            # Of which study it is nobody can tell by the line alone.
            assert path == ("study",) or f"line {number + 1} of " in line, line
            tried += 1
    assert tried >= 5 * len(event) - 20


@pytest.mark.parametrize("value", [[], [1], 3, None, "text", True, {}, {"event": 1}], ids=repr)
@pytest.mark.parametrize("place", ["header", "middle", "last"])
def test_a_whole_line_that_is_no_event(value, place, folder, capsys):
    number = {"header": 0, "middle": 3, "last": len(lines_of(folder)) - 1}[place]
    rewrite(folder, number, value)
    for command in (RESUME, REPORT):
        assert f"line {number + 1} of " in refused(capsys, folder, *command)


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("run", ("plan", "points"), [], "a list of integers of at least 1"),
        ("run", ("plan", "points"), [64, 128, 256, 512, 1024, 2048], "one entry for each point"),
        ("run", ("plan", "multiples_by_point"), [[]], "a list of lists of integers"),
        ("run", ("plan", "branch_samples"), [0], "a list of integers of at least 1"),
        ("run", ("settings", "batch_size"), 0, "an integer of at least 1"),
        ("run", ("settings", "lr"), "inf", "a finite number above 0"),
        ("run", ("settings", "dtype"), "int8", "one of float32, bfloat16"),
        ("run", ("settings", "tolerance"), 3, "a number from 0.01 to 1"),
        ("run", ("schema",), True, "the header of a run in line 1"),
        ("run", ("schema",), 0, "the header of a run in line 1"),
        ("point", ("point",), 99, "'point' to be below 1, the number of points planned"),
        ("branch", ("batch_size",), 0, "an integer of at least 1"),
        ("branch", ("samples",), 10**400, "an integer of at least 1"),
        ("branch", ("loss",), 10**400, "Expected 'loss' to be a number"),
        ("branch", ("curve",), [[1]], "a list of pairs of numbers"),
        ("branch", ("curve",), [[1, None]], "a list of pairs of numbers"),
        ("critical", ("excess",), {"8": "much"}, "an object of numbers"),
    ],
)
def test_values_that_no_study_writes(kind, path, value, message, folder, capsys):
    number, event = first_of(folder, kind)
    changed, place, last, _ = without(event, path)
    place[last] = value
    rewrite(folder, number, changed)
    assert message in refused(capsys, folder, *RESUME)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("status"),
        lambda s: s.update(recommendation=None),
        lambda s: s["recommendation"].update(words=["one", 2]),
        lambda s: s.update(points={}),
        lambda s: s["points"][0].pop("valid_loss"),
        lambda s: s["points"][0].update(noise={}),
        lambda s: s["points"][0]["critical"].update(value="much"),
        lambda s: s.update(sample=None),
    ],
)
def test_a_summary_of_another_shape(change, folder, capsys):
    summary = json.loads((folder / "summary.json").read_text())
    change(summary)
    (folder / "summary.json").write_text(json.dumps(summary))
    line = refused(capsys, folder, *RESUME)
    assert "summary.json" in line
    assert "Remedy: delete it" in line


def test_the_record_itself_is_whole(folder, capsys):
    """Red here, and the tests above say nothing."""
    assert main([*RESUME, str(folder)]) == 0
    assert main([*REPORT, str(folder)]) == 0
    assert capsys.readouterr().err == ""
