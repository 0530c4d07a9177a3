"""The command line. A study's ``Settings`` are its options: names, types, bounds and help."""

import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from steadygrad._checks import InputError
from steadygrad._studies import STUDIES
from steadygrad.cli.completions import FOLDERS, words_or_files

__all__ = [
    "OTHERS",
    "chosen",
    "folder_of",
    "near",
    "options_of",
    "overview",
    "parser",
    "settings_class",
]

DESCRIPTION = (
    "Measures what a PyTorch training loop does to a gradient between backward() and the weights."
)
# Commands beside the studies: what they do, and their argument with its help.
OTHERS: Mapping[str, tuple[str, ...]] = {
    "report": ("Draw the page of a run again from its record.", "RUN", "Folder of the run."),
    "tasks": ("List the built-in tasks.",),
    "init": ("Write a task to begin with.", "FILE", "File to write, such as my_task.py."),
    "doctor": ("Say what is installed, what is missing, and which path a step takes here.",),
}
# Examples of each command, after those of every study.
EXAMPLES = {
    "advise": ("steadygrad advise digits-deep --tolerance 0.5 --workers 4",),
    "compare": ("steadygrad compare --optimizers lans,task --add file.py:make_optimizer",),
    "inspect": ("steadygrad inspect digits-deep --steps 400 --accumulation",),
    "report": ("steadygrad report runs/mine",),
    "tasks": ("steadygrad tasks", "steadygrad advise digits-classifier --budget 2m"),
    "init": ("steadygrad init my_task.py", "steadygrad advise my_task.py:make_task --budget 2m"),
    "doctor": ("steadygrad doctor", "steadygrad doctor --json"),
}
EXAMPLES_OF_ALL = (
    "steadygrad {0} --budget 5m",
    "steadygrad {0} path/to/file.py:make_task --out runs/mine",
    "steadygrad {0} --resume runs/mine --budget 1h",
)
PAGES = {"report": "reports", "init": "tasks", "doctor": "install"}
AUTO = "auto"
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
# A bound from here on is there for the record's format and tells a user nothing.
FAR = 1 << 40


class Options:
    """The options of a command, or of the program itself; argparse writes their help."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        self.name = f"steadygrad {command}".strip()
        self.parser = ArgumentParser(
            prog=self.name,
            description=description,
            epilog=epilog,
            formatter_class=RawDescriptionHelpFormatter,
            add_help=False,
        )
        # The one argument that is no option; empty for none.
        self._place = ""
        # Whether each flag takes a value.
        self._flags: dict[str, bool] = {}
        self.add("--help", "Show this help.")

    def add(
        self,
        flag: str,
        text: str,
        metavar: str | None = None,
        complete: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds an option, without a value unless it has a metavar; or the argument that is none.

        ``complete`` is what a shell offers for the value.
        """
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        if flag.startswith("-"):
            self._flags[flag] = metavar is not None
        else:
            self._place, kind = flag, {"nargs": "?"}
        action = self.parser.add_argument(flag, help=_escaped(text), **kind)
        if complete:
            action.complete = complete  # type: ignore[attr-defined]
        elif metavar and metavar.islower():
            # Only for completions: `chosen` checks the values.
            action.choices = metavar.split("|")

    def help(self) -> str:
        """The text of ``--help``."""
        return self.parser.format_help().rstrip()

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """The options that a command line names: texts, and True for flags without a value."""
        values: dict[str, Any] = {}
        rest = ["--help" if word == "-h" else word for word in words]
        while rest:
            word = rest.pop(0)
            flag, equals, text = word.partition("=")
            value: Any = text
            takes, wrong = self._flags.get(flag), ""
            if not word.startswith("-"):
                flag, value = self._place, word
                if not flag or _field(flag) in values:
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
                like = near(flag, self._flags) if word.startswith("-") and takes is None else ""
                raise InputError(f"{wrong} Remedy: {like}{self.name} --help.")
            values[_field(flag)] = value
        return values


def _field(flag: str) -> str:
    return flag.strip("-").replace("-", "_").lower()


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def near(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The beginning of a remedy: the known word that is most like another, if one is."""
    found = get_close_matches(word, known, n=1)
    return f"{prefix}{found[0]}, or " if found else ""


def _epilog(command: str) -> str:
    """The end of a help text: examples, and where the documentation is."""
    study, others = command or next(iter(STUDIES)), ("report", "init")
    own = EXAMPLES.get(command, []) if command else [EXAMPLES[name][0] for name in others]
    lines = [line.format(study) for line in EXAMPLES_OF_ALL if study in STUDIES]
    page = PAGES.get(command, command or "index")
    where = f"documentation: docs/{page}.md in the source repository"
    return "\n  ".join(["examples:", *lines, *own]) + f"\n\n{where}"


def overview() -> str:
    """The help of the program itself."""
    options = Options("", DESCRIPTION, _epilog(""))
    options.add("--version", "Show the version.")
    commands = options.parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in {**STUDIES, **{name: text for name, (text, *_) in OTHERS.items()}}.items():
        commands.add_parser(name, help=_escaped(text))
    return options.help()


def parser() -> ArgumentParser:
    """All commands with their options in one parser, for programs that write shell completions."""
    program = ArgumentParser(prog="steadygrad", description=DESCRIPTION)
    program.add_argument("--version", action="store_true", help="Show the version.")
    commands = program.add_subparsers(metavar="COMMAND")
    for name in (*STUDIES, *OTHERS):
        own = options_of(name).parser
        commands.add_parser(name, parents=[own], help=own.description, add_help=False)
    return program


def options_of(command: str) -> Options:
    """The options of a command: a study's settings, and the options of every study."""
    if command in OTHERS:
        text, *place = OTHERS[command]
        options = Options(command, text, _epilog(command))
        if command == "doctor":
            options.add("--json", "Print it as JSON.")
        if place:
            flag, about = place
            options.add(flag, about, complete=FOLDERS if command == "report" else None)
    else:
        options = Options(command, STUDIES[command], _epilog(command))
        for name, (kind, meta, default) in _settings(command).items():
            shown = "" if kind is bool or default in ("", None) else f" (default: {default})"
            text = f"{meta.description or ''}{shown}"
            complete = words_or_files(_tasks()) if name == "task" else None
            options.add(_flag(name), text, _metavar(name, kind), complete)
        where = f"Folder of the run; absent or empty. (default: runs/{command}-DATE-TIME)"
        options.add("--out", where, "FOLDER", FOLDERS)
        again = "Continue the run in this folder, as it was planned."
        options.add("--resume", again, "RUN", FOLDERS)
        options.add("--json", "Print the summary as JSON, and everything else on standard error.")
    options.add("--debug", "Show the traceback of an error.")
    return options


def chosen(study: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a study that a command line names, converted and checked."""
    from msgspec import convert

    settings = _settings(study)
    found = {name: values[name] for name in settings if name in values}
    for name, value in found.items():
        kind, meta, default = settings[name]
        try:
            if value == AUTO and name in ("workers", "threads"):
                found[name] = default
            if kind is float:
                found[name] = parse_budget(value) if name == "budget" else float(value)
            found[name] = convert(found[name], Annotated[kind, meta], strict=False)
            # An empty text is how a record says that an option was left away.
            if kind is str and not value.strip():
                raise ValueError(value)
        except ValueError:
            given = default not in ("", None)
            remedy = f"{_flag(name)} {default}" if given else f"leave {_flag(name)} away"
            raise InputError(
                f"{_flag(name)} should be {_expected(name, kind, meta)}. Found {value!r}. "
                f"Remedy: {remedy}, or see steadygrad {study} --help."
            ) from None
    return found


def settings_class(study: str) -> Any:
    """The dataclass of a study's settings."""
    return import_module(f"steadygrad.studies.{study}.schema").Settings


def _tasks() -> tuple[str, ...]:
    from steadygrad.studies.schema import TASKS

    return TASKS


def _settings(study: str) -> dict[str, tuple[Any, Any, Any]]:
    """Type, bounds with help, and default of each setting of a study."""
    from msgspec import Meta

    settings, found = settings_class(study), {}
    hints = get_type_hints(settings, include_extras=True)
    for field in fields(settings):
        # The empty Meta counts where a field has none of its own.
        hint = hints[field.name]
        # An option that may be left away, with None for what is chosen then.
        hint = get_args(hint)[0] if field.default is None else hint
        kind, meta, *_ = get_args(Annotated[hint, Meta()])
        default: Any = field.default
        found[field.name] = kind, meta, f"{default / 60:g}m" if field.name == "budget" else default
    return found


def _flag(name: str) -> str:
    return "TASK" if name == "task" else f"--{name.replace('_', '-')}"


def _metavar(name: str, kind: Any) -> str | None:
    number = "TIME" if name == "budget" else "NUMBER"
    choices = "|".join(get_args(kind))
    if name in ("workers", "threads"):
        return f"INT|{AUTO}"
    return choices or {bool: None, int: "INT", float: number, str: "TEXT"}[kind]


def _expected(name: str, kind: Any, meta: Any) -> str:
    if name == "budget":
        return (
            "a duration such as 30s, 5m or 2h, in s, m or h: more than 0 and less than 1e9 seconds"
        )
    if choices := get_args(kind):
        return f"one of {', '.join(choices)}"
    if kind is str:
        return "a text that is not empty"
    number = "an integer" if kind is int else "a number"
    if meta.ge is None:
        return number
    if meta.le is None or meta.le >= FAR:
        return f"{number} of at least {meta.ge}"
    return f"{number} from {meta.ge} to {meta.le}"


def parse_budget(text: str) -> float:
    """Reads a duration in seconds: ``30s``, ``5m``, ``1.5h``; a bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower(), re.ASCII)
    if match is None:
        raise ValueError(text)
    return float(match[1]) * UNITS[match[2]]


def folder_of(name: str, text: str) -> Path:
    """The folder that the value of an option names."""
    if not text.strip() or "\0" in text:
        raise InputError(
            f"{name} should name the folder of a run. Found {text!r}. Remedy: such as runs/mine."
        )
    return Path(text)
