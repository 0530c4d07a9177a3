"""A run record becomes one HTML page: self-contained, without scripts and without the network."""

import warnings
from importlib import import_module
from pathlib import Path

from steadygrad._checks import InputError
from steadygrad.record import RecordError, Run, read_run, write_report

__all__ = ["render", "write"]


def render(run: Run) -> str:
    """Draws a run's report; the same run gives the same page, byte for byte.

    A partial record is drawn too, and the page says what is missing. A study's page is a module of
    its name in this package, with ``page(run) -> str``.

    Args:
        run: What :func:`steadygrad.record.read_run` returned.

    Returns:
        The whole HTML page.

    Raises:
        InputError: If Matplotlib is not installed, or the record makes no sense.
    """
    try:
        page: str = import_module(f"steadygrad.report.{run.header.study}").page(run)
    except ImportError as error:
        if str(error.name).partition(".")[0] != "matplotlib":
            raise
        raise InputError(
            "A report needs matplotlib, which is not installed. "
            'Remedy: pip install "steadygrad[cli]"'
        ) from error
    # Every line is of the right types, and together they may still make no sense.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise RecordError(
            f"Expected a record that can be drawn in {str(run.folder)!r}. Found numbers or names "
            f"that no study writes ({reason}). Remedy: --debug shows where; restore the record "
            "from a copy, or report the error if a study wrote it."
        ) from error
    return page


def write(folder: Path) -> Path:
    """Draws the report of the run in ``folder`` again, into its ``report.html``.

    Returns:
        The path of the page.

    Raises:
        InputError: If the record cannot be read or drawn, or the page cannot be written.
    """
    run = read_run(Path(folder))
    with warnings.catch_warnings():
        # Of odd numbers in the record: many lines, about lines of Matplotlib's code.
        warnings.simplefilter("ignore")
        page = render(run)
    return write_report(folder, page)
