"""The program: exit codes, messages and what is left on the disk."""

import json
import os

import pytest

from steadygrad._checks import InputError
from steadygrad.cli import main
from steadygrad.studies.advise.schema import Branch
from steadygrad.studies.folder import read_run
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import tiny
from tests.unit.studies.framework import contents

BAD_INPUT = {
    "unknown task": (["char-ml"], "Found 'char-ml'. Remedy: did you mean 'char-lm'?"),
    "no such file": (["nowhere.py:make_task"], "nowhere.py"),
    "no factory": ([tiny("nothing")], "should define 'nothing'"),
    "factory raises": ([tiny("raising")], "RuntimeError: no such corpus"),
    "already a mean": ([tiny("already_a_mean")], "a loss that is already a mean. Remedy:"),
    "not finite": ([tiny("not_finite")], "NaN or infinite. Remedy:"),
    "empty data": ([tiny("empty")], "`len(train) = 0`. Remedy:"),
    "batch too large": ([tiny("batch_too_large")], "`batch_size = 5000`. Remedy: 4096 or less"),
    "model raises": ([tiny("model_raises")], "Task.make_model should run without an error. Found"),
    "no model": (
        [tiny("model_is_none")],
        "should return a torch.nn.Module with values. Found NoneType",
    ),
    "wrong shapes": ([tiny("wrong_shapes")], "Found RuntimeError: mat1 and mat2 shapes"),
    "optimizer raises": (
        [tiny("optimizer_raises")],
        "Task.make_optimizer, with optimizer_takes='parameters', should run",
    ),
    "no optimizer": ([tiny("optimizer_is_none")], "a torch.optim.Optimizer. Found NoneType"),
    "optimizer cannot step": ([tiny("optimizer_cannot_step")], "A step of the optimizer should"),
    "state raises": ([tiny("state_raises")], "The state_dict of model and optimizer should run"),
    "loading raises": ([tiny("load_raises")], "The load_state_dict of the optimizer should run"),
    "other parameters": (
        [tiny("trains_another_model")],
        "Found no gradient in the optimizer",
    ),
    "no values": (
        [tiny("on_meta")],
        "Found NotImplementedError: Cannot copy out of meta tensor; no data! Please use",
    ),
    "no values in a buffer": ([tiny("buffer_on_meta")], "Cannot copy out of meta tensor"),
    "frozen": ([tiny("frozen")], "losses without a gradient"),
    "evaluate trains": ([tiny("evaluate_trains")], "leave the model as it is. Found changes of"),
    "evaluate gives nothing": ([tiny("evaluate_is_none")], "TypeError: float() argument must be"),
    "evaluate raises": ([tiny("evaluate_raises")], "Found RuntimeError: it broke. Remedy:"),
    "nothing to resume": (["--resume", "nowhere"], "header.json"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(case, refused):
    arguments, message = BAD_INPUT[case]
    place = [] if "--resume" in arguments else [*PLAIN, "--out", "run"]
    assert message in refused("advise", *arguments, *place)


@pytest.mark.parametrize(
    ("name", "place"), [("run/notes.txt", "run"), ("file", "file/run")], ids=["in use", "a file"]
)
def test_a_folder_that_cannot_be_begun(name, place, tmp_path, refused):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert name.rpartition("/")[2] in refused("advise", tiny(), *PLAIN, "--out", place)


@pytest.mark.parametrize("command", [["advise", "--resume"], ["report"]], ids=" ".join)
def test_a_record_that_cannot_be_read(command, tmp_path, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "header.json").write_text('{"schema": 99}\n')
    assert "schema 99" in refused(*command, "run")


def test_debug_shows_the_factory_s_own_traceback(capsys):
    assert main(["advise", tiny("raising"), *PLAIN, "--debug"]) == 2
    err = capsys.readouterr().err
    assert 'raise RuntimeError("no such corpus\\nsecond line")' in err
    assert err.splitlines()[-1].startswith("steadygrad: ")


def assert_partial(folder):
    run = read_run(folder)
    assert run.header.task.name == "tiny"
    assert run.summary["status"] == "failed"
    assert (folder / "report.html").stat().st_size > 1000


LATE = {
    "loss_raises_later": "should run without an error. Found RuntimeError: it broke. Remedy:",
    "loss_is_a_mean_later": "a loss that is already a mean",
    "evaluate_raises_later": "Task.evaluate should run without an error",
    "state_raises_later": "The state_dict of model and optimizer should run without an error",
    "load_raises_later": "The load_state_dict of the optimizer should run without an error",
}


@pytest.mark.parametrize("factory", LATE)
def test_a_task_that_breaks_later_keeps_what_was_recorded(factory, tmp_path, refused):
    line = refused("advise", tiny(factory), *PLAIN, "--out", "run", writes=True)
    assert LATE[factory] in line
    assert_partial(tmp_path / "run")


def test_a_page_that_fails_does_not_hide_why_the_study_did(refused, monkeypatch):
    def write(folder):
        raise InputError(f"no room for {folder}")

    monkeypatch.setattr("steadygrad.studies.page.write", write)
    line = refused("advise", tiny("loss_raises_later"), *PLAIN, "--out", "run", writes=True)
    assert "should run without an error. Found RuntimeError: it broke." in line


def test_an_error_of_our_own_is_not_the_task_s(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("ours")

    monkeypatch.setattr("steadygrad.studies.advise.findings.summarize", broken)
    with pytest.raises(RuntimeError, match="ours"):
        main(["advise", tiny(), *PLAIN, "--out", str(tmp_path / "run")])
    assert read_run(tmp_path / "run").select(Branch)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_json_alone_is_on_stdout(whole):
    folder, out, err = whole
    assert json.loads(out) == summary_of(folder)
    assert "a task may print what it likes" in err
    assert "samples of work" in err
    assert "verdict" in err
    assert "".join(str(folder / "report.html").split()) in "".join(err.split())
    assert "\x1b" not in out + err


def test_without_json_the_answer_the_table_and_the_remarks_are_printed(folder, capsys):
    assert main(["advise", "--resume", str(folder)]) == 0
    out, err = capsys.readouterr()
    summary, shown = summary_of(folder), " ".join(out.split())
    assert shown.startswith(summary["answer"])
    assert all(remark in shown for remark in summary["remarks"])
    if summary["table"]:
        assert "verdict" in shown
    assert shown.endswith(f"Report: {folder / 'report.html'}")
    assert err == ""


def test_the_page_is_drawn_again(folder, capsys):
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr() == (f"{folder / 'report.html'}\n", "")
    assert (folder / "report.html").stat().st_size > 1000


def test_resuming_a_complete_run_only_draws(folder, capsys):
    before = contents(folder)
    (folder / "report.html").unlink()
    assert main(["advise", "--resume", str(folder), "--budget", "300s"]) == 0
    assert "this run is complete" in capsys.readouterr().err
    assert contents(folder) == before
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("damage", ["", "{}", "[" * 10**5])
def test_a_damaged_summary_is_written_again(folder, capsys, damage):
    summary = summary_of(folder)
    (folder / "summary.json").write_text(damage)
    assert main(["report", str(folder)]) == 0
    capsys.readouterr()
    assert main(["advise", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary == summary_of(folder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "takes seed = 0 from the record. Found 1. Remedy: leave --seed away"),
        (["--tolerance", "0.1"], "takes tolerance = 0.2 from the record. Found 0.1. Remedy: leave"),
        (["--dtype", "float64", "--budget", "1h"], "takes dtype = 'float32' from the record"),
        (["--keep-half-life"], "leave --keep-half-life away"),
        (["char-lm"], "Found 'char-lm'. Remedy: leave TASK away"),
        (["--out", "elsewhere"], "continues in its own folder. Found out = 'elsewhere'"),
    ],
)
def test_flags_that_disagree_with_the_record(whole, refused, flags, message):
    assert message in refused("advise", "--resume", str(whole[0]), *flags)


def test_flags_that_agree_with_it(folder):
    flags = [tiny("talkative"), "--seed", "0", *PLAIN, "--out", str(folder)]
    assert main(["advise", "--resume", str(folder), *flags]) == 0


@pytest.fixture
def second_rank(monkeypatch):
    """This process is the second of two; what would end it is an exception."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


def code_of(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_only_the_first_rank_speaks(second_rank, folder, capsys):
    (folder / "report.html").unlink()
    assert code_of("report", "nowhere") == 2
    assert code_of("advise", "--resume", str(folder), "--json") == 0
    assert capsys.readouterr() == ("", "")
    assert not (folder / "report.html").exists()


def test_a_run_that_its_budget_cut_short_gets_more_time(whole, tmp_path):
    """To the numbers that a longer clock would have given at once, by the command line alone."""
    from steadygrad.studies.deadline import Deadline

    folder = tmp_path / "run"

    def left(deadline):
        # Over after the branches of the first point, however fast this machine is.
        return 0.0 if len(list(folder.glob("results/branch-*"))) >= 6 else 100.0

    with pytest.MonkeyPatch.context() as clock:
        clock.setattr(Deadline, "left", left)
        # It measured something: that is no error.
        assert main(["advise", tiny("talkative"), *PLAIN, "--out", str(folder)]) == 0
    assert read_run(folder).summary["status"] == "budget"
    assert main(["advise", "--resume", str(folder), "--budget", "1h"]) == 0
    assert (folder / "summary.json").read_bytes() == (whole[0] / "summary.json").read_bytes()
