"""The command line itself: help, version, and what cannot be understood."""

import re
import shlex
from pathlib import Path

import pytest

from steadygrad import __version__
from steadygrad._studies import STUDIES
from steadygrad.cli import main
from steadygrad.cli.options import options_of, parser, seconds
from steadygrad.studies.schema import TASKS
from steadygrad.tasks import BUILT_IN
from tests.unit.cli.quick import ROOT


@pytest.mark.parametrize("arguments", [["--version"], ["advise", "--version"]])
def test_version(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"steadygrad {__version__}\n"


OTHERS = [["report"], ["tasks"], ["init"], ["doctor"]]
# Options of one study only, of which its examples show one or two.
OWN = {
    "advise": {"tolerance"},
    "compare": {"optimizers", "add"},
    "inspect": {"steps", "accumulation"},
    "ab": {"metric", "task"},
}
COMMANDS = [[], *([name] for name in STUDIES), *OTHERS]


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command, flag, capsys):
    assert main([*command, flag]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: {' '.join(['steadygrad', *command])} ")
    assert err == ""
    assert ("--budget TIME" in out) == (command not in ([], *OTHERS))
    # Whoever has read an option's name needs an example next.
    assert f"examples:\n  {' '.join(['steadygrad', *command])}" in out
    page = re.search("documentation: (.+) in the source", out)
    assert (ROOT / page[1]).is_file()
    assert main(["help", *command]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("command", [command for command in COMMANDS if command])
def test_every_example_can_be_read(command, capsys):
    assert main([*command, "--help"]) == 0
    examples = re.findall(r"^  steadygrad (.+)$", capsys.readouterr().out, re.M)
    assert len(examples) >= 1
    named = {
        key for name, *words in map(shlex.split, examples) for key in options_of(name).read(words)
    }
    assert named >= OWN.get(command[0], set())


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, question in STUDIES.items():
        assert f"{name} {question}" in out
    assert "report Draw the page of a run again from its record." in out


@pytest.mark.parametrize("command", COMMANDS[1:], ids=" ".join)
def test_the_parser_for_completions_has_every_option(command):
    words = ["x"] if command in (["report"], ["init"]) else []
    found = vars(parser().parse_args([*command, *words, "--debug"]))
    assert found == {"debug": True, **options_of(command[0]).read(words)}


def completions(command):
    """Completions for the value of each option: words, or a function of a shell."""
    actions = options_of(command)._actions
    offered = {a.dest: getattr(a, "complete", a.choices) for a in actions}
    return {name: what for name, what in offered.items() if what}


@pytest.mark.parametrize("command", STUDIES)
def test_values_that_are_known_are_completed(command):
    offered = completions(command)
    assert offered["device"] == ("auto", "cpu", "cuda", "mps")
    assert offered["sharding"] == ("ddp", "fsdp2")
    assert ("dtype" in offered) == (command != "inspect")
    assert ("goal" in offered) == (command == "ab")
    assert {*offered} - {"dtype", "goal"} == {"task", "device", "sharding", "out", "resume"}
    assert {*completions("report")} == {"RUN"}


def test_the_help_names_the_built_in_tasks():
    assert [*BUILT_IN] == [*TASKS]


def test_the_help_of_an_option_has_its_bounds_choices_and_default(capsys):
    assert main(["advise", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        (
            "--device auto|cpu|cuda|mps Device to train on; auto prefers CUDA, then the CPU. "
            "(default: auto)"
        ),
        "--seed INT Random seed. (default: 0)",
        (
            "--tolerance NUMBER Extra samples that are acceptable, as a fraction: 0.01 to 1 "
            "(default: 0.2)"
        ),
        "With --resume: time from now on. (default: 5m)",
        "--keep-half-life Keep the half-life",
        "--samples INT Samples of the training",
        "--seeds INT Most seeds",
        "(default: runs/advise-DATE-TIME)",
    ):
        assert text in out
    # Neither a default that is no text nor a flag's.
    assert "how many at a time. --sharding" in out
    assert "whatever the batch size. --samples" in out


LIST = f"Expected a command: {', '.join(STUDIES)}, report, tasks, init or doctor."
# A command line, and what its error names: the argument, and what was found.
USAGE = {
    "nothing": ([], f"{LIST} Found none."),
    "unknown command": (["advize"], f"{LIST} Found 'advize'. Remedy: steadygrad advise, or"),
    "no command": (["--json"], f"{LIST} Found '--json'."),
    "help for nothing": (["help", "advize"], "Found 'advize'. Remedy: steadygrad advise, or"),
    "unknown flag": (["advise", "--sed", "1"], "Found '--sed'. Remedy: --seed, or steadygrad adv"),
    "unknown flag with =": (["advise", "--bdget=5m"], "Found '--bdget=5m'. Remedy: --budget, or"),
    "two words": (["advise", "char-lm", "b"], "Found 'b'. Remedy: steadygrad advise --help."),
    "no value": (["advise", "--seed"], "--seed"),
    "a flag for a value": (["advise", "--out", "--json"], "--out"),
    "a value for a flag": (["advise", "--json=yes"], "--json"),
    "no run": (["report"], "RUN"),
    "no file": (["init"], "FILE"),
    "no file of Python": (["init", "notes.txt"], "FILE", "Found 'notes.txt'."),
    "a name of a task": (["tasks", "char-lm"], "Found 'char-lm'."),
    "no number": (["advise", "--seed", "x"], "--seed", "`int`", "Found 'x'."),
    "negative seed": (["advise", "--seed", "-1"], "--seed", ">= 0", "Found '-1'."),
    "dtype": (["advise", "--dtype", "int8"], "--dtype", "'float64'", "'int8'"),
    "device": (["advise", "--device", "tpu"], "--device", "'auto', 'cpu', 'cuda', 'mps'", "'tpu'"),
    "auto is for workers": (["advise", "--seed", "auto"], "--seed", "Found 'auto'."),
    "tolerance is nan": (["advise", "--tolerance", "nan"], "--tolerance", "Found 'nan'."),
    "empty task": (["advise", ""], "TASK", "Found ''."),
    "blank task": (["advise", " "], "TASK", "Found ' '."),
    "empty address": (["advise", "--dask", ""], "--dask", "Found ''."),
    "empty device": (["advise", "--device="], "--device", "''"),
    "empty out": (["advise", "--out", ""], "--out", "Found ''."),
    "empty resume": (["advise", "--resume="], "--resume", "Found ''."),
    "empty run": (["report", ""], "RUN", "Found ''."),
    "null in a path": (["report", "a\0b"], "RUN", "Found 'a\\x00b'."),
    "no time": (["advise", "--budget", "0s"], "--budget", "Found '0s'."),
    "days": (["advise", "--budget", "10d"], "--budget", "30s, 5m or 2h", "Found '10d'."),
    "less than none": (["advise", "--budget=-5m"], "--budget", "Found '-5m'."),
    "seconds or minutes": (["advise", "--budget", "1h30"], "--budget", "Found '1h30'."),
    "no duration": (["inspect", "--budget", "soon"], "--budget", "Found 'soon'."),
    "for ever": (["advise", "--budget", "1e9h"], "--budget", "Found '1e9h'."),
}


@pytest.mark.parametrize("case", USAGE)
def test_a_command_line_that_cannot_be_used_is_one_line(case, refused):
    arguments, *parts = USAGE[case]
    line = refused(*arguments)
    assert all(part in line for part in (*parts, "Remedy: "))


@pytest.mark.parametrize(
    ("text", "found"),
    [("30s", 30), ("1.5h", 5400), ("2h", 7200), ("45", 45), (" 2 M ", 120), ("1h 3m20s", 3800)],
)
def test_a_budget_is_a_duration(text, found):
    assert seconds(text) == found


def test_values_have_their_types_and_only_what_is_named_is_given():
    assert options_of("advise").read([]) == {}
    words = ["--seed=3", "my.py:task", "--tolerance", ".5", "--budget", "1.5h", "--keep-half-life"]
    assert options_of("advise").read([*words, "--workers", "auto", "--threads=auto"]) == {
        "seed": 3,
        "task": "my.py:task",
        "tolerance": 0.5,
        "budget": 5400.0,
        "keep_half_life": True,
        "workers": 0,
        "threads": 0,
    }
    found = options_of("inspect").read(["--steps", "32", "--out", "x", "--json"])
    assert found == {"steps": 32, "out": Path("x"), "json": True}


def test_the_last_of_two_equal_options_counts():
    assert options_of("advise").read(["--seed", "1", "--seed", "2"]) == {"seed": 2}
