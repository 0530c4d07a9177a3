"""``steadygrad report RUN``: draw a run's record again."""

from pathlib import Path

__all__ = ["run"]


def run(folder: Path) -> int:
    """Writes ``report.html`` from the record in ``folder`` and prints its path.

    Args:
        folder: The run's folder, or the ``record.jsonl`` in it.

    Returns:
        The exit code, 0.

    Raises:
        InputError: If there is no readable record, or the page cannot be drawn or written.
    """
    from steadygrad.record import check_run, read_run
    from steadygrad.report import write

    folder = Path(folder)
    if folder.name == "record.jsonl" and folder.is_file():
        folder = folder.parent
    check_run(read_run(folder))
    print(write(folder))
    return 0
