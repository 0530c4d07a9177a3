"""The program: exit codes, what is printed and what is left on the disk, and faults around it."""

import json
import os
import shlex
import signal

import pytest

from steadygrad.cli import main
from steadygrad.studies.distributed import Deadline, StudyInterrupted
from steadygrad.studies.folder import read_run
from steadygrad.studies.schema import Training
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import run_program, tiny
from tests.unit.studies.framework import contents


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("factory", "found"),
    [("raising", "RuntimeError: no such corpus"), ("loss_raises_later", "RuntimeError: it broke")],
)
def test_a_task_that_is_broken_is_one_line(factory, found, tmp_path, refused):
    """Before the study begins nothing is written, and later nothing is lost."""
    later = factory == "loss_raises_later"
    line = refused("advise", tiny(factory), *PLAIN, "--out", "run", writes=later)
    assert found in line
    assert ("--resume run" in line) == later
    if later:
        run = read_run(tmp_path / "run")
        assert (run.header.task.name, run.summary["status"]) == ("tiny", "failed")
        assert (tmp_path / "run/report.html").stat().st_size > 1000


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), StudyInterrupted(signal.SIGINT)])
def test_a_signal_before_a_run_has_begun(fault, monkeypatch, tmp_path):
    def conduct(*_, **__):
        raise fault

    monkeypatch.setattr("steadygrad.cli.studies.conduct", conduct)
    assert main(["advise", "char-lm", "--out", str(tmp_path / "run")]) == 130


def test_debug_shows_the_task_s_own_traceback(capsys):
    assert main(["advise", tiny("raising"), *PLAIN, "--debug"]) == 2
    err = capsys.readouterr().err
    assert 'raise RuntimeError("no such corpus\\nsecond line")' in err
    assert err.splitlines()[-1].startswith("steadygrad: ")


def test_json_alone_is_on_stdout(tmp_path):
    folder = tmp_path / "run"
    words = ["advise", tiny("talkative"), "--json", *PLAIN, "--out", str(folder)]
    code, out, err = run_program(*words)
    assert code == 0, err
    assert json.loads(out) == summary_of(folder)
    assert "a task may print what it likes" in err
    assert "work done" in err
    assert "verdict" in err
    assert "".join(str(folder / "report.html").split()) in "".join(err.split())
    assert "\x1b" not in out + err


def test_a_complete_run_is_printed_and_drawn_again(folder, capsys):
    summary, before, page = summary_of(folder), contents(folder), folder / "report.html"
    page.unlink()
    (folder / "summary.json").write_text("[" * 10**5)
    # Options that agree with the record.
    flags = [tiny("talkative"), "--seed", "0", *PLAIN, "--out", str(folder), "--budget", "300s"]
    assert main(["advise", "--resume", str(folder), *flags]) == 0
    out, err = capsys.readouterr()
    shown = " ".join(out.split())
    assert shown.startswith(summary["answer"])
    assert all(remark in shown for remark in summary["remarks"])
    assert "verdict" in shown
    assert shown.endswith(f"Report: {page}")
    assert "complete" in err
    assert (contents(folder), summary_of(folder)) == (before, summary)
    drawn = page.read_bytes()
    page.unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr() == (f"{page}\n", "")
    assert page.read_bytes() == drawn


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--seed 1", "Found 1. Remedy: leave --seed away"),
        ("--dtype float64 --budget 1h", "dtype = 'float32'"),
        ("--keep-half-life", "leave --keep-half-life away"),
        ("char-lm", "leave TASK away"),
        ("--out elsewhere", "out = 'elsewhere'"),
    ],
)
def test_options_that_disagree_with_the_record(whole, refused, words, found):
    before = contents(whole)
    assert found in refused("advise", "--resume", str(whole), *shlex.split(words))
    assert contents(whole) == before


def test_a_page_that_cannot_be_written_costs_no_result(folder, capsys):
    page = folder / "report.html"
    page.unlink()
    page.mkdir()
    assert main(["advise", "--resume", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert summary_of(folder)["answer"] in " ".join(out.split())
    assert "Report:" not in out + err
    line = err.splitlines()[-1]
    assert line.startswith("steadygrad: ")
    assert str(page) in line
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr() == ("", f"{line}\n")
    page.rmdir()
    assert main(["report", str(folder / "header.json")]) == 0


@pytest.fixture
def ended_after(tmp_path, monkeypatch):
    """Runs the tiny task until so many files of a kind are there; then its budget is over.

    Or the signal of a ``number`` comes.
    """
    folder = tmp_path / "run"

    def run(name, count, *flags, number=0):
        signals = [number] * bool(number)

        def left(deadline):
            late = len(list(folder.glob(name))) >= count
            if late and signals:
                os.kill(os.getpid(), signals.pop())
            return 0.0 if late and not number else 100.0

        with monkeypatch.context() as clock:
            clock.setattr(Deadline, "left", left)
            return main(["advise", tiny("talkative"), *PLAIN, "--out", str(folder), *flags])

    return run


@pytest.mark.parametrize(
    ("name", "flags"), [("header.json", []), ("results/training-*", ["--json"])]
)
def test_without_a_comparison_there_is_no_advice(ended_after, name, flags, tmp_path, capsys):
    """A training stays in the record and on the page; what is printed is the error alone."""
    assert ended_after(name, 1, *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--resume {tmp_path / 'run'} --budget" in err.splitlines()[-1]
    # Neither the table nor the words, with --json on stderr.
    assert "validation" not in err
    assert "Nothing can be said" not in err
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "budget"
    assert run.summary["recommendation"]["batch_size"] is None
    assert len(run.results.select(Training)) == ("training" in name)
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        # It compared something: that is no error.
        (0, 0, "budget"),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "interrupted"),
    ],
)
def test_a_run_that_was_cut_short_is_reported_and_goes_on(
    ended_after, whole, tmp_path, number, code, status
):
    """To the numbers that a longer clock would have given at once, by the command line alone."""
    folder = tmp_path / "run"
    assert ended_after("results/training-1-*-[0-3].json", 4, number=number) == code
    assert summary_of(folder)["status"] == status
    assert (folder / "report.html").stat().st_size > 1000
    assert main(["advise", "--resume", str(folder), "--budget", "1h"]) == 0
    assert (folder / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()


TOGETHER = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("command", "changes", "found"),
    [
        ("report x", {"RANK": "abc"}, "RANK should"),
        # Each process says so: there is no first one that would speak for it.
        ("advise", {"RANK": ""}, "no RANK."),
        ("advise", {"MASTER_ADDR": "", "MASTER_PORT": ""}, "no MASTER_ADDR, MASTER_PORT."),
        # RANK without WORLD_SIZE, as some schedulers leave it: there is one process.
        ("advise nonsense", {"WORLD_SIZE": ""}, "'nonsense'"),
    ],
)
def test_an_environment_that_no_launcher_makes(command, changes, found, refused, monkeypatch):
    for name, value in (TOGETHER | changes).items():
        monkeypatch.setenv(name, value)
    assert found in refused(*command.split())


def test_only_the_first_rank_speaks(folder, capsys, monkeypatch):
    """This process is the second of two; what would end it is an exception."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    for name, value in TOGETHER.items():
        monkeypatch.setenv(name, value)
    (folder / "report.html").unlink()
    for command, code in ((["report", "nowhere"], 2), (["advise", "--resume", str(folder)], 0)):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--debug"] if code == 0 else command)
        assert ended.value.code == code
    assert capsys.readouterr() == ("", "")
    assert not (folder / "report.html").exists()
    # Alone, it swallows no result.
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["advise", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"


def test_a_reader_that_leaves_is_no_error():
    """A pipe's, as `head` does; Python's own code would be 120."""
    reading, output = os.pipe()
    os.close(reading)
    assert run_program("--help", module="steadygrad", stdout=output) == (0, "", "")
    os.close(output)
