"""The command line itself: help, version, and what cannot be understood."""

import re
import shlex
import subprocess

import pytest

from steadygrad import __version__
from steadygrad.cli import main
from steadygrad.cli.options import chosen, options_of, parse_budget, parser
from steadygrad.studies.schema import STUDIES, TASKS
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
    named = set()
    for name, *words in map(str.split, examples):
        values = options_of(name).read(words)
        named |= {*values}
        assert name not in STUDIES or chosen(name, values)
    assert named >= OWN.get(command[0], set())


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, question in STUDIES.items():
        assert f"{name} {question}" in out
    assert "report Draw the page of a run again from its record." in out


@pytest.mark.parametrize("command", [*STUDIES, "report", "tasks", "init", "doctor"])
def test_the_parser_for_completions_has_every_option(command, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([command, "--help-me"])
    assert "unrecognized arguments" in capsys.readouterr().err
    found = {*vars(parser().parse_args([command]))}
    own = {action.dest for action in options_of(command).parser._actions}
    assert own <= found
    assert "debug" in own


def completions(command):
    """Completions for the value of each option: words, or a function of a shell."""
    actions = options_of(command).parser._actions
    offered = {a.dest: getattr(a, "complete", a.choices) for a in actions}
    return {name: what for name, what in offered.items() if what}


@pytest.mark.parametrize("command", STUDIES)
def test_values_that_are_known_are_completed(command):
    offered = completions(command)
    assert offered["device"] == ["auto", "cpu", "cuda", "mps"]
    assert offered["sharding"] == ["ddp", "fsdp2"]
    assert ("dtype" in offered) == (command != "inspect")
    assert {*offered} - {"dtype"} == {"TASK", "device", "sharding", "out", "resume"}
    assert {*completions("report")} == {"RUN"}


def test_a_task_is_completed_by_the_names_of_tasks_and_by_files(tmp_path):
    assert [*BUILT_IN] == [*TASKS]
    (tmp_path / "digits_of_mine.py").touch()
    task = completions("advise")["TASK"]
    script = f"{task['preamble']['bash']}\n{shlex.join([task['bash'], 'digits'])}"
    out = subprocess.check_output(["bash", "-c", script], cwd=tmp_path, text=True)
    assert out.split() == [*TASKS[1:], "digits_of_mine.py"]


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
        "(default: runs/advise-DATE-TIME)",
    ):
        assert text in out
    # Neither a default that is no text nor a flag's.
    assert "how many at a time. --sharding" in out
    assert "whatever the batch size. --out" in out


USAGE = {
    "nothing": (
        [],
        "a command: advise, compare, inspect, report, tasks, init or doctor. Found none.",
    ),
    "unknown command": (["advize"], "Found 'advize'. Remedy: steadygrad advise, or steadygrad --h"),
    "empty command": (
        [""],
        "Expected a command: advise, compare, inspect, report, tasks, init or doctor. Found ''.",
    ),
    "no command": (
        ["--json"],
        "Expected a command: advise, compare, inspect, report, tasks, init or doctor. Found '--js",
    ),
    "unknown flag": (["advise", "--sed", "1"], "Found '--sed'. Remedy: --seed, or steadygrad adv"),
    "unknown flag with =": (["advise", "--bdget=5m"], "Found '--bdget=5m'. Remedy: --budget, or"),
    "unlike any flag": (["advise", "-q"], "Found '-q'. Remedy: steadygrad advise --help."),
    "abbreviated": (["advise", "--tol", "1"], "Expected an option of `steadygrad advise`. Found"),
    "another's option": (["inspect", "--tolerance", "0.1"], "an option of `steadygrad inspect`."),
    "two words": (["advise", "char-lm", "b"], "Unexpected argument 'b'. Remedy: steadygrad advise"),
    "no value": (["advise", "--seed"], "a value after --seed. Found none. Remedy: steadygrad advi"),
    "a flag for a value": (["advise", "--out", "--json"], "a value after --out. Found none. Rem"),
    "a value for a flag": (["advise", "--json=yes"], "no value after --json. Found 'yes'. Remedy:"),
    "no run": (["report"], "the folder of a run. Found none. Remedy: steadygrad report runs/mine."),
    "a flag of another": (["report", "run", "--seed", "1"], "an option of `steadygrad report`."),
    "two runs": (["report", "a", "b"], "Unexpected argument 'b'. Remedy: steadygrad report --help"),
    "no file": (
        ["init"],
        "FILE should name a file of Python, in characters that can be printed. Found ''. Remedy: ",
    ),
    "no file of Python": (["init", "notes.txt"], "printed. Found 'notes.txt'. Remedy: such as"),
    "no folder": (
        ["init", "no/such.py"],
        "FILE should be a new file that can be written. Found n",
    ),
    "a name of a task": (["tasks", "char-lm"], "Unexpected argument 'char-lm'. Remedy: steadygra"),
    "no number": (
        ["advise", "--seed", "x"],
        (
            "--seed should be an integer of at least 0. Found 'x'. "
            "Remedy: --seed 0, or see steadygrad advise --help."
        ),
    ),
    "half a number": (["advise", "--seed", "1.5"], "Found '1.5'. Remedy: --seed 0, or see"),
    "negative seed": (["advise", "--seed", "-1"], "Found '-1'. Remedy: --seed 0, or see steadygr"),
    "dtype": (["advise", "--dtype", "int8"], "float64. Found 'int8'. Remedy: --dtype float32, or"),
    "device": (["advise", "--device", "tpu"], "one of auto, cpu, cuda, mps. Found 'tpu'. Remedy: "),
    "workers": (["advise", "--workers", "9999"], "--workers should be an integer from 0 to 1024."),
    "tolerance": (["advise", "--tolerance", "-1"], "a number from 0.01 to 1. Found '-1'. Remedy:"),
    "tolerance is nan": (["advise", "--tolerance", "nan"], "Found 'nan'. Remedy: --tolerance 0.2"),
    "steps": (["inspect", "--steps", "15"], "--steps should be an integer of at least 16. Found"),
    "steps are words": (["inspect", "--steps", "many"], "Found 'many'. Remedy: leave --steps aw"),
    "empty task": (["advise", ""], "TASK should be a text that is not empty. Found ''. Remedy: T"),
    "empty address": (
        ["advise", "--dask", ""],
        "--dask should be a text that is not empty. Found ''. Remedy: leave --dask away, or see",
    ),
    "empty address with =": (
        ["inspect", "--dask="],
        "a text that is not empty. Found ''. Remedy: ",
    ),
    "blank address": (["compare", "--dask", " "], "--dask should be a text that is not empty."),
    "empty added": (["compare", "--add", ""], "Found ''. Remedy: leave --add away, or see stead"),
    "blank optimizers": (["compare", "--optimizers", " "], "a text that is not empty. Found ' '."),
    "empty batches": (["compare", "--batches="], "Found ''. Remedy: --batches 1, or see steadygr"),
    "blank task": (["advise", " "], "TASK should be a text that is not empty. Found ' '. Remedy: "),
    "empty device": (["advise", "--device="], "auto, cpu, cuda, mps. Found ''. Remedy: --device "),
    "empty out": (["advise", "--out", ""], "--out should name the folder of a run. Found ''. Rem"),
    "empty resume": (["advise", "--resume="], "--resume should name the folder of a run. Found ''"),
    "empty run": (["report", ""], "RUN should name the folder of a run. Found ''. Remedy: such as"),
    "null in a path": (["report", "a\0b"], "RUN should name the folder of a run. Found 'a\\x00b'."),
    "no time": (
        ["advise", "--budget", "0s"],
        "in s, m or h: more than 0 and less than 1e9 seconds. Found '0s'. Remedy: --bud",
    ),
    "days": (
        ["advise", "--budget", "10d"],
        "less than 1e9 seconds. Found '10d'. Remedy: --budg",
    ),
    "help for nothing": (["help", "advize"], "Found 'advize'. Remedy: steadygrad advise, or stead"),
    "less than none": (["advise", "--budget", "-5m"], "Found '-5m'. Remedy: --budget 5m, or"),
    "no duration": (["inspect", "--budget", "soon"], "Found 'soon'. Remedy: --budget 5m, or"),
    "for ever": (["advise", "--budget", "1e9h"], "--budget should be a duration such as 30s"),
}


@pytest.mark.parametrize("case", USAGE)
def test_a_command_line_that_cannot_be_used_is_one_line(case, refused):
    arguments, message = USAGE[case]
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1.5h", 5400), ("2h", 7200), ("45", 45), (" 2 M ", 120)],
)
def test_a_budget_is_a_duration(text, seconds):
    assert parse_budget(text) == seconds


def given(command, *words):
    return chosen(command, options_of(command).read(words))


def test_values_have_their_types_and_only_what_is_named_is_given():
    assert given("advise") == {}
    words = ["--seed=3", "my.py:task", "--tolerance", ".5", "--budget", "1.5h", "--keep-half-life"]
    assert given("advise", *words) == {
        "seed": 3,
        "task": "my.py:task",
        "tolerance": 0.5,
        "budget": 5400.0,
        "keep_half_life": True,
    }
    assert given("inspect", "--steps", "32", "--out", "x", "--json") == {"steps": 32}


def test_the_last_of_two_equal_options_counts():
    assert given("advise", "--seed", "1", "--seed", "2") == {"seed": 2}
