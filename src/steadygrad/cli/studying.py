"""What the commands that run a study have in common."""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad._checks import InputError
from steadygrad.cli.console import Console, make_monitor
from steadygrad.cli.options import Advise, Inspect
from steadygrad.cli.values import check_agreement, folder_of, given

if TYPE_CHECKING:
    from steadygrad.studies.session import Monitor, Outcome
    from steadygrad.studies.stop import Stop

__all__ = ["run_study"]


def run_study(
    study: Any,
    options: Advise | Inspect,
    began: float,
    *,
    check: "Callable[[Outcome], None]",
    show: "Callable[[Outcome, Path, Console], None]",
) -> int:
    """Runs, or goes on with, a study; writes its report and prints what it found.

    Args:
        study: The study's package, with ``Settings``, ``read_settings``, ``resume`` and a function
            of the command's name.
        options: The command line.
        began: Reading of ``time.monotonic()`` from which the budget counts.
        check: Refuses an outcome that says nothing.
        show: Prints a summary.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended it.

    Raises:
        InputError: For anything that cannot be used.
    """
    from steadygrad.report import write
    from steadygrad.studies.session import Failed
    from steadygrad.studies.stop import Halt, Stop

    is_main = os.environ.get("RANK", "0") == "0"
    console = Console(json=options.json)
    stop = Stop(began)
    with stop.signals():
        try:
            # What the user's own task prints must not mix with --json.
            with make_monitor(console, is_main, stop.left) as monitor, redirect_stdout(sys.stderr):
                outcome = _study(study, options, stop, monitor)
            page = write(outcome.folder) if outcome.is_main else None
        except Failed as failed:
            if failed.is_main:
                # Why the study failed matters more than why its page did.
                with suppress(Exception):
                    write(failed.folder)
            raise
        except Halt as halt:
            # Before the record was begun: there is nothing to report.
            return 128 + halt.reason
        check(outcome)
        if page is not None:
            show(outcome, page, console)
            _print_json(outcome, console)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def _study(study: Any, options: Advise | Inspect, stop: "Stop", monitor: "Monitor") -> "Outcome":
    from steadygrad.record import read_run

    command = options.command
    chosen = given(options)
    out = None if options.out is None else folder_of("--out", options.out)
    if options.resume is None:
        folder = out or Path(f"runs/{command}-{datetime.now():%Y%m%d-%H%M%S}")
        settings = replace(study.Settings(), **chosen)
        return getattr(study, command)(settings, folder, stop=stop, monitor=monitor)  # type: ignore[no-any-return]
    folder = folder_of("--resume", options.resume)
    if out is not None and out.resolve() != folder.resolve():
        raise InputError(
            f"--resume goes on in its own folder. Found --out {options.out!r} as well. "
            "Remedy: leave --out away."
        )
    check_agreement(chosen, study.read_settings(read_run(folder)))
    budget = chosen.get("budget_seconds")
    return study.resume(folder, budget_seconds=budget, stop=stop, monitor=monitor)  # type: ignore[no-any-return]


def _print_json(outcome: "Outcome", console: Console) -> None:
    from steadygrad.record import dumps

    if console.json:
        print(dumps(outcome.summary, indent=2))
        sys.stdout.flush()
