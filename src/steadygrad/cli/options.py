"""The commands' options. Their texts are the program's help."""

import io
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

import tyro
from tyro.conf import Positional, arg

from steadygrad._checks import InputError

__all__ = ["Advise", "Inspect", "Report", "parse"]

DESCRIPTION = (
    "Measures what a PyTorch training loop does to a gradient between backward() and the weights. "
    "`steadygrad --version` tells the version."
)


def _arg(metavar: str, default: str = "") -> Any:
    """How the help shows an option whose default is not a value of its own."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


# Every value is a text: what is wrong with one is said by who reads it, in our own words.
@dataclass(frozen=True)
class Advise:
    """Which batch size to train at: noise scale, and critical batch size measured by branches."""

    command: ClassVar[str] = "advise"

    task: Annotated[Positional[str | None], _arg("TASK", "char-lm")] = None
    """What to train: char-lm, digits-classifier, digits-autoencoder, digits-deep, or
    path/to/file.py:make_task."""
    budget: Annotated[str | None, _arg("TIME", "5m")] = None
    """Time for the whole study: 30s, 5m, 2h. With --resume: time from now on."""
    seed: Annotated[str | None, _arg("INT", "0")] = None
    """Of everything random: 0, 1, 2, ..."""
    out: Annotated[str | None, _arg("FOLDER", "runs/advise-DATE-TIME")] = None
    """Folder of the run; absent or empty."""
    device: Annotated[str | None, _arg("auto|cpu|cuda", "auto")] = None
    """auto is CUDA where there is one."""
    dtype: Annotated[str | None, _arg("float32|bfloat16|float16|float64", "float32")] = None
    """bfloat16 and float16 by autocast."""
    tolerance: Annotated[str | None, _arg("FRACTION", "0.2")] = None
    """Extra samples that are acceptable, as a fraction: 0.01 to 1."""
    resume: Annotated[str | None, _arg("RUN")] = None
    """Go on with the run in this folder, as it was planned; only --budget may differ."""
    json: bool = False
    """Print the summary as JSON on stdout, and everything else on stderr."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Inspect:
    """Where float16 gradients underflow or overflow, layer by layer, and which scales mend it."""

    command: ClassVar[str] = "inspect"

    task: Annotated[Positional[str | None], _arg("TASK", "char-lm")] = None
    """What to train: char-lm, digits-classifier, digits-autoencoder, digits-deep, or
    path/to/file.py:make_task."""
    steps: Annotated[str | None, _arg("INT", "200")] = None
    """Optimizer steps with one loss scale; as many find scales, and as many try those proposed."""
    budget: Annotated[str | None, _arg("TIME", "5m")] = None
    """Time after which the study ends, whole or not: 30s, 5m, 2h. With --resume: from now on."""
    seed: Annotated[str | None, _arg("INT", "0")] = None
    """Of everything random: 0, 1, 2, ..."""
    out: Annotated[str | None, _arg("FOLDER", "runs/inspect-DATE-TIME")] = None
    """Folder of the run; absent or empty."""
    device: Annotated[str | None, _arg("auto|cpu|cuda", "auto")] = None
    """auto is CUDA where there is one."""
    resume: Annotated[str | None, _arg("RUN")] = None
    """Go on with the run in this folder, as it was planned; only --budget may differ."""
    json: bool = False
    """Print the summary as JSON on stdout, and everything else on stderr."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Report:
    """Draw a run's report again."""

    run: Annotated[Positional[str], _arg("RUN")]
    """Folder of the run."""
    debug: bool = False
    """Show the traceback of an error."""


Command = Advise | Inspect | Report
COMMANDS: dict[str, type[Command]] = {"advise": Advise, "inspect": Inspect, "report": Report}


def parse(arguments: list[str]) -> Command:
    """Reads the command line; ends the process on ``--help``.

    Raises:
        InputError: If it cannot be understood.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            command, unknown = tyro.cli(
                Command,
                prog="steadygrad",
                description=DESCRIPTION,
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
                return_unknown_args=True,
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        raise _refused(arguments, _first_sentence(said.getvalue())) from None
    if unknown:
        raise _unknown(arguments[0], unknown[0])
    return command


def _refused(arguments: list[str], reason: str) -> InputError:
    """A command line that tyro does not take."""
    *others, last = COMMANDS
    listed = f"{', '.join(others)} or {last}"
    if not arguments:
        return InputError(f"Expected a command: {listed}. Found none. Remedy: steadygrad --help.")
    if arguments[0] not in COMMANDS:
        near = get_close_matches(arguments[0], COMMANDS, n=1)
        remedy = f"steadygrad {near[0]}, or steadygrad --help" if near else "steadygrad --help"
        return InputError(
            f"Expected a command: {listed}. Found {arguments[0]!r}. Remedy: {remedy}."
        )
    command, words = arguments[0], arguments[1:]
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        if word.startswith("--") and word.split("=")[0] not in _flags(command):
            return _unknown(command, word)
        if word in _flags(command, valued=True) and following.startswith("--"):
            return InputError(
                f"Expected a value after {word}. Found none. Remedy: steadygrad {command} --help."
            )
    if command == "report" and all(word.startswith("--") for word in words):
        return InputError(
            "Expected the folder of a run. Found none. Remedy: steadygrad report runs/mine."
        )
    found = " ".join(arguments)
    return InputError(f"{reason} Found {found!r}. Remedy: steadygrad {command} --help.")


def _flags(command: str, *, valued: bool = False) -> list[str]:
    """A command's flags; those that take a value, or all."""
    return [
        f"--{field.name}"
        for field in fields(COMMANDS[command])
        if field.name not in ("task", "run") and not (valued and field.type is bool)
    ]


def _unknown(command: str, word: str) -> InputError:
    """An option or a word too many."""
    near = get_close_matches(word.split("=")[0], _flags(command), n=1)
    remedy = (
        f"{near[0]}, or steadygrad {command} --help" if near else f"steadygrad {command} --help"
    )
    expected = "an option" if word.startswith("-") else "no further word"
    return InputError(
        f"Expected {expected} of `steadygrad {command}`. Found {word!r}. Remedy: {remedy}."
    )


def _first_sentence(box: str) -> str:
    """What tyro says, without its frame and without the help below the first rule."""
    lines = [line.strip("│ ") for line in box.splitlines()]
    inside = [line for line in lines if line and line[0] not in "╭╰+"]
    rules = [number for number, line in enumerate(inside) if set(line) <= set("─-")]
    text = " ".join(inside[: rules[0] if rules else None])
    return f"{text.rstrip('.:')}."
