"""``steadygrad inspect``: what it prints, what it refuses, and records that are not what they were.

What it shares with ``advise`` is tested there.
"""

import json
import shutil

import pytest

from steadygrad.cli import main
from steadygrad.record import dumps
from tests.unit.studies.helpers import tiny
from tests.unit.studies.inspect.runs import look, spec

BAD_INPUT = {
    "unknown task": (["char-ml"], "did you mean 'char-lm'?"),
    "steps": ([tiny(), "--steps", "15"], "--steps should be an integer of at least 16. Found '15'"),
    "no number": ([tiny(), "--steps", "many"], "Remedy: --steps 200, or see steadygrad inspect"),
    "budget": ([tiny(), "--budget", "soon"], "The budget should be a duration"),
    "device": ([tiny(), "--device", "tpu"], "--device should be one of auto, cpu, cuda"),
    "another's option": ([tiny(), "--tolerance", "0.1"], "option of `steadygrad inspect`"),
    "model raises": ([tiny("model_raises")], "Task.make_model should run without an error. Found"),
    "not finite": ([tiny("not_finite")], "NaN or infinite. Remedy:"),
    "nothing to resume": (["--resume", "nowhere"], "record.jsonl"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(case, refused):
    arguments, message = BAD_INPUT[case]
    place = [] if "--resume" in arguments else ["--out", "run"]
    assert message in refused("inspect", *arguments, *place)


def test_a_folder_in_use(tmp_path, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert "notes.txt" in refused("inspect", tiny(), "--out", "run")


def test_a_task_that_breaks_later_keeps_what_was_recorded(tmp_path, refused):
    task = tiny("loss_raises_later")
    line = refused("inspect", task, "--steps", "200", "--out", "run", writes=True)
    assert "Task.per_sample_loss should run without an error" in line
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "Training failed before" in (tmp_path / "run" / "report.html").read_text()


def test_a_page_that_fails_does_not_hide_why_the_study_did(refused, monkeypatch):
    def write(folder):
        raise OSError(f"no room for {folder}")

    monkeypatch.setattr("steadygrad.report.write", write)
    line = refused("inspect", tiny("loss_raises_later"), "--out", "run", writes=True)
    assert "Task.per_sample_loss should run without an error" in line


def test_a_budget_that_says_nothing_is_an_error_and_more_time_mends_it(tmp_path, refused, capsys):
    arguments = [spec("healthy"), "--steps", "16", "--device", "cpu", "--out", "run"]
    line = refused("inspect", *arguments, "--budget", "0.001s", writes=True)
    assert "The budget was over before scales were found" in line
    # The same time again would end in the same place.
    assert "More time than this: not even an eighth of the first training was done." in line
    assert main(["inspect", "--resume", "run", "--budget", "5m", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert printed["status"] == "complete"
    line = refused("inspect", "--resume", "run", "--steps", "32")
    assert "takes steps = 16 from the record. Found 32" in line


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return look(tmp_path_factory.mktemp("inspected") / "run", spec("healthy"))


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "run")
    return tmp_path / "run"


def test_what_is_printed(folder, capsys):
    assert main(["inspect", "--resume", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Nothing is at fault: one loss scale serves every layer." in " ".join(out.split())
    assert "blocks.1" in out
    assert str(folder / "report.html") in out


def test_the_table_has_before_and_after_in_this_order(folder, capsys):
    """Of the boundaries' and the weights' shares the larger one."""
    summary = json.loads((folder / "summary.json").read_text())
    for phase, tens in (("before", 0.1), ("after", 0.2)):
        shares = {"zero": tens, "subnormal": tens + 0.01, "overflow": 0.0}
        larger = {"zero": tens + 0.05, "subnormal": tens + 0.06, "overflow": 0.0}
        kinds = {"activations": shares, "weights": larger}
        summary["layers"][1][phase] = {**kinds, "overflows": round(10 * tens)}
        kinds = {"activations": larger, "weights": None}
        summary["layers"][2][phase] = {**kinds, "overflows": 0}
    (folder / "summary.json").write_text(dumps(summary))
    assert main(["inspect", "--resume", str(folder)]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:5]] for row in rows}
    shown = ["15.0% / 25.0%", "16.0% / 26.0%"]
    assert cells[summary["layers"][1]["name"]] == [*shown, "1 / 2 steps"]
    assert cells[summary["layers"][2]["name"]] == [*shown, "0 / 0 steps"]


OPTIONAL = {("run", "time"), ("part", "time"), ("run", "plan", "parts"), ("run", "plan", "work")}
OPTIONAL |= {("run", "plan", "layers"), ("run", "settings", "dtype")}
OPTIONAL |= {("run", "task", name) for name in ("parameters", "train_size", "valid_size")}
WRONG = [None, {"x": []}, [[]], "x", True, -1.5]


def paths_of(kind, event):
    for name, value in event.items():
        yield (name,)
        if kind == "run" and name in ("task", "settings", "plan"):
            yield from ((name, inner) for inner in value)


@pytest.mark.parametrize("kind", ["run", "part", "phase", "proposal", "end"])
def test_every_field_may_be_missing_or_of_another_type(kind, folder, capsys):
    """One line that names the line, and nothing written."""
    events = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    number = next(i for i, event in enumerate(events) if event["event"] == kind)
    (folder / "summary.json").unlink()
    tried = 0
    for path in paths_of(kind, events[number]):
        if (kind, *path) in OPTIONAL:
            continue
        for bad in ("missing", *WRONG):
            changed = json.loads(json.dumps(events))
            *outer, last = path
            place = changed[number][outer[0]] if outer else changed[number]
            if bad != "missing" and isinstance(bad, type(place[last])):
                continue  # its fields, or other texts, have their turn elsewhere
            place.pop(last) if bad == "missing" else place.__setitem__(last, bad)
            text = "".join(json.dumps(event) + "\n" for event in changed)
            (folder / "record.jsonl").write_text(text)
            assert main(["inspect", "--resume", str(folder)]) == 2, (path, bad)
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1), (path, bad, err)
            assert (folder / "record.jsonl").read_text() == text
            assert path == ("study",) or f"line {number + 1} of " in err, (path, bad, err)
            tried += 1
    assert tried >= 2 * len(events[number])


@pytest.mark.parametrize(
    ("path", "bad", "message"),
    [
        (("weights", "last", "low"), 128, "an object of histograms"),
        (("weights", "last", "counts"), [-1], "an object of histograms"),
        (("scales", ""), 2000, "an object of numbers from -1000 to 1000"),
        (("overflows", "last"), 0.5, "an object of integers of at least 0"),
        (("part",), 8, "an integer from 0 to 7"),
    ],
)
def test_values_that_no_study_writes(path, bad, message, folder, capsys):
    lines = (folder / "record.jsonl").read_text().splitlines(keepends=True)
    event = json.loads(lines[1])
    place = event
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = bad
    lines[1] = json.dumps(event) + "\n"
    (folder / "record.jsonl").write_text("".join(lines))
    for command in (["inspect", "--resume"], ["report"]):
        assert main([*command, str(folder)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(words=[1]),
        lambda s: s.update(layers={}),
        lambda s: s["layers"][0].pop("before"),
        lambda s: s["layers"][0]["after"].update(overflows="many"),
        lambda s: s["layers"][0]["after"].update(weights={"zero": 0.0}),
    ],
)
def test_a_summary_of_another_shape(change, folder, capsys):
    summary = json.loads((folder / "summary.json").read_text())
    change(summary)
    (folder / "summary.json").write_text(dumps(summary))
    assert main(["inspect", "--resume", str(folder)]) == 2
    assert "Remedy: delete it" in capsys.readouterr().err
    # A page is drawn of what there is.
    assert main(["report", str(folder)]) == 0
