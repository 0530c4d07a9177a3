"""Runs shell commands to their end, and reads the metric in their output."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from steadygrad._checks import InputError
from steadygrad.studies.ab.schema import Settings

# The shell's input ends with this process, even by `kill -9`: a second run would share the device.
# What waits for that is in the command's group, and no child of the command's.
GUARDED = 'exec 3<&0; ( (read _ <&3; kill -9 -$$) & ); exec sh -c "$0" 3<&- </dev/null'


def run_command(
    command: str, cwd: str, settings: Settings, poll: Callable[[], object]
) -> tuple[float, dict[str, int]]:
    """Runs a command in a group of processes of its own, of which nothing is left afterwards.

    What ``poll`` raises ends it. Returns the metric, and the peak of memory where it is above this
    process's own; raises InputError if it fails, with the last line that it printed.
    """
    end, code, peak = time.monotonic() + (settings.timeout or math.inf), None, 0
    where: Any = {"cwd": cwd, "stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with tempfile.TemporaryFile() as out:
        shell = ["sh", "-c", GUARDED, command]
        with subprocess.Popen(shell, stdout=out, start_new_session=True, **where) as group:
            try:
                while code is None and time.monotonic() < end:
                    poll()
                    time.sleep(0.02)
                    # Not `group.wait`: this says how much memory it had.
                    number, status, usage = os.wait4(group.pid, os.WNOHANG)
                    if number:
                        code = group.returncode = os.waitstatus_to_exitcode(status)
                        peak = usage.ru_maxrss
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(group.pid, signal.SIGKILL)
        out.seek(0)
        text = out.read().decode(errors="replace")
    why, value = "", metric_of(text, settings.metric)
    if code is None:
        why = f"it ran into the time limit of {settings.timeout:g} s"
    elif code:
        why = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
    elif value is None:
        line = "" if "(" in settings.metric else " in a line of JSON"
        why = f"it printed no number for {settings.metric!r}{line}"
    if value is None or why:
        raise InputError(f"{why}, after {text.strip().rpartition(chr(10))[2][-200:]!r}")
    # A process that forks hands its own peak on.
    above = peak > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value, {"peak_bytes": peak * (1 if sys.platform == "darwin" else 1024)} if above else {}


def metric_of(text: str, metric: str) -> float | None:
    """The last match of a pattern with a group, or a key in the last line of JSON that names it.

    None where the last number is no match or goes on after it: an earlier epoch is no result.
    """
    with suppress(ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        if "(" not in metric:
            # JSON may escape a letter.
            names = "|".join(map(re.escape, (metric, json.dumps(metric)[1:-1])))
            lines = re.findall(rf'.*"(?:{names})" *:.*', text)
            return float(json.loads(lines[-1])[metric])
        last = [*re.finditer(metric, text)][-1]
        first, after = last.start(1), text[last.end(1) :]
        before = re.split(r"(?<!\\)\((?!\?(?!P<))", metric)[0]
        try:
            again = re.compile(before)
        except re.error:  # the group is not what the first parenthesis opens
            again = re.compile(re.escape(text[last.start() : first]))
        goes_on = re.match(r"\.?\d|[eE][-+]?\d", after)
        began = first == last.start() and re.search(r"[-+.\d]\Z", text[:first])
        if not (goes_on or began or (not again.match("") and again.search(after))):
            return float(last[1])
    return None
