"""``steadygrad advise``: which batch size to train at."""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from steadygrad._checks import InputError
from steadygrad.cli.console import Console, make_monitor, print_summary
from steadygrad.cli.options import Advise
from steadygrad.cli.values import check_agreement, folder_of, given

if TYPE_CHECKING:
    from steadygrad.studies.advise import Monitor, Outcome, Stop

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
            with make_monitor(console, is_main, stop.left) as monitor, redirect_stdout(sys.stderr):
                outcome = _study(options, stop, monitor)
            page = write(outcome.folder) if outcome.is_main else None
        except Failed as failed:
            if failed.is_main:
                write(failed.folder)
            raise
        except Halt as halt:
            # Before the record was begun: there is nothing to report.
            return 128 + halt.reason
        _refuse_nothing(outcome)
        if page is not None:
            _print(outcome, page, console)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def _study(options: Advise, stop: "Stop", monitor: "Monitor") -> "Outcome":
    from steadygrad.record import read_run
    from steadygrad.studies.advise import Settings, advise, read_settings, resume

    chosen = given(options)
    out = None if options.out is None else folder_of("--out", options.out)
    if options.resume is None:
        folder = out or Path(f"runs/advise-{datetime.now():%Y%m%d-%H%M%S}")
        return advise(replace(Settings(), **chosen), folder, stop=stop, monitor=monitor)
    folder = folder_of("--resume", options.resume)
    if out is not None and out.resolve() != folder.resolve():
        raise InputError(
            f"--resume goes on in its own folder. Found --out {options.out!r} as well. "
            "Remedy: leave --out away."
        )
    check_agreement(chosen, read_settings(read_run(folder)))
    budget = chosen.get("budget_seconds")
    return resume(folder, budget_seconds=budget, stop=stop, monitor=monitor)


def _refuse_nothing(outcome: "Outcome") -> None:
    """A budget too small for this machine to say anything is an error, not advice.

    A noise scale may be in the record by then, but it is a diagnostic of advice that is not there.
    """
    found = [point["critical"] for point in outcome.summary["points"]]
    if outcome.summary["status"] == "budget" and not any(found):
        raise InputError(
            "The budget was over before the first point of training was measured: no number is "
            f"given. Found {str(outcome.folder)!r} unfinished. Remedy: go on by --resume RUN "
            "--budget TIME."
        )


def _print(outcome: "Outcome", page: Path, console: Console) -> None:
    from steadygrad.record import dumps

    print_summary(outcome.summary, page, console)
    if console.json:
        print(dumps(outcome.summary, indent=2))
        sys.stdout.flush()
