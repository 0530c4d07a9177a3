"""``steadygrad compare`` from the shell: bad input, what it prints, and a run that goes on."""

import json

import pytest

import steadygrad
from steadygrad.cli import main
from steadygrad.studies.compare import trials
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import tiny
from tests.unit.studies.compare.runs import ADDED, planned

BAD_INPUT = {
    "unknown": (["--optimizers", "adam"], "Found 'adam'. Remedy: such as scaledadam,timm:adan;"),
    "alone": (["--optimizers", "adamw"], "Found none. Remedy: --optimizers lans."),
    "no file": (["--add", "nowhere.py:f"], "Found 'nowhere.py:f': no such file. Remedy: check"),
    "no function": (["--add", f"{ADDED}"], "added.py', without a function. Remedy: check the"),
    "no such function": (
        ["--add", f"{ADDED}:lino"],
        "The file should define 'lino', a function. Found",
    ),
    "no Python": (
        ["--add", f"{ADDED.parents[4]}/README.md:f"],
        "should run without an error. Found SyntaxError: ",
    ),
    "one seed": (["--seeds", "1"], "--seeds should be at least 2, as one difference has no in"),
    "no length": (["--samples", "-1"], "--samples: Expected `int` >= 0. Found '-1'"),
    "short": (["--samples", "8"], "--samples should be at least 128, so that the shortest runs"),
    "it raises": (["--add", f"{ADDED}:raises"], "Found RuntimeError: it broke. Remedy: --debug"),
    "no optimizer": (["--add", f"{ADDED}:is_none"], "is_none should return a torch.optim.Opt"),
    "no step": (["--add", f"{ADDED}:no_step"], "A step of the optimizer no_step should run"),
    "no rate": (["--add", f"{ADDED}:deaf"], "at the learning rate that it is handed, and"),
    "batches": (["--batches", "4,16"], "Found '4,16'. Remedy: --batches 1."),
    "no points": (["--points", "0"], "--points: Expected `int` >= 1. Found '0'."),
    "no time": (["--budget", "5s"], "The budget is too small for any answer: found 5s, expected"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_nothing_is_written(case, refused):
    arguments, message = BAD_INPUT[case]
    assert message in refused("compare", tiny(), *PLAIN, *arguments, "--out", "run")


@pytest.fixture
def small(monkeypatch):
    """A plan made by hand."""
    plan = planned(optimizers=("adamw", "lans"), seeds=2)
    monkeypatch.setattr(trials, "plan_for", lambda *args, **kwargs: plan)


@pytest.mark.slow
def test_it_prints_verdicts_and_goes_on(small, tmp_path, capsys):
    run = str(tmp_path / "run")
    arguments = [tiny(), *PLAIN, "--optimizers", "lans", "--out", run]
    assert main(["compare", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["study"] == "compare"
    assert "AdamW" in found["answer"]
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    assert main(["compare", "--resume", run]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(found["answer"].split()) in out
    assert steadygrad.compare(resume=run).summary.answer == found["answer"]
    # The optimizers are those of the record.
    assert main(["compare", "--resume", run, "--optimizers", "sgd"]) == 2
    assert "optimizers" in capsys.readouterr().err
