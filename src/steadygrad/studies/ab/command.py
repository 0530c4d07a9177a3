"""Runs shell commands to their end, and reads the metric in their output."""

import ast
import json
import math
import os
import re
import select
import subprocess
import sys
import time
import tty
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from steadygrad._checks import InputError
from steadygrad.studies.ab.schema import Settings

# Nobody turns pages or has a narrow screen.
UNREAD = {"COLUMNS": "500", "PAGER": "cat", "GIT_PAGER": "cat"}
KEEPER = str(Path(__file__).with_name("keeper.py"))
# Bytes that are kept of the output's end.
KEPT = 1 << 25
# Half of a line's characters: a pattern may look at each part of a line from all places before it.
HALF = 1 << 10
# Colours, moves and titles.
ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])"
)
# How a number goes on after a match, as 1,522.34 and 1.5k do, and what is part of it before one.
DIGITS, THOUSANDS = r"\.?\d|[eE][-+]?\d|[xX:]\d|[kKMGTB]\b", "[,_'\u2019\u00a0\u2009\u202f]\\d"
BEFORE = re.compile(r"(?:[.\d]|(?<!\w)[-+]|\d[,_'\u2019](?=#\d{3}(?:\D|\Z)))#")
TRIES = 8  # of braces before a line's JSON


class RunFailed(InputError):
    """A command failed, or printed no metric."""


def plain(printed: bytes | bytearray) -> str:
    """Output as text, without colours and moves; a bar's turns are lines."""
    return re.sub(r"\r+\n?", "\n", ESCAPES.sub("", printed.decode("utf-8", "replace")))


def run_command(
    command: str, cwd: str, settings: Settings, poll: Callable[[], object]
) -> tuple[float, dict[str, int]]:
    """Runs a command to its end, or until ``poll`` raises, and leaves none of its processes.

    Returns the metric and the peak of memory. Its own fault is a :class:`RunFailed`.
    """
    printed = bytearray()
    try:
        said = _said_by_keeper(command, cwd, settings.timeout or math.inf, poll, printed)
    except OSError as error:
        raise InputError(
            f"Expected processes, a terminal and a folder for a command. Found {error}. "
            "Remedy: make room for them, and --resume."
        ) from error
    text, (code, peak) = plain(printed), said
    value = metric_of(text, settings.metric)
    if code == "None":
        why = f"it ran into the time limit of {settings.timeout:g} s"
    elif code != "0":
        why = f"ended by signal {code[1:]}" if code[0] == "-" else f"exit code {code}"
    elif isinstance(value, float):
        return value, {"peak_bytes": int(peak)}
    else:
        found = f"{value[:60]!r}, which is no number," if value else "no number"
        key = "" if "(" in settings.metric else " as a key of JSON"
        why = f"it printed {found} for {settings.metric!r}{key}"
    last_line = text.strip().rpartition("\n")[2][-200:]
    raise RunFailed(f"{why}, after {last_line!r}")


def _said_by_keeper(
    command: str, cwd: str, limit: float, poll: Callable[[], object], output: bytearray
) -> list[str]:
    """Exit code, or None after the time limit, and peak of memory, as ``keeper.py`` says them."""
    end, start = time.monotonic() + limit, [sys.executable, "-IS", KEEPER, command]
    where: Any = {"cwd": cwd, "env": os.environ | UNREAD}
    # A terminal: from pipes the two streams come in the order in which buffers were full.
    ours, its = os.openpty()
    with open(ours, "rb", 0) as stream, open(its, "wb", 0) as writer:
        tty.setraw(its)
        where |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": writer}
        with subprocess.Popen(start, start_new_session=True, **where) as keeper:
            writer.close()
            try:
                while keeper.poll() is None and time.monotonic() < end:
                    poll()
                    _take(stream, output)
            finally:
                said: list[str] = keeper.communicate()[0].decode().split()
        while _take(stream, output):
            poll()
    if not said:
        raise ChildProcessError("its parent, keeper.py, was killed")
    return said


def _take(stream: Any, output: bytearray) -> bool:
    """Takes the output of the next moment; False if there is none."""
    data = b""
    if select.select([stream], [], [], 0.02)[0]:
        with suppress(OSError):  # the end of a terminal
            data = stream.read(1 << 16)
            output += data
            if len(output) > 2 * KEPT:
                del output[:-KEPT]
    return bool(data)


def metric_of(text: str, metric: str) -> float | str | None:
    """The last match of a pattern with a group, or the last value of a key of JSON.

    A text where that is no number, or not all of one: an earlier epoch is no result.
    """
    if "(" not in metric:
        return _value_of_key(text, metric)
    text = _in_parts(text)
    last = _last(re.finditer(metric, text, re.M))
    # The pattern up to its group: where it comes again, the last number was no match.
    before = re.split(r"(?<!\\)\((?!\?(?!P<))", metric)[0]
    try:
        again = re.compile(before, re.M)
    except re.error:  # the group is not what the first parenthesis opens
        again = re.compile(re.escape(text[last.start() : last.start(1)] if last else metric))
    end = last.end(1) if last else 0
    if not again.match("") and (named := again.search(text, end)):
        return _word(text, named.end())
    if last is None or last[1] is None:
        return last and last[0]
    first = last.start(1)
    before = re.findall(r"[-+.,_'\u2019\w]*\Z", text[max(0, first - 40) : first])[0]
    goes_on = re.compile(DIGITS if "." in last[1] else f"{DIGITS}|{THOUSANDS}")
    if goes_on.match(text, end) or BEFORE.search(f"{before}#{last[1]}"):
        return f"{before}{_word(text, first)}"
    return number(last[1])


def _value_of_key(text: str, key: str) -> float | str | None:
    """The value of a key in the last line that names it: in an object, or the word after it."""
    text = f"\n{text}"
    # JSON may escape a letter.
    names = "|".join(map(re.escape, (key, json.dumps(key)[1:-1])))
    last = _last(re.finditer(rf"""(["'])(?:{names})\1\s*:\s*""", text))
    if last is None:
        return None
    first = text.rfind("\n", 0, last.start()) + 1
    stop = text.find("\n", last.end()) % (len(text) + 1)
    found, tries = _word(text, last.end()), 0
    # An object over several lines begins one, and so may the line's own.
    start = text.rfind("\n{", 0, first) + 1 or text.find("{", first)
    while 0 <= start < stop and tries < TRIES:
        try:
            read, end = _object(text, start, stop)
            found = str(read[key]) if key in read and end > last.start() else found
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            end, tries = start + 1, tries + 1
        start = text.find("{", max(first, end))
    return number(found)


def _object(text: str, start: int, stop: int) -> tuple[Any, int]:
    """An object of JSON, or a dictionary as Python prints it in a line, and its end."""
    with suppress(ValueError):
        return json.JSONDecoder().raw_decode(text, start)
    end = text.rfind("}", start, stop) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is no dictionary
        return ast.literal_eval(text[start:end]), end


def number(text: str) -> float | str:
    """The number that a text is, but for signs and a unit around it; else the text."""
    around = "\"'`()[{]}<>,:;|*% \t"
    plain = text.lstrip(around.replace("[{", "")).rstrip(f"{around}.")
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?", plain):
        plain = plain.replace(",", "")
    with suppress(ValueError):
        return float(plain)
    return text


def _last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    return next(iter(deque(matches, 1)), None)


def _word(text: str, start: int) -> str:
    """The word at a place, up to the next blank."""
    return text[start : start + 400].lstrip().partition("\n")[0].partition(" ")[0]


def _in_parts(text: str) -> str:
    """The text with overlapping parts in place of a long line."""
    parts = []
    for line in text.split("\n"):
        parts.append(line[: 2 * HALF])
        for at in range(HALF, len(line) - HALF, HALF):
            # From a blank on: within no number, and at no line's beginning.
            blank = line.rfind(" ", at - HALF // 2, at)
            parts.append(line[at if blank < 0 else blank : at + 2 * HALF])
    return "\n".join(parts)
