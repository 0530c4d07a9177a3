"""The command line itself: help, what cannot be understood, and the commands beside the studies."""

import re
import shlex
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from steadygrad import __version__
from steadygrad._checks import InputError
from steadygrad._studies import STUDIES
from steadygrad.cli import main
from steadygrad.cli.options import AUTO, Parser, _add_setting, options_of, parser, seconds
from steadygrad.studies.schema import TASKS, Count
from steadygrad.tasks import BUILT_IN, load_task
from tests.unit.cli.quick import ROOT

OTHERS = ["diff", "report", "init", "doctor"]
# Options of one study only, of which its examples show one or two.
OWN = {
    "advise": {"tolerance"},
    "compare": {"optimizers", "add"},
    "inspect": {"steps"},
    "ab": {"metric", "task"},
}


def test_the_version_and_the_overview(capsys):
    assert main(["advise", "--version"]) == 0
    assert capsys.readouterr().out == f"steadygrad {__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    # The text of a long name begins on the next line.
    assert re.findall(r"^    ([a-z]+)\b", out, re.M) == [*STUDIES, *OTHERS]


@pytest.mark.parametrize("word", ["--version", "--help", "-h"])
def test_after_two_dashes_a_word_is_an_arm(word, refused):
    assert "Found 'x'" in refused("ab", "--seed", "x", "--", "a", word)


@pytest.mark.parametrize("command", [*STUDIES, *OTHERS])
def test_help(command, capsys):
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: steadygrad {command} ")
    assert err == ""
    assert ("--budget TIME" in out) == (command not in OTHERS)
    page = re.search("documentation: (.+) in the source", out)
    assert (ROOT / page[1]).is_file()
    for words in ([command, "-h"], ["help", command]):
        assert main(words) == 0
        assert capsys.readouterr().out == out
    # Whoever has read an option's name needs an example next.
    examples = re.findall(r"^  steadygrad (.+)$", out, re.M)
    assert examples[0].split()[0] == command
    named = [options_of(name).read(words) for name, *words in map(shlex.split, examples)]
    assert set().union(*named) >= OWN.get(command, set())
    # What programs that write completions are told of.
    required = ["x"] * {"report": 1, "init": 1, "diff": 2}.get(command, 0)
    found = vars(parser().parse_args([command, *required, "--debug"]))
    assert found == {"debug": True, **options_of(command).read(required)}


# A command line, and what its error names: the argument, and what was found.
USAGE = {
    "": ("COMMAND", *STUDIES, *OTHERS),
    "advize": ("'advize'", "mean 'advise'"),
    "--json": ("'--json'",),
    "advise --sed 1": ("'--sed'", "--seed"),
    "advise char-lm b": ("'b'",),
    "advise --seed": ("--seed",),
    "report": ("RUN",),
    "advise --seed x": ("--seed", "`int`", "'x'"),
    "advise --seed -1": ("--seed", ">= 0", "'-1'"),
    "advise --dtype int8": ("--dtype", "'float64'", "'int8'"),
    "advise --tolerance nan": ("--tolerance", "'nan'"),
    "advise ''": ("TASK", "''"),
    "advise --resume nowhere": ("header.json",),
    "report 'a\0b'": ("RUN", r"'a\x00b'"),
    "advise --budget 0s": ("--budget", "'0s'"),
    "advise --budget 1e9h": ("--budget", "'1e9h'"),
    "init notes.txt": ("FILE", "'notes.txt'"),
    # A name that cannot be pasted or used.
    "init 'a\nb.py'": ("FILE",),
    "init folder/.py": ("FILE",),
}


@pytest.mark.parametrize("words", USAGE, ids=ascii)
def test_a_command_line_that_cannot_be_used_is_one_line(words, refused):
    line = refused(*shlex.split(words))
    assert [part for part in (*USAGE[words], "Remedy: ") if part not in line] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [("30s", 30), ("1.5h", 5400), ("2h", 7200), ("45", 45), (" 2 M ", 120), ("1h 3m20s", 3800)],
)
def test_a_budget_is_a_duration(text, found):
    assert seconds(text) == found


def test_a_setting_may_have_bounds_beside_its_description():
    options, about = Parser("ab", "", [], "ab"), Meta(description=f"How many; {AUTO}: all.")
    _add_setting(options, "many", Annotated[Count, about], 0)
    assert [options.read([f"--many={text}"])["many"] for text in ("3", "auto")] == [3, 0]
    with pytest.raises(InputError, match=">= 0"):
        options.read(["--many=-1"])


def test_values_have_their_types_and_only_what_is_named_is_given():
    assert options_of("advise").read([]) == {}
    words = ["--seed=3", "my.py:task", "--tolerance", ".5", "--budget", "1.5h", "--keep-half-life"]
    assert options_of("advise").read([*words, "--workers", "auto", "--samples=auto"]) == {
        "seed": 3,
        "task": "my.py:task",
        "tolerance": 0.5,
        "budget": 5400.0,
        "keep_half_life": True,
        "workers": 0,
        "samples": 0,
    }
    # The last of two equal options counts.
    found = options_of("inspect").read(["--steps", "16", "--steps", "32", "--out", "x", "--json"])
    assert found == {"steps": 32, "out": Path("x"), "json": True}


def test_the_help_names_every_built_in_task():
    assert [*BUILT_IN] == [*TASKS]
    for study in ("advise", "compare", "inspect"):
        assert ",".join(BUILT_IN) in "".join(options_of(study).format_help().split())


@pytest.mark.parametrize(
    "name", ["mine.py", "back\\Nslash.py", 'q"""x.py', "it's my $HOME.py", "größe.py", "a:b.py"]
)
def test_the_task_that_is_written_runs_by_the_command_that_is_printed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = []
    monkeypatch.setattr("steadygrad.cli.commands.emit", printed.append)
    assert main(["init", name]) == 0
    words = shlex.split(re.search("`(.+)`", *printed)[1])
    assert words == ["steadygrad", "advise", f"{name}:make_task", "--budget", "2m"]
    assert load_task(words[2]).name == "linear-regression"
    if name == "mine.py":
        example = (ROOT / "examples/my_task.py").read_text()
        written = (tmp_path / name).read_text()
        assert written == example.replace("examples/my_task.py", "FILE")


def test_a_file_that_exists_is_left_alone(tmp_path, refused):
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / "link.py").symlink_to("elsewhere")
    for name in ("mine.py", "link.py"):
        assert f"{name}: File exists" in refused("init", name)
    assert (tmp_path / "mine.py").read_text() == "x = 1\n"
