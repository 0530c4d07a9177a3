"""The program: exit codes, what is printed and what is left on the disk, and faults around it."""

import json
import os
import shlex
import shutil
import signal
import time

import pytest

from steadygrad._checks import InputError
from steadygrad.cli import main
from steadygrad.studies.advise.schema import Branch, Scratch
from steadygrad.studies.deadline import Deadline
from steadygrad.studies.folder import read_run
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import program, run_program, tiny
from tests.unit.studies.compare.runs import ADDED
from tests.unit.studies.framework import contents

# Options of a command with a task, and what its error names.
OPTIONS = {
    "advise": {"--resume nowhere": "header.json"},
    "compare": {
        "--optimizers adam": "--optimizers",
        f"--add {ADDED}:is_none": "is_none",
        "--samples -1": "--samples",
        "--batches 4,16": "--batches",
        "--points 0": "--points",
        "--budget 5s": "5s",
    },
}
# Factories of `tiny_task.py`, and what their error names.
FACTORIES = {
    "nothing": "'nothing'",
    "raising": "RuntimeError: no such corpus",
    "already_a_mean": "mean",
    "not_finite": "NaN",
    "empty": "len(train)",
    "batch_too_large": "batch_size = 5000",
    "model_raises": "Task.make_model",
    "model_is_none": "NoneType",
    "wrong_shapes": "RuntimeError: mat1 and mat2 shapes",
    "optimizer_raises": "Task.make_optimizer, with optimizer_takes='parameters'",
    "optimizer_is_none": "NoneType",
    "optimizer_cannot_step": "A step of the optimizer",
    "state_raises": "The state_dict of model and optimizer",
    "load_raises": "The load_state_dict of the optimizer",
    "trains_another_model": "no gradient",
    "on_meta": "NotImplementedError: Cannot copy out of meta tensor",
    "buffer_on_meta": "Cannot copy out of meta tensor",
    "frozen": "losses without a gradient",
    "evaluate_trains": "Task.evaluate",
    "evaluate_is_none": "TypeError",
    "evaluate_raises": "RuntimeError: it broke",
}
# They break after the run was begun.
LATER = {
    "loss_raises_later": "RuntimeError: it broke",
    "loss_is_a_mean_later": "mean",
    "evaluate_raises_later": "Task.evaluate",
    "state_raises_later": "The state_dict of model and optimizer",
    "load_raises_later": "The load_state_dict of the optimizer",
}


@pytest.mark.parametrize(
    ("command", "words"),
    [(name, words) for name in OPTIONS for words in OPTIONS[name]],
    ids=lambda words: words.rpartition("/")[2],
)
def test_bad_options_are_one_line_and_write_nothing(command, words, refused):
    place = [] if "--resume" in words else [tiny(), *PLAIN, "--out", "run"]
    assert OPTIONS[command][words] in refused(command, *place, *shlex.split(words))


@pytest.mark.parametrize("factory", [*FACTORIES, *LATER])
def test_a_task_that_is_broken_is_one_line(factory, tmp_path, refused):
    """Before the study begins nothing is written, and later nothing is lost."""
    later = factory in LATER
    line = refused("advise", tiny(factory), *PLAIN, "--out", "run", writes=later)
    assert (FACTORIES | LATER)[factory] in line
    assert ("--resume run" in line) == later
    if later:
        run = read_run(tmp_path / "run")
        assert (run.header.task.name, run.summary["status"]) == ("tiny", "failed")
        assert (tmp_path / "run/report.html").stat().st_size > 1000


# What a task raises that no `except Exception` would catch, and names that no terminal should see.
OWN = """
from tests.unit.studies.tiny_task import call_after, losses, make_data, make_task


class Halt(BaseException):
    pass


def halt(*arguments):
    raise Halt("\\x1b[31mred\\nsecond line")


def loss_leaves_later():
    def leave(*arguments):
        raise SystemExit(3)

    return make_task(per_sample_loss=call_after(100, losses, leave))


def samples_halt_later():
    data = make_data(4096, 0)
    data.batch = call_after(100, data.batch, halt)
    return make_task(train=data)


def odd_names():
    return make_task(name="ti\\x1b[2Jny\\nline", sample="r\\x1bow")
"""


@pytest.mark.parametrize(
    ("factory", "found"),
    [
        ("halt", r"Halt: \x1b[31mred"),
        ("loss_leaves_later", "SystemExit: 3"),
        ("samples_halt_later", r"Halt: \x1b[31mred"),
    ],
)
def test_a_task_s_own_base_exception_is_one_clean_line(factory, found, tmp_path, refused):
    (tmp_path / "tasks.py").write_text(OWN)
    arguments = ["advise", f"tasks.py:{factory}", *PLAIN, "--out", "run"]
    assert f"Found {found}." in refused(*arguments, writes="later" in factory)


def test_a_task_s_names_cannot_rewrite_the_terminal(tmp_path, capsys):
    (tmp_path / "tasks.py").write_text(OWN)
    arguments = [f"{tmp_path}/tasks.py:odd_names", *PLAIN, "--out", str(tmp_path / "run")]
    assert main(["advise", *arguments]) == 0
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


def test_debug_shows_the_task_s_own_traceback(capsys):
    assert main(["advise", tiny("raising"), *PLAIN, "--debug"]) == 2
    err = capsys.readouterr().err
    assert 'raise RuntimeError("no such corpus\\nsecond line")' in err
    assert err.splitlines()[-1].startswith("steadygrad: ")


@pytest.mark.slow
def test_debug_shows_the_traceback_of_a_worker_process(tmp_path):
    arguments = ["--device", "cpu", "--threads", "1", "--workers", "2", "--debug"]
    folder = str(tmp_path / "run")
    code, _, err = run_program("advise", tiny("loss_raises_later"), *arguments, "--out", folder)
    assert code == 2
    assert "in boom" in err
    assert "Task.per_sample_loss" in err.splitlines()[-1]


def test_a_page_that_fails_does_not_hide_why_the_study_did(refused, monkeypatch):
    def write(folder):
        raise InputError(f"no room for {folder}")

    monkeypatch.setattr("steadygrad.studies.page.write", write)
    line = refused("advise", tiny("loss_raises_later"), *PLAIN, "--out", "run", writes=True)
    assert "RuntimeError: it broke" in line


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
        ("--tolerance 0.1", "tolerance = 0.2 "),
        ("--dtype float64 --budget 1h", "dtype = 'float32'"),
        ("--keep-half-life", "leave --keep-half-life away"),
        ("char-lm", "leave TASK away"),
        ("--out elsewhere", "out = 'elsewhere'"),
    ],
)
def test_options_that_disagree_with_the_record(whole, refused, words, found):
    assert found in refused("advise", "--resume", str(whole[0]), *shlex.split(words))


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["words", "json"])
def test_a_page_that_cannot_be_written_costs_no_result(folder, flags, capsys):
    page = folder / "report.html"
    page.unlink()
    page.mkdir()
    assert main(["advise", "--resume", str(folder), *flags]) == 2
    out, err = capsys.readouterr()
    summary = summary_of(folder)
    assert json.loads(out) == summary if flags else summary["answer"] in " ".join(out.split())
    assert "Report:" not in out + err
    line = err.splitlines()[-1]
    assert line.startswith("steadygrad: ")
    assert str(page) in line
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr() == ("", f"{line}\n")
    page.rmdir()
    assert main(["report", str(folder / "header.json")]) == 0


@pytest.fixture
def over_after(tmp_path, monkeypatch):
    """Runs the tiny task until so many files of a kind are there; then the budget is over."""
    folder = tmp_path / "run"

    def run(name, count, *flags):
        def left(deadline):
            return 0.0 if len(list(folder.glob(name))) >= count else 100.0

        with monkeypatch.context() as clock:
            clock.setattr(Deadline, "left", left)
            return main(["advise", tiny("talkative"), *PLAIN, "--out", str(folder), *flags])

    return run


@pytest.mark.parametrize(
    ("name", "flags"), [("header.json", []), ("results/scratch-*", ["--json"])]
)
def test_without_a_comparison_there_is_no_advice(over_after, name, flags, tmp_path, capsys):
    """A training stays in the record and on the page; what is printed is the error alone."""
    assert over_after(name, 1, *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--resume {tmp_path / 'run'} --budget" in err.splitlines()[-1]
    # Neither the table nor the words, with --json on stderr.
    assert "validation" not in err
    assert "Nothing can be said" not in err
    run = read_run(tmp_path / "run")
    assert run.summary["status"] == "budget"
    assert run.summary["recommendation"]["batch_size"] is None
    assert len(run.select(Scratch)) == ("scratch" in name)
    assert (tmp_path / "run/report.html").exists()


def test_a_run_that_its_budget_cut_short_gets_more_time(over_after, whole, tmp_path):
    """To the numbers that a longer clock would have given at once, by the command line alone."""
    folder = tmp_path / "run"
    # It measured something, the branches of the first point: that is no error.
    assert over_after("results/branch-*", 6) == 0
    assert summary_of(folder)["status"] == "budget"
    assert main(["advise", "--resume", str(folder), "--budget", "1h"]) == 0
    assert (folder / "summary.json").read_bytes() == (whole[0] / "summary.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_partial_report(tmp_path, number, code):
    folder = tmp_path / "run"
    process = program("advise", tiny("slow"), *PLAIN, "--budget", "1h", "--out", str(folder))
    while process.poll() is None and not (folder / "results").is_dir():
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert str(folder / "report.html") in "".join(out.split())
    assert summary_of(folder)["status"] == "interrupted"
    assert (folder / "report.html").stat().st_size > 1000


def test_a_second_interrupt_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """The first one is handled; the second one ends the process wherever it is."""

    def leave(*arguments):
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    monkeypatch.setattr("steadygrad.studies.work.work_on", leave)
    assert main(["advise", tiny(), *PLAIN, "--out", str(folder)]) == 130
    assert f"--resume {folder}" in capsys.readouterr().err.splitlines()[-1]


TOGETHER = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("command", "changes", "found"),
    [
        ("--version", {"WORLD_SIZE": "abc"}, "WORLD_SIZE should"),
        ("report x", {"RANK": "abc"}, "RANK should"),
        ("advise", {"MASTER_PORT": "abc"}, "MASTER_PORT should"),
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


def test_a_reader_that_leaves_is_no_error(folder):
    """As `head` does; the study is in its folder. Python's own code would be 120."""
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ["advise", "--resume", str(folder), "--json"]
    with open(writing, "wb") as sink:
        code, *_ = run_program(*arguments, module="steadygrad", stdout=sink, stderr=sink)
    assert code == 0


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
    assert "No space left on device" in err
