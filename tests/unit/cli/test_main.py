"""The program: exit codes, messages and what is left on the disk."""

import json
import os
import subprocess
import sys

import pytest

from steadygrad._checks import InputError
from steadygrad.cli import main, report
from steadygrad.record import dumps, read_run, strip_times
from tests.unit.studies.helpers import tiny

BAD_INPUT = {
    "unknown task": (["char-ml"], "Found 'char-ml'. Remedy: did you mean 'char-lm'?"),
    "no such file": (["nowhere.py:make_task"], "nowhere.py"),
    "no factory": ([tiny("nothing")], "should define 'nothing'"),
    "factory raises": ([tiny("raising")], "RuntimeError: no such corpus"),
    "already a mean": ([tiny("already_a_mean")], "a loss that is already a mean. Remedy:"),
    "not finite": ([tiny("not_finite")], "NaN or infinite. Remedy:"),
    "empty data": ([tiny("empty")], "Found an empty data set. Remedy:"),
    "batch too large": ([tiny("batch_too_large")], "the batch is larger than the data. Remedy:"),
    "model raises": ([tiny("model_raises")], "Task.make_model should run without an error. Found"),
    "no model": ([tiny("model_is_none")], "should return a torch.nn.Module. Found NoneType"),
    "wrong shapes": ([tiny("wrong_shapes")], "Found RuntimeError: mat1 and mat2 shapes"),
    "optimizer raises": ([tiny("optimizer_raises")], "Task.make_optimizer should run"),
    "no optimizer": ([tiny("optimizer_is_none")], "a torch.optim.Optimizer. Found NoneType"),
    "optimizer cannot step": ([tiny("optimizer_cannot_step")], "A step of the optimizer should"),
    "evaluate raises": ([tiny("evaluate_raises")], "Found RuntimeError: it broke. Remedy:"),
    "budget too small": ([tiny(), "--budget", "1s"], "too small to measure anything"),
    "nothing to resume": (["--resume", "nowhere"], "record.jsonl"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(case, refused):
    arguments, message = BAD_INPUT[case]
    place = [] if "--resume" in arguments else ["--out", "run"]
    assert message in refused("advise", *arguments, *place)


def test_a_folder_in_use(tmp_path, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert "run" in refused("advise", tiny(), "--budget", "100s", "--out", "run")


def test_a_folder_that_cannot_be_made(tmp_path, refused):
    (tmp_path / "file").write_text("not a folder")
    assert "file" in refused("advise", tiny(), "--budget", "100s", "--out", "file/run")


def test_a_truncated_record(tmp_path, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text('{"event": "run", "sch')
    for command in (["advise", "--resume", "run"], ["report", "run"]):
        assert "run" in refused(*command)


def test_a_record_of_a_newer_schema(tmp_path, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text('{"event": "run", "schema": 99}\n')
    for command in (["advise", "--resume", "run"], ["report", "run"]):
        assert "newer steadygrad" in refused(*command)


def test_debug_shows_the_factory_s_own_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "steadygrad", "advise", tiny("raising"), "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'raise RuntimeError("no such corpus\\nsecond line")' in done.stderr


def test_training_that_diverges_keeps_what_was_recorded(tmp_path, refused):
    line = refused("advise", tiny("diverging"), "--budget", "100s", "--out", "run", writes=True)
    assert "should stay finite" in line
    assert "a lower Task.lr" in line
    assert_partial(tmp_path / "run")


def assert_partial(folder):
    run = read_run(folder)
    assert run.header["task"]["name"] == "tiny"
    assert run.events[-1] == {"event": "end", "status": "failed"}
    assert run.summary["status"] == "failed"
    assert "the study failed before" in " ".join(run.summary["recommendation"]["words"])
    assert "Training failed before" in (folder / "report.html").read_text()


LATE = {
    "loss_raises_later": "Task.per_sample_loss should run without an error. Found RuntimeError: it",
    "loss_is_a_mean_later": "a loss that is already a mean",
    "evaluate_raises_later": "Task.evaluate should run without an error",
}


@pytest.mark.parametrize("factory", LATE)
def test_a_task_that_breaks_later_keeps_what_was_recorded(factory, tmp_path, refused):
    line = refused("advise", tiny(factory), "--budget", "100s", "--out", "run", writes=True)
    assert LATE[factory] in line
    assert_partial(tmp_path / "run")


def test_the_debug_flag_shows_where_a_task_broke(tmp_path, capsys):
    out = ["--budget", "100s", "--out", str(tmp_path / "run")]
    assert main(["advise", tiny("loss_raises_later"), *out, "--debug"]) == 2
    assert 'raise RuntimeError("it broke\\nsecond line")' in capsys.readouterr().err


def test_an_error_of_our_own_is_not_the_tasks(tmp_path, monkeypatch):
    from steadygrad.studies.advise import units

    def broken(*arguments):
        raise RuntimeError("ours")

    monkeypatch.setattr(units, "critical_at", broken)
    with pytest.raises(RuntimeError, match="ours"):
        main(["advise", tiny(), "--budget", "100s", "--out", str(tmp_path / "run")])
    assert read_run(tmp_path / "run").select("branch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A complete run, its summary from stdout, and what went to stderr."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    command = [
        sys.executable,
        "-m",
        "steadygrad",
        "advise",
        tiny("talkative"),
        "--budget",
        "200s",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--out", str(folder), "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


def test_json_alone_is_on_stdout(run):
    folder, out, err = run
    assert json.loads(out) == json.loads((folder / "summary.json").read_text())
    assert "critical batch size" in err
    assert "samples of work" in err
    assert "left" in err
    assert str(folder / "report.html") in err
    assert "\x1b" not in out + err


def test_the_report_is_written_and_drawn_again(run, capsys):
    folder, _, _ = run
    page = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert main(["report", str(folder / "record.jsonl")]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_bytes() == page


def test_resuming_a_complete_run_only_draws(run, capsys):
    folder, _, _ = run
    record = (folder / "record.jsonl").read_bytes()
    (folder / "report.html").unlink()
    assert main(["advise", "--resume", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "Train at a batch of" in out
    assert err == ""
    assert main(["advise", "--resume", str(folder), "--budget", "300s"]) == 0
    assert "this run is complete" in capsys.readouterr().err
    assert (folder / "record.jsonl").read_bytes() == record
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "takes seed = 0 from the record. Found 1. Remedy: leave --seed away"),
        (["--tolerance", "0.1"], "takes tolerance = 0.2 from the record. Found 0.1. Remedy: leave"),
        (["--dtype", "float64", "--budget", "1h"], "takes dtype = 'float32' from the record"),
        (["char-lm"], "Found 'char-lm'"),
        (["--out", "elsewhere"], "--resume goes on in its own folder"),
    ],
)
def test_flags_that_disagree_with_the_record(run, refused, flags, message):
    assert message in refused("advise", "--resume", str(run[0]), *flags)


def test_resuming_a_complete_run_only_the_first_rank_speaks(run, monkeypatch, capsys):
    folder, _, _ = run
    monkeypatch.setenv("RANK", "1")
    (folder / "report.html").unlink()
    assert main(["advise", "--resume", str(folder), "--json"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (folder / "report.html").exists()
    monkeypatch.setenv("RANK", "0")
    assert main(["advise", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"


def test_flags_that_agree_with_it(run):
    flags = [
        tiny("talkative"),
        "--seed",
        "0",
        "--budget",
        "200s",
        "--out",
        str(run[0]),
        "--device",
        "auto",
    ]
    assert main(["advise", "--resume", str(run[0]), *flags]) == 0


def test_a_missing_extra_names_it(monkeypatch, refused):
    import steadygrad.cli

    monkeypatch.setattr(steadygrad.cli, "find_spec", lambda name: None if name == "rich" else True)
    line = refused("report", "anywhere")
    assert "Found no rich. " in line
    assert 'pip install "steadygrad[cli]"' in line


def test_a_message_of_several_lines_is_printed_as_one(monkeypatch, refused):
    def run(folder):
        raise InputError("expected one\n  thing, found another")

    monkeypatch.setattr(report, "run", run)
    assert refused("report", "run") == "steadygrad: expected one thing, found another"


def test_only_the_first_rank_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["report", "nowhere"]) == 2
    assert capsys.readouterr().err == ""


def test_a_run_that_its_budget_cut_short_gets_more_time(run, tmp_path, monkeypatch, capsys):
    """To the numbers that a longer clock would have given at once, by the command line alone."""
    from steadygrad.studies.advise import Stop

    whole, folder = run[0], tmp_path / "run"
    arguments = [tiny("talkative"), "--budget", "200s", "--device", "cpu"]
    with monkeypatch.context() as clock:
        # Asked once a step, the budget ends after the first point, however fast this machine is.
        asked = iter(range(10**9))
        clock.setattr(Stop, "left", lambda stop: 3000.0 - next(asked))
        # It measured something: that is no error.
        assert main(["advise", *arguments, "--out", str(folder)]) == 0
    assert read_run(folder).summary["status"] == "budget"
    assert main(["advise", "--resume", str(folder), "--budget", "1h"]) == 0
    assert (folder / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    longer, at_once = (
        [strip_times(event) for event in read_run(place).events] for place in (folder, whole)
    )
    ends = [event for event in longer if event["event"] == "end"]
    assert [end["status"] for end in ends] == ["budget", "complete"]
    assert dumps([event for event in longer if event not in ends]) == dumps(at_once[:-1])
