"""The command of every study: run or resume it, write its page, print its result."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad._checks import InputError, launched
from steadygrad.cli.console import cleaned, complain, drawn, emit, note, printable, rendered
from steadygrad.cli.options import chosen, folder_of, settings_class

if TYPE_CHECKING:
    from steadygrad.studies.run import Outcome

__all__ = ["run"]


def run(name: str, values: Mapping[str, Any], began: float) -> int:
    """Runs or resumes a study, writes its page, prints its findings and gives the exit code.

    The budget counts from ``began``, a reading of ``time.monotonic()``.
    """
    given = chosen(name, values)
    folders = {key: folder_of(f"--{key}", values[key]) for key in ("out", "resume") & values.keys()}

    from steadygrad.cli.progress import make_monitor
    from steadygrad.studies.deadline import Deadline, StudyInterrupted
    from steadygrad.studies.page import write
    from steadygrad.studies.run import StudyFailed

    (study, folder), deadline = _study(name, given, folders), Deadline(began)
    failed: StudyFailed | None = None
    with deadline.signals():
        try:
            monitoring = make_monitor(launched()[0] == 0, deadline.left)
            # What the task prints must not mix with --json.
            with monitoring as monitor, redirect_stdout(sys.stderr):
                outcome = study(deadline=deadline, monitor=monitor)
        except StudyFailed as error:
            outcome, failed = error.outcome, error
        except StudyInterrupted as stopped:
            # Before the record was begun: there is nothing to report.
            return 128 + stopped.reason
        except KeyboardInterrupt:
            if (folder / "header.json").exists():
                complain(f"stopped; --resume {folder} continues the run.")
            raise
        if outcome.is_main:
            # Why a study failed matters more than why its page did.
            with suppress(Exception) if failed else nullcontext():
                _report(name, outcome, write, json="json" in values)
        elif outcome.too_little:
            return 2
    if failed:
        raise failed
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def _study(
    name: str, given: Mapping[str, Any], folders: Mapping[str, Path]
) -> "tuple[Callable[..., Outcome], Path]":
    """Returns the function that starts or resumes the run, and the run's folder.

    The function still needs a deadline and a monitor.
    """
    from steadygrad.studies.run import resume, start

    out, folder = folders.get("out"), folders.get("resume")
    if folder is None:
        out = out or Path(f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}")
        return partial(start, name, settings_class(name)(**given), out), out
    if out is not None and out.resolve() != folder.resolve():
        raise InputError(
            f"--resume continues a run in its own folder. Found --out {str(out)!r} as well. "
            "Remedy: leave --out away."
        )
    return partial(resume, folder, given, name=name), folder


def _report(name: str, outcome: "Outcome", write: Callable[[Path], Path], *, json: bool) -> None:
    """Writes the page, and prints the words and the table."""
    from steadygrad.studies.strict_json import dumps

    page, failed = "", None
    try:
        page = f"\n\nReport: {printable(str(write(outcome.folder)))}"
    except InputError as error:
        failed = error
    if outcome.too_little:
        note(page.strip() or "No page could be written.")
        raise InputError(
            f"{outcome.too_little}. Found {str(outcome.folder)!r} unfinished. "
            "Remedy: continue with --resume RUN --budget TIME."
        )
    summary = cleaned(outcome.summary)
    table = [drawn(summary["table"])] if summary["table"] else []
    parts = [summary["answer"], *table, *summary["remarks"]]
    text = rendered(*parts, stream=sys.stderr if json else sys.stdout) + page
    if json:
        note(text)
        emit(dumps(outcome.summary, indent=2))
    else:
        emit(text)
    if failed:
        # The results stand, in the folder and above.
        raise failed
