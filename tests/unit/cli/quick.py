"""The program with a small plan made by hand, so that a study takes a second or two.

``python -m tests.unit.cli.quick advise ...`` is the program in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steadygrad.cli import main
from tests.unit.studies import tiny_task
from tests.unit.studies.results import PLAN as SMALL
from tests.unit.studies.results import changed

__all__ = ["PLAN", "STUDIES", "program", "quick", "run_program", "tiny"]

ROOT = Path(__file__).parents[3]
PLAN = changed(
    SMALL,
    points=(64, 128),
    branch_samples=(64, 64),
    multiples=((1, 2, 4), (1, 2, 4)),
    noise_steps=(2, 2),
    rates=False,
    seeds=0,
    candidates=0,
)

# Options of studies of the tiny task, of about a second of training. None of their plans depends
# on the clock.
STUDIES = {
    "advise": ["--budget", "70s"],
    "compare": ["--budget", "10h", "--optimizers", "lans", "--samples", "128", "--seeds", "2"],
    "inspect": ["--budget", "10h", "--steps", "64"],
}


def tiny(factory: str = "make_task") -> str:
    """How the command line names a factory in ``tiny_task.py``."""
    return f"{tiny_task.__file__}:{factory}"


@contextmanager
def quick() -> Iterator[None]:
    """Makes every plan ``PLAN``, and measures no speed for long."""
    from steadygrad.studies.advise.study import Advise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Advise, "make_plan", classmethod(lambda *args, **kwargs: PLAN))
        patch.setattr("steadygrad.studies.calibration.SECONDS", 0.01)
        patch.setattr("steadygrad.studies.calibration.WARM_UP_STEPS", 1)
        yield


def program(*arguments: str, module: str = "tests.unit.cli.quick", **options: Any) -> Any:
    """Starts the program in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    # Without it a failed write is tried again as the interpreter ends.
    environment.pop("PYTHONUNBUFFERED", None)
    for stream in ("stdout", "stderr"):
        options.setdefault(stream, subprocess.PIPE)
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **options)


def run_program(*arguments: str, **options: Any) -> tuple[int, str, str]:
    """Runs the program in a process of its own: its exit code, and what it printed."""
    process = program(*arguments, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out or "", err or ""


if __name__ == "__main__":
    with quick():
        sys.exit(main())
