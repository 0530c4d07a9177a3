"""A program that runs one command and leaves no process of it: ``command.py`` starts it.

It ends with the command or as soon as its standard input is closed, as by the death of its parent.
The command prints to standard error; standard output has its exit code, unless it was cut short,
and its peak of memory in bytes.
"""

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

ORPHANS_TO_ME = 36  # PR_SET_CHILD_SUBREAPER of Linux
# Seconds that processes get which a command leaves, such as those that write its log.
GRACE = 2.0


def children() -> list[int]:
    """On Linux this process's children, and those of the command's whose parents have ended."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with suppress(OSError), open(f"/proc/{number}/stat", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.append(int(number))
    return found


def end(group: int) -> None:
    """Kills all that is left: workers of torchrun have sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while left := children():
        for number in left:
            os.kill(number, signal.SIGKILL)
        for number in left:
            os.waitpid(number, 0)


def main(command: str) -> None:
    """Runs a command of the shell to its end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ORPHANS_TO_ME, 1, 0, 0, 0)
    shell = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    code = None
    while code is None and not select.select([0], [], [], 0.02)[0]:
        number, status = os.waitpid(-1, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if number == shell.pid else None
    late = time.monotonic() + GRACE
    while code is not None and children() and time.monotonic() < late:
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)
    end(shell.pid)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(code, peak * (1 if sys.platform == "darwin" else 1024))


if __name__ == "__main__":
    main(sys.argv[1])
