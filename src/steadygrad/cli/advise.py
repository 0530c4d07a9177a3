"""``steadygrad advise``: which batch size to train at."""

from pathlib import Path
from typing import TYPE_CHECKING

from steadygrad._checks import InputError
from steadygrad.cli.console import Console, print_summary
from steadygrad.cli.options import Advise
from steadygrad.cli.studying import run_study

if TYPE_CHECKING:
    from steadygrad.studies.advise import Outcome

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
    from steadygrad.studies import advise

    return run_study(advise, options, began, check=_refuse_nothing, show=_show)


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


def _show(outcome: "Outcome", page: Path, console: Console) -> None:
    print_summary(outcome.summary, page, console)
