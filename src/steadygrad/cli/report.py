"""``steadygrad report RUN``: draw a run's page again."""

from collections.abc import Sequence

from steadygrad._checks import InputError
from steadygrad.cli.console import emit, printable
from steadygrad.cli.options import folder_of, report_options

__all__ = ["run"]


def run(words: Sequence[str]) -> int:
    """Writes ``report.html`` from the record in a run's folder and prints its path.

    Args:
        words: Arguments after the command: the folder, or the ``record.jsonl`` in it.

    Returns:
        The exit code, 0.

    Raises:
        InputError: If there is no readable record, or the page cannot be drawn or written.
    """
    options = report_options()
    values = options.read(words)
    if "help" in values:
        emit(options.help())
        return 0
    if "run" not in values:
        raise InputError(
            "Expected the folder of a run. Found none. Remedy: steadygrad report runs/mine."
        )
    folder = folder_of("RUN", values["run"])
    if folder.name == "record.jsonl" and folder.is_file():
        folder = folder.parent
    from steadygrad.report import write

    emit(printable(str(write(folder))))
    return 0
