"""A run becomes one HTML page: self-contained, without scripts and without the network."""

import warnings
from importlib import import_module
from pathlib import Path

from steadygrad._checks import InputError
from steadygrad.studies.folder import Run, read_run, understanding, write_page

__all__ = ["render", "write"]


def render(run: Run) -> str:
    """Draws a run's report; the same run gives the same page, byte for byte.

    A partial run is drawn too, and the page says what is missing.

    Args:
        run: What :func:`steadygrad.studies.folder.read_run` returned.

    Returns:
        The whole HTML page.

    Raises:
        InputError: If Matplotlib is not installed, or the run makes no sense.
    """
    try:
        draw = import_module(f"steadygrad.studies.{run.header.study}.report").page
    except ImportError as error:
        if str(error.name).partition(".")[0] != "matplotlib":
            raise
        raise InputError(
            "A report needs matplotlib, which is not installed. "
            'Remedy: pip install "steadygrad[cli]"'
        ) from error
    with understanding(run.folder):
        page: str = draw(run)
    return page


def write(folder: Path) -> Path:
    """Draws the report of the run in ``folder`` again, into its ``report.html``.

    Returns:
        The path of the page.

    Raises:
        InputError: If the run cannot be read or drawn, or the page cannot be written.
    """
    run = read_run(Path(folder))
    with warnings.catch_warnings():
        # Of odd numbers: many lines, about lines of Matplotlib's code.
        warnings.simplefilter("ignore")
        page = render(run)
    return write_page(Path(folder), page)
