"""``steadygrad advise``: which batch size to train at."""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad._checks import InputError
from steadygrad.cli.console import Console, make_monitor, print_summary
from steadygrad.cli.options import Advise

if TYPE_CHECKING:
    from steadygrad.studies.advise import Monitor, Outcome, Settings, Stop

__all__ = ["run"]


def run(options: Advise, began: float) -> int:
    """Runs, or goes on with, a study; writes its report and prints what it found.

    Args:
        options: The command line.
        began: Reading of ``time.monotonic()`` from which the budget counts.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended it.

    Raises:
        InputError: For anything that cannot be used.
    """
    from steadygrad.report import write
    from steadygrad.studies.advise import Failed, Halt, Stop

    is_main = os.environ.get("RANK", "0") == "0"
    console = Console(json=options.json)
    stop = Stop(began)
    with stop.signals():
        try:
            # What the user's own task prints must not mix with --json.
            with make_monitor(console, is_main) as monitor, redirect_stdout(sys.stderr):
                outcome = _study(options, stop, monitor)
            if outcome.is_main:
                _finish(outcome, console)
        except Failed as failed:
            if failed.is_main:
                write(failed.folder)
            raise
        except Halt as halt:
            # Before the record was begun: there is nothing to report.
            return 128 + halt.reason
    _refuse_nothing(outcome)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def _study(options: Advise, stop: "Stop", monitor: "Monitor") -> "Outcome":
    from steadygrad.record import read_run
    from steadygrad.studies.advise import advise, read_settings, resume

    if options.resume is None:
        settings = _settings(options)
        folder = options.out or Path(f"runs/advise-{datetime.now():%Y%m%d-%H%M%S}")
        return advise(settings, folder, stop=stop, monitor=monitor)
    settings = read_settings(read_run(options.resume))
    _check_agreement(options, settings)
    return resume(options.resume, stop=stop, monitor=monitor)


def _settings(options: Advise) -> "Settings":
    from steadygrad.studies.advise import Settings

    return replace(Settings(), **_given(options))


def _given(options: Advise) -> dict[str, Any]:
    """The settings that the command line names."""
    from steadygrad.studies.advise import parse_budget

    names = ("task", "seed", "device", "dtype", "tolerance")
    given = {name: getattr(options, name) for name in names}
    if options.budget is not None:
        given["budget_seconds"] = parse_budget(options.budget)
    return {name: value for name, value in given.items() if value is not None}


def _check_agreement(options: Advise, settings: "Settings") -> None:
    if options.out is not None and options.out.resolve() != options.resume.resolve():  # type: ignore[union-attr]
        raise InputError(
            f"--resume goes on in its own folder. Found --out {str(options.out)!r} as well. "
            "Remedy: leave --out away."
        )
    for name, value in _given(options).items():
        recorded = getattr(settings, name)
        if value != recorded and (name, value) != ("device", "auto"):
            flag = {"task": "TASK", "budget_seconds": "--budget"}.get(name, f"--{name}")
            raise InputError(
                f"--resume takes {name} = {recorded!r} from the record. Found {value!r}. "
                f"Remedy: leave {flag} away, or start a new run with --out."
            )


def _refuse_nothing(outcome: "Outcome") -> None:
    """A budget too small for this machine to say anything is an error, not advice."""
    found = [point["critical"] for point in outcome.summary["points"]]
    if outcome.summary["status"] == "budget" and not any(found):
        raise InputError(
            "The budget was over before the first point of training was measured: no number is "
            f"given. Found {str(outcome.folder)!r} unfinished. Remedy: --resume it, or start with "
            "a larger --budget."
        )


def _finish(outcome: "Outcome", console: Console) -> None:
    from steadygrad.record import dumps
    from steadygrad.report import write

    path = write(outcome.folder)
    print_summary(outcome.summary, path, console)
    if console.json:
        print(dumps(outcome.summary, indent=2))
        sys.stdout.flush()
