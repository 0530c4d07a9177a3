"""The program with a small plan made by hand, so that a study takes a second or two.

``python -m tests.unit.cli.quick advise ...`` is the program in a process of its own.
"""

import subprocess
import sys
from typing import Any

from steadygrad.cli import main
from tests.unit.studies.framework import ROOT, environment, planned, tiny
from tests.unit.studies.results import SMALL

__all__ = ["ROOT", "STUDIES", "program", "quick", "run_program", "tiny"]

# Options of studies of the tiny task, of about a second of training. None of their plans depends
# on the clock.
STUDIES = {
    "advise": ["--budget", "10h", "--samples", "256", "--seeds", "4"],
    "compare": ["--budget", "10h", "--optimizers", "lans", "--samples", "160", "--seeds", "4"],
    "inspect": ["--budget", "10h", "--steps", "64"],
}


def quick() -> Any:
    """Makes every plan ``SMALL``, and measures no speed for long."""
    return planned(SMALL)


def program(*arguments: str, module: str = "tests.unit.cli.quick", **options: Any) -> Any:
    """Starts the program in a process of its own."""
    variables = environment() | {"COLUMNS": "80"}
    # Without it a failed write is tried again as the interpreter ends.
    variables.pop("PYTHONUNBUFFERED", None)
    for stream in ("stdout", "stderr"):
        options.setdefault(stream, subprocess.PIPE)
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, text=True, cwd=ROOT, env=variables, **options)


def run_program(*arguments: str, **options: Any) -> tuple[int, str, str]:
    """Runs the program in a process of its own: its exit code, and what it printed."""
    process = program(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out or "", err or ""


if __name__ == "__main__":
    with quick():
        sys.exit(main())
