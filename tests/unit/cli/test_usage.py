"""The command line itself: help, version, and what cannot be understood."""

import pytest

from steadygrad import __version__
from steadygrad.cli import main


@pytest.mark.parametrize("arguments", [["--version"], ["advise", "--version"]])
def test_version(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"steadygrad {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["advise", "--help"], ["report", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "usage: steadygrad" in out
    assert "{None}" not in out
    assert ("--budget TIME" in out) == (arguments == ["advise", "--help"])


USAGE = {
    "nothing": (
        [],
        "Expected a command: advise, inspect or report. Found none. Remedy: steadygrad --help.",
    ),
    "unknown command": (["advize"], "Found 'advize'. Remedy: steadygrad advise, or"),
    "no command": (["--json"], "Expected a command: advise, inspect or report. Found '--json'"),
    "unknown flag": (["advise", "--sed", "1"], "Found '--sed'. Remedy: --seed, or steadygrad adv"),
    "unknown flag with =": (["advise", "--bdget=5m"], "Found '--bdget=5m'. Remedy: --budget, or"),
    "two words": (["advise", "char-lm", "x"], "no further word of `steadygrad advise`. Found 'x'"),
    "no value": (["advise", "--seed"], "a value after --seed. Found none. Remedy: steadygrad advi"),
    "a flag for a value": (["advise", "--out", "--json"], "a value after --out. Found none. Rem"),
    "no run": (["report"], "the folder of a run. Found none. Remedy: steadygrad report runs/mine."),
    "a flag of another": (["report", "run", "--seed", "1"], "an option of `steadygrad report`."),
    "two runs": (["report", "a", "b"], "no further word of `steadygrad report`. Found 'b'. Remedy"),
    "no number": (
        ["advise", "--seed", "x"],
        "--seed should be an integer of at least 0. Found 'x'",
    ),
    "half a number": (["advise", "--seed", "1.5"], "Found '1.5'. Remedy: --seed 0, or see"),
    "negative seed": (["advise", "--seed", "-1"], "Found '-1'. Remedy: --seed 0, or see steadygr"),
    "dtype": (["advise", "--dtype", "int8"], "float64. Found 'int8'. Remedy: --dtype float32, or"),
    "device": (["advise", "--device", "tpu"], "cpu, cuda. Found 'tpu'. Remedy: --device auto, or"),
    "tolerance": (["advise", "--tolerance", "-1"], "from 0.01 to 1. Found '-1'. Remedy: --toleran"),
    "tolerance is nan": (["advise", "--tolerance", "nan"], "Found 'nan'. Remedy: --tolerance 0.2"),
    "empty out": (["advise", "--out", ""], "--out should name the folder of a run. Found ''. Rem"),
    "empty resume": (["advise", "--resume", ""], "--resume should name the folder of a run. Found"),
    "empty run": (["report", ""], "RUN should name the folder of a run. Found ''. Remedy: such as"),
    "no time": (["advise", "--budget", "0s"], "30s, 5m or 2h. Found '0s'. Remedy: --budget 5m."),
    "less than none": (["advise", "--budget", "-5m"], "Found '-5m'. Remedy: --budget 5m."),
    "no duration": (["advise", "--budget", "soon"], "Found 'soon'. Remedy: --budget 5m."),
}


@pytest.mark.parametrize("case", USAGE)
def test_a_command_line_that_cannot_be_used_is_one_line(case, refused):
    arguments, message = USAGE[case]
    assert message in refused(*arguments)
