"""Faults around the program: one line, exit code 2, and no result is lost."""

import json
import os
import shutil
import textwrap

import pytest

from steadygrad.cli import main
from steadygrad.studies.folder import read_run
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import run_program, tiny
from tests.unit.studies.framework import recorded


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_leaves_is_no_error(stream, folder):
    """As `head` does; the study is in its folder."""
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ["advise", "--resume", str(folder), "--json"]
    with open(writing, "wb") as sink:
        code, *said = run_program(*arguments, module="steadygrad", **{stream: sink})
    assert code == 0
    assert "Error" not in said[0] + said[1]
    assert "Exception ignored" not in said[0] + said[1]


def test_closed_standard_output_is_no_error(folder):
    arguments = ["report", str(folder)]
    code, _, err = run_program(*arguments, module="steadygrad", preexec_fn=lambda: os.close(1))
    assert (code, err) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_standard_output_is_one_line():
    with open("/dev/full", "wb") as sink:
        code, _, err = run_program("--version", stdout=sink)
    assert code == 2
    assert err.count("\n") == 1
    assert "Found No space left on device. Remedy" in err


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_progress_that_nobody_can_read_ends_no_study(tmp_path):
    with open("/dev/full", "wb") as sink:
        arguments = ["advise", tiny(), *PLAIN, "--out", str(tmp_path / "run"), "--json"]
        _, out, _ = run_program(*arguments, stderr=sink)
    assert json.loads(out)["status"] == "complete"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
@pytest.mark.parametrize("command", [["--version"], ["report", "x"], ["advise"]], ids=" ".join)
def test_an_environment_that_no_launcher_makes(name, command, refused, monkeypatch):
    monkeypatch.setenv(name, "abc")
    message = f"The environment variable {name} should be a whole number, as torchrun sets it."
    assert f"{message} Found 'abc'. Remedy: unset {name}" in refused(*command)


TOGETHER = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("names", [("RANK",), ("MASTER_ADDR", "MASTER_PORT")], ids=" ".join)
def test_processes_that_cannot_find_each_other(names, refused, monkeypatch):
    """Each process says so: there is no first one that would speak for it."""
    for name, value in TOGETHER.items():
        monkeypatch.setenv(name, value)
    for name in names:
        monkeypatch.delenv(name)
    line = refused("advise", tiny(), "--out", "run")
    assert "RANK, MASTER_ADDR, MASTER_PORT where WORLD_SIZE = 2, as torchrun sets them." in line
    assert f"Found no {', '.join(names)}. Remedy: unset WORLD_SIZE, or start with" in line


def test_a_rank_alone_swallows_no_message(refused, monkeypatch):
    """RANK without WORLD_SIZE, as some schedulers leave it: there is one process."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "Found 'nonsense'" in refused("advise", "nonsense", "--out", "run")


def test_a_rank_alone_swallows_no_result(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["advise", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A run that its budget ended before the second point, in the test's own folder."""
    from steadygrad.studies.deadline import Deadline

    folder = tmp_path / "run"

    def left(deadline):
        return 0.0 if len(list(folder.glob("results/branch-*"))) >= 6 else 100.0

    with monkeypatch.context() as clock:
        clock.setattr(Deadline, "left", left)
        assert main(["advise", tiny(), *PLAIN, "--out", str(folder)]) == 0
    assert (folder / "checkpoints").is_dir()
    return folder


@pytest.mark.slow
def test_a_file_in_place_of_the_checkpoints(interrupted, capsys):
    capsys.readouterr()
    before = recorded(interrupted)
    shutil.rmtree(interrupted / "checkpoints")
    (interrupted / "checkpoints").write_text("mine")
    assert main(["advise", "--resume", str(interrupted)]) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert "The study failed before its budget was over" in " ".join(out.split())
    assert f"Report: {interrupted / 'report.html'}" in out
    assert line.startswith("steadygrad: training at 128: ")
    assert f"The results are kept. --resume {interrupted} continues" in line
    assert "Expected a folder for checkpoints at" in line
    assert "Remedy: remove what is in its place." in line
    assert (interrupted / "checkpoints").read_text() == "mine"
    assert recorded(interrupted) >= before
    (interrupted / "checkpoints").unlink()
    assert main(["advise", "--resume", str(interrupted), "--budget", "1h"]) == 0
    assert read_run(interrupted).summary["status"] == "complete"


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["words", "json"])
def test_a_page_that_cannot_be_written_costs_no_result(folder, flags, capsys):
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    assert main(["advise", "--resume", str(folder), *flags]) == 2
    out, err = capsys.readouterr()
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads(out) == summary if flags else summary["answer"] in " ".join(out.split())
    assert "Report:" not in out + err
    line = err.splitlines()[-1]
    assert line.startswith(f"steadygrad: Cannot write to {str(folder / 'report.html')!r}: Is")
    assert "Remedy: make room there and --resume a run that is begun" in line
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr() == ("", f"{line}\n")
    (folder / "report.html").rmdir()
    assert main(["report", str(folder / "header.json")]) == 0


def test_a_second_interrupt_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """The first one is handled; the second one ends the process wherever it is."""

    def leave(*arguments):
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    monkeypatch.setattr("steadygrad.studies.work.work_on", leave)
    assert main(["advise", tiny(), *PLAIN, "--out", str(folder)]) == 130
    said = f"steadygrad: stopped; --resume {folder} continues the run."
    assert capsys.readouterr().err.splitlines()[-1] == said


@pytest.mark.slow
def test_debug_shows_the_traceback_of_a_worker_process(tmp_path):
    arguments = ["--device", "cpu", "--threads", "1", "--workers", "2", "--debug"]
    folder = str(tmp_path / "run")
    code, _, err = run_program("advise", tiny("loss_raises_later"), *arguments, "--out", folder)
    assert code == 2
    assert "in boom" in err
    assert ": Task.per_sample_loss" in err.splitlines()[-1]


TASKS = """
from tests.unit.studies.tiny_task import boom, call_after, losses, make_data, make_task


class Halt(BaseException):
    pass


def halt(*arguments):
    raise Halt("\\x1b[31mred\\nsecond line")


def leave(*arguments):
    raise SystemExit(3)


def factory_halts():
    halt()


def factory_leaves():
    leave()


def model_halts():
    return make_task(make_model=halt)


def loss_halts():
    return make_task(per_sample_loss=halt)


def loss_halts_later():
    return make_task(per_sample_loss=call_after(100, losses, halt))


def loss_leaves_later():
    return make_task(per_sample_loss=call_after(100, losses, leave))


def evaluate_halts():
    return make_task(evaluate=halt)


def samples_halt_later():
    data = make_data(4096, 0)
    data.batch = call_after(100, data.batch, halt)
    return make_task(train=data)


def odd_names():
    return make_task(name="ti\\x1b[2Jny\\nline", sample="r\\x1bow")
"""


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(textwrap.dedent(TASKS))
    return path


# What a task raises that no `except Exception` would catch, and what it is called.
OWN = {
    "factory_halts": "Halt",
    "factory_leaves": "SystemExit: 3",
    "model_halts": "Halt",
    "loss_halts": "Halt",
    "loss_halts_later": "Halt",
    "loss_leaves_later": "SystemExit: 3",
    "evaluate_halts": "Halt",
    "samples_halt_later": "Halt",
}


@pytest.mark.parametrize("factory", OWN)
def test_a_task_s_own_base_exception_is_one_clean_line(factory, tasks, refused):
    arguments = ["advise", f"{tasks}:{factory}", *PLAIN, "--out", "run"]
    line = refused(*arguments, writes="later" in factory)
    assert f"Found {OWN[factory]}" in line
    assert "\x1b" not in line
    assert ("\\x1b[31mred" in line) == (OWN[factory] == "Halt")


def test_a_task_s_names_cannot_rewrite_the_terminal(tasks, tmp_path, capsys):
    arguments = ["advise", f"{tasks}:odd_names", *PLAIN, "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert r"ti\x1b[2Jny\nline" in out
    assert r"r\x1bows" in " ".join(out.split())
    # The files keep what the task said.
    assert read_run(tmp_path / "run").header.task.name == "ti\x1b[2Jny\nline"


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_folders_whose_names_are_not_utf8(workers, tmp_path, monkeypatch):
    home = tmp_path / os.fsdecode(b"caf\xe9")
    home.mkdir()
    monkeypatch.chdir(home)
    shutil.copy(tiny().rpartition(":")[0], home / "mine.py")
    arguments = ["--device", "cpu", "--threads", "1", "--workers", workers, "--out", "run"]
    assert main(["advise", "mine.py:make_task", *arguments]) == 0
    (home / "run" / "summary.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "--resume", str(home / "run")]) == 0
    assert main(["report", str(home / "run")]) == 0
