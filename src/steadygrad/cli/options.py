"""The command line. A study's ``Settings`` are its options: names, types, bounds and help."""

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from steadygrad._checks import InputError
from steadygrad._studies import STUDIES

__all__ = ["chosen", "folder_of", "overview", "report_options", "study_options", "unknown_command"]

DESCRIPTION = (
    "Measures what a PyTorch training loop does to a gradient between backward() and the weights."
)
REPORT = "Draw the page of a run again from its record."
EXAMPLES = """examples:
  steadygrad {0} --budget 5m
  steadygrad {0} path/to/file.py:make_task --out runs/mine
  steadygrad {0} --resume runs/mine --budget 1h
  steadygrad report runs/mine

documentation: docs/{1}.md in the source repository"""
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
# A bound above this is there for the record's format and tells a user nothing.
FAR = 1 << 40


class Options:
    """The options of a command; argparse writes their help.

    Args:
        command: Name of the command; empty for the program itself.
        description: First lines of the help.
        epilog: Last lines of the help.
        place: Name and help of the one argument that is no option; empty for none.
    """

    def __init__(
        self, command: str, description: str, epilog: str = "", place: tuple[str, str] = ("", "")
    ) -> None:
        self.name, self.place = f"steadygrad {command}".strip(), place[0]
        self.parser = ArgumentParser(
            prog=self.name,
            description=description,
            epilog=epilog,
            formatter_class=RawDescriptionHelpFormatter,
            add_help=False,
        )
        if self.place:
            self.parser.add_argument(self.place.upper(), nargs="?", help=_escaped(place[1]))
        # Whether each flag takes a value.
        self._flags: dict[str, bool] = {}
        self.add("--help", "Show this help.")

    def add(self, flag: str, text: str, metavar: str | None = None) -> None:
        """Adds an option; without a metavar it takes no value."""
        value: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        self.parser.add_argument(flag, help=_escaped(text), **value)
        self._flags[flag] = metavar is not None

    def help(self) -> str:
        """The text of ``--help``."""
        return self.parser.format_help().rstrip()

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """The options that a command line names: texts, and True for flags without a value.

        Raises:
            InputError: If it cannot be understood.
        """
        values: dict[str, Any] = {}
        rest = ["--help" if word == "-h" else word for word in words]
        while rest:
            word = rest.pop(0)
            flag, equals, text = word.partition("=")
            value: Any = text
            takes, wrong = self._flags.get(flag), ""
            if not word.startswith("-"):
                flag, value = self.place, word
                if not self.place or self.place in values:
                    wrong = f"Unexpected argument {word!r}."
            elif takes is None:
                wrong = f"Expected an option of `{self.name}`. Found {word!r}."
            elif equals and not takes:
                wrong = f"Expected no value after {flag}. Found {value!r}."
            elif takes and not equals and (not rest or rest[0].startswith("--")):
                wrong = f"Expected a value after {flag}. Found none."
            elif not equals:
                value = rest.pop(0) if takes else True
            if wrong:
                near = _near(flag, self._flags) if flag.startswith("-") and takes is None else ""
                raise InputError(f"{wrong} Remedy: {near}{self.name} --help.")
            values[flag.strip("-").replace("-", "_")] = value
        return values


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _near(word: str, known: Sequence[str] | Mapping[str, Any], prefix: str = "") -> str:
    near = get_close_matches(word, known, n=1)
    return f"{prefix}{near[0]}, or " if near else ""


def overview() -> str:
    """The help of the program itself."""
    options = Options("", DESCRIPTION, EXAMPLES.format(next(iter(STUDIES)), "index"))
    options.add("--version", "Show the version.")
    commands = options.parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in {**STUDIES, "report": REPORT}.items():
        commands.add_parser(name, help=_escaped(text))
    return options.help()


def unknown_command(arguments: Sequence[str]) -> InputError:
    """The error where the first argument is no command."""
    commands, found = (*STUDIES, "report"), arguments[0] if arguments else ""
    return InputError(
        f"Expected a command: {', '.join(commands[:-1])} or {commands[-1]}. "
        f"Found {repr(found) if arguments else 'none'}. "
        f"Remedy: {_near(found, commands, 'steadygrad ')}steadygrad --help."
    )


def report_options() -> Options:
    """The options of ``steadygrad report``."""
    options = Options("report", REPORT, place=("run", "Folder of the run."))
    options.add("--debug", "Show the traceback of an error.")
    return options


def study_options(name: str) -> Options:
    """The options of a study: its settings, and what every study has."""
    settings, texts = _settings(name), {}
    for field in fields(settings):
        kind, meta = _hint(settings, field.name)
        shown: Any = field.default
        if field.name == "budget":
            shown = f"{shown / 60:g}m"
        default = "" if kind is bool or shown == "" else f" (default: {shown})"
        texts[field.name] = f"{getattr(meta, 'description', '')}{default}"
    place = ("task", texts.pop("task"))
    options = Options(name, STUDIES[name], EXAMPLES.format(name, name), place)
    for field_name, text in texts.items():
        options.add(_flag(field_name), text, _metavar(field_name, _hint(settings, field_name)[0]))
    where = f"Folder of the run; absent or empty. (default: runs/{name}-DATE-TIME)"
    options.add("--out", where, "FOLDER")
    options.add("--resume", "Go on with the run in this folder, as it was planned.", "RUN")
    options.add("--json", "Print the summary as JSON, and everything else on standard error.")
    options.add("--debug", "Show the traceback of an error.")
    return options


def chosen(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a study that a command line names, converted and checked.

    Raises:
        InputError: If one of them is of another type or out of bounds.
    """
    import msgspec

    from steadygrad.record import convert

    settings = _settings(name)
    found = {field.name: values[field.name] for field in fields(settings) if field.name in values}
    for field_name, text in found.items():
        if field_name == "budget":
            found[field_name] = parse_budget(text)
        elif _hint(settings, field_name)[0] is float:
            with suppress(ValueError):
                found[field_name] = float(text)
    try:
        typed = convert(found, settings, strict=False)
    except msgspec.ValidationError as error:
        wrong = re.search(r"\$\.(\w+)", str(error))
        assert wrong is not None
        raise _refused(name, settings, wrong[1], values[wrong[1]]) from None
    return {field_name: getattr(typed, field_name) for field_name in found}


def parse_budget(text: str) -> float:
    """Reads a duration in seconds: ``30s``, ``5m``, ``1.5h``; a bare number is seconds.

    Raises:
        InputError: If it is not a positive duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower(), re.ASCII)
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise InputError(
            f"The budget should be a duration such as 30s, 5m or 2h. Found {text!r}. "
            "Remedy: --budget 5m."
        )
    return seconds


def folder_of(name: str, text: str) -> Path:
    """The folder that the value of an option names.

    Raises:
        InputError: If no folder can have that name.
    """
    if not text.strip() or "\0" in text:
        raise InputError(
            f"{name} should name the folder of a run. Found {text!r}. Remedy: such as runs/mine."
        )
    return Path(text)


def _settings(name: str) -> Any:
    from steadygrad.record.schema import schema_of

    found = schema_of(name)
    assert found is not None
    return found.settings


def _hint(settings: Any, name: str) -> tuple[Any, Any]:
    """Type of a field without its ``Meta``, and the ``Meta``."""
    hint = get_type_hints(settings, include_extras=True)[name]
    kind, meta, *_ = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
    return kind, meta


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(name: str, kind: Any) -> str | None:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    known = {bool: None, int: "INT", float: "TIME" if name == "budget" else "NUMBER"}
    return known.get(kind, "TEXT")


def _refused(command: str, settings: Any, name: str, value: Any) -> InputError:
    """The error about a value of the wrong type or out of bounds."""
    kind, meta = _hint(settings, name)
    low, high = getattr(meta, "ge", None), getattr(meta, "le", None)
    if get_origin(kind) is Literal:
        expected = f"one of {', '.join(map(str, get_args(kind)))}"
    elif kind is str:
        expected = "a text that is not empty"
    else:
        expected = "an integer" if kind is int else "a number"
        if low is not None:
            near = high is not None and high < FAR
            expected += f" from {low} to {high}" if near else f" of at least {low}"
    flag = "TASK" if name == "task" else _flag(name)
    good = next(field.default for field in fields(settings) if field.name == name)
    return InputError(
        f"{flag} should be {expected}. Found {value!r}. "
        f"Remedy: {flag} {good}, or see steadygrad {command} --help."
    )
