"""The table of commands, and their options. A study's ``Settings`` are its options."""

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from shlex import join
from typing import Any, NamedTuple, NoReturn, get_args, get_type_hints

from steadygrad._checks import InputError
from steadygrad._studies import STUDIES, module_of


def _folder(text: str) -> Path:
    if not text.strip() or "\0" in text:
        raise ArgumentTypeError(f"expected the folder of a run. Found {text!r}")
    return Path(text)


# What a shell offers for a value, as shtab reads it.
FILES = {"bash": "_shtab_compgen_files", "zsh": "_files"}
FOLDER = {"type": _folder, "complete": {"bash": "_shtab_compgen_dirs", "zsh": "_files -/"}}


class Command(NamedTuple):
    """A command beside the studies, a function in ``commands``; ``arguments`` are argparse's."""

    text: str
    examples: tuple[str, ...]
    page: str
    arguments: Mapping[str, Mapping[str, Any]]


COMMANDS: Mapping[str, Command] = {
    "diff": Command(
        "Say where two runs part: the first step, stage and module that differ by more than "
        "rounding.",
        ("steadygrad diff runs/a runs/b", "steadygrad diff runs/a runs/b --rename 'old.*=new.*'"),
        "diff",
        {
            "A": {"help": "Folder that a run's Trace wrote.", **FOLDER},
            "B": {"help": "Folder of the other run; the page goes there.", **FOLDER},
            "--rename": {
                "action": "append",
                "metavar": "OLD=NEW",
                "help": "Names of A as they are in B, with * for any text; may be repeated.",
            },
            "--json": {"action": "store_true", "help": "Print what was found as JSON."},
        },
    ),
    "report": Command(
        "Draw the page of a run again from its record.",
        ("steadygrad report runs/mine",),
        "reports",
        {"RUN": {"help": "Folder of the run.", **FOLDER}},
    ),
    "init": Command(
        "Write a task to begin with.",
        ("steadygrad init my_task.py", "steadygrad advise my_task.py:make_task --budget 2m"),
        "tasks",
        {"FILE": {"help": "File to write, such as my_task.py."}},
    ),
    "doctor": Command(
        "Say what is installed, what is missing, and which path a step takes here.",
        ("steadygrad doctor", "steadygrad doctor --json"),
        "install",
        {"--json": {"action": "store_true", "help": "Print it as JSON."}},
    ),
}
# In the description of a number for which "auto" may stand.
AUTO = "0 or auto"
# Examples of each study; {} is its name.
EXAMPLES = (
    "steadygrad {} --budget 5m",
    "steadygrad {} path/to/file.py:make_task --out runs/mine",
    "steadygrad {} --resume runs/mine --budget 1h",
)


class Parser(ArgumentParser):
    """A parser whose errors are raised; options that are left away have no value."""

    def __init__(self, command: str, text: str, examples: Iterable[str], page: str) -> None:
        lines = "\n  ".join(["examples:", *examples])
        super().__init__(
            prog=f"steadygrad {command}".strip(),
            description=text,
            epilog=f"{lines}\n\ndocumentation: docs/{page}.md in the source repository",
            formatter_class=RawDescriptionHelpFormatter,
            argument_default=SUPPRESS,
            allow_abbrev=False,
            add_help=False,
        )
        self.add("--help", "-h", action="store_true", help="Show this help.")

    def add(self, *flags: str, complete: Any = None, **options: Any) -> None:
        """Adds an argument; ``complete`` names a shell's offers for its value."""
        options["help"] = options["help"].replace("%", "%%")
        action = self.add_argument(*flags, **options)
        if complete:
            action.complete = complete  # type: ignore[attr-defined]

    def error(self, message: str) -> NoReturn:
        """Refuses in one line."""
        raise InputError(f"{message}. Remedy: {self.prog} --help.")

    def read(self, words: Sequence[str]) -> Mapping[str, Any]:
        """The values that a command line names."""
        # Intermixed: TASK may follow an option.
        found, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            flags = re.findall(r"--[\w-]+", self.format_usage())
            like = get_close_matches(unknown[0].partition("=")[0], flags, n=1)
            remedy = " or ".join([*like, f"{self.prog} --help"])
            raise InputError(f"Unexpected argument. Found {unknown[0]!r}. Remedy: {remedy}.")
        return {
            n: join(v) if n == "task" and isinstance(v, list) else v for n, v in vars(found).items()
        }


def parser(*, whole: bool = True) -> ArgumentParser:
    """All commands with their options, for programs that write completions; or their list alone."""
    text = "Measures what PyTorch training does to a gradient between backward() and the weights."
    examples = [line.format("advise") for line in EXAMPLES]
    program = Parser("", text, [*examples, "steadygrad init my_task.py"], "index")
    program.add("--version", action="store_true", help="Show the version.")
    about: Any = {"title": "commands", "metavar": "COMMAND", "parser_class": ArgumentParser}
    commands = program.add_subparsers(**about)
    texts = {**STUDIES, **{name: own.text for name, own in COMMANDS.items()}}
    for name, text in texts.items():
        parents = [options_of(name)] if whole else []
        commands.add_parser(name, help=text, parents=parents, add_help=False)
    return program


def options_of(command: str) -> Parser:
    """The options of a command."""
    if command in COMMANDS:
        own = COMMANDS[command]
        options = Parser(command, own.text, own.examples, own.page)
        for flag, about in own.arguments.items():
            options.add(flag, **about)
    else:
        examples = [line.format(command) for line in EXAMPLES]
        schema = module_of(command, "schema")
        options = Parser(command, STUDIES[command], [*examples, schema.EXAMPLE], command)
        hints = get_type_hints(schema.Settings, include_extras=True)
        for field in fields(schema.Settings):
            _add_setting(options, field.name, hints[field.name], field.default)
        where = f"Folder of the run; absent or empty. (default: runs/{command}-DATE-TIME)"
        options.add("--out", metavar="FOLDER", help=where, **FOLDER)
        again = "Continue the run in this folder, as it was planned."
        options.add("--resume", metavar="RUN", help=again, **FOLDER)
        text = "Print the summary as JSON, and everything else on standard error."
        options.add("--json", action="store_true", help=text)
        options.add("--quiet", action="store_true", help="Print the answer alone, in one line.")
    options.add("--debug", action="store_true", help="Show the traceback of an error.")
    return options


def _add_setting(options: Parser, name: str, hint: Any, default: Any) -> None:
    """Adds an option for a field of a study's settings."""
    hint = get_args(hint)[0] if default is None else hint  # of one that may be None
    kind, *_, meta = get_args(hint)
    flag, text, choices = f"--{name.replace('_', '-')}", meta.description, get_args(kind)
    if kind is bool:
        options.add(flag, action="store_true", help=text)
        return
    metavar = "|".join(choices) or {int: "INT", float: "NUMBER", str: "TEXT"}[kind]
    if name == "budget":
        metavar, default = "TIME", f"{default / 60:g}m"
    elif AUTO in text:
        metavar = "INT|auto"
    if default not in ("", None):
        text += f" (default: {default})"
    read: Any = {"choices": choices} if choices else {"type": partial(_read, name, hint)}
    if name == "task":
        where = {"nargs": "?", "metavar": "TASK", **(meta.extra or {})}
        options.add("task", help=text, complete=FILES, **where, **read)
    else:
        options.add(flag, help=text, metavar=metavar, **read)


def _read(name: str, hint: Any, text: str) -> Any:
    """Reads the text of a setting, and checks its bounds."""
    from msgspec import convert

    value: Any = text
    try:
        if name == "budget":
            value = seconds(text)
        elif text == "auto" and AUTO in get_args(hint)[-1].description:
            value = 0
        elif get_args(hint)[0] is float:
            value = float(text)
        # An empty text is how a record says that an option was left away.
        elif not text.strip():
            raise ValueError("expected a text that is not empty")
        return convert(value, hint, strict=False)
    except ValueError as error:
        raise ArgumentTypeError(f"{error}. Found {text!r}") from None


def seconds(text: str) -> float:
    """Reads a duration in seconds: ``30s``, ``3m20s``, ``1.5h``; a bare number is seconds."""
    number = r"(\d+(?:\.\d+)?)\s*"
    text = re.sub(rf"^{number}$", r"\1s", text.strip().lower(), flags=re.ASCII)
    if re.fullmatch(rf"({number}[smh]\s*)+", text, re.ASCII) is None:
        raise ValueError("expected a duration such as 30s, 5m or 2h")
    units = {"s": 1, "m": 60, "h": 3600}
    return sum(float(n) * units[u] for n, u in re.findall(rf"{number}([smh])", text, re.ASCII))
