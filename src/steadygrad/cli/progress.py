"""Progress of a study and the time left: for a person at a terminal, and for a log."""

import time
from collections.abc import Callable

from steadygrad.cli.console import PLAIN, note, printable

EVERY = 30.0  # seconds between two lines of a log


class Monitor:
    """Shows a study's progress, and the time until the work and the budget end.

    Args:
        is_shown: Whether anything is written: by the first rank alone, and not if it is quiet.
        budget_left: Seconds until the budget is over.
        clock: Seconds that only ever grow.
    """

    def __init__(
        self,
        is_shown: bool,
        budget_left: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True, **PLAIN)
        self.budget_left, self.clock = budget_left, clock
        self.drawn = is_shown and console.is_terminal
        self.write = note if is_shown else lambda line: None
        # What a line of a log holds, and a bar.
        self.columns = (
            progress.TextColumn("{task.description:<40}", markup=False),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[rest]}"),
        )
        self.bar = progress.Progress(
            progress.BarColumn(), *self.columns, console=console, get_time=clock,
            speed_estimate_period=600.0, transient=True, disable=not self.drawn,
        )  # fmt: skip
        self.bar.add_task("preparing", total=None, rest="")
        (self.task,) = self.bar.tasks

    def begin(self, total: int, done: int) -> None:
        """Starts the clock; ``done`` of the work was done before."""
        self.printed = self.clock()
        self.bar.reset(self.task.id, total=total, completed=done)
        if not self.drawn:
            self.write(f"work done: {done:,} of {total:,}")

    def advance(self, samples: int, what: str) -> None:
        """Counts samples of work that were done, and names their trial."""
        rest = f"left, budget {self.budget_left() / 60:.1f} min"
        self.bar.update(self.task.id, advance=samples, description=printable(what), rest=rest)
        if not self.drawn and self.clock() >= self.printed + EVERY:
            self.printed = self.clock()
            self.write(" ".join(str(column.render(self.task)) for column in self.columns))

    def say(self, line: str) -> None:
        """Prints a line for the user, above the bar."""
        self.write(f"steadygrad: {printable(line)}")
