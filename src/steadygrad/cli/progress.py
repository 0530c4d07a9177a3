"""Progress of a study and the time left: for a person at a terminal, and for a log."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from steadygrad.cli.console import PLAIN, note, printable

Clock = Callable[[], float]

# A resumed study first repeats what its last checkpoint did not hold, which counts as no work.
TOLD_AFTER_SHARE = 0.01


def duration(seconds: float) -> str:
    """A time as people say it: ``45s``, ``3m20s``, ``1h05m``; ``?`` for infinity."""
    if seconds == math.inf:
        return "?"
    minutes, whole = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        return f"{minutes}m{whole:02}s" if minutes else f"{whole}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


class Monitor:
    """Shows a study's progress, and the time until the work or the budget ends.

    Without a bar it prints lines: at every twentieth of the work, and when a while went by without
    one. A while is 20 seconds, or a thirtieth of the time so far where that is longer: these lines
    are 30 in the first ten minutes, and about 100 in a day.

    Args:
        budget_left: Seconds until the budget is over.
        clock: Seconds that only ever grow.
        write: Prints a line.
        bar: Draws the progress instead of lines; it shows its task's field ``left``.
    """

    def __init__(
        self,
        budget_left: Clock,
        clock: Clock = time.monotonic,
        write: Callable[[str], None] = note,
        bar: Progress | None = None,
    ) -> None:
        self.budget_left, self.clock, self.write, self.bar = budget_left, clock, write, bar
        self.task = bar.add_task("preparing", total=None, left="?") if bar else TaskID(0)

    def begin(self, total: int, done: int) -> None:
        """Starts the clock; ``done`` of the work was done before."""
        self.total, self.done, self.first = total, done, done
        self.began, self.what = self.clock(), ""
        self.twentieth, self.printed = int(20 * self.part), 0.0
        if self.bar:
            self.bar.reset(self.task, total=total, completed=done)
        else:
            self.write(f"{total:,} samples of work, {done:,} of them done")

    def advance(self, samples: int, what: str) -> None:
        """Counts work that was done."""
        self.done += samples
        self._show(printable(what))

    def skip(self, samples: int) -> None:
        """Counts work that is not needed, which says nothing about the speed."""
        self.done += samples
        self.first += samples
        self._show("")

    def say(self, line: str) -> None:
        """Prints a line for the user, above the bar."""
        self.write(f"steadygrad: {printable(line)}")

    def _show(self, what: str) -> None:
        self.what, left = what or self.what, duration(self.left())
        if self.bar:
            self.bar.update(self.task, completed=self.done, description=self.what, left=left)
            return
        twentieth, elapsed = int(20 * self.part), self.clock() - self.began
        if twentieth > self.twentieth or elapsed - self.printed >= max(20.0, elapsed / 30):
            self.twentieth, self.printed = twentieth, elapsed
            self.write(f"{self.part:4.0%}  {left:>6} left  {self.what}")

    @property
    def part(self) -> float:
        """The part of the work that is done, 0 to 1."""
        return min(1.0, self.done / self.total)

    def left(self) -> float:
        """Seconds until the work or the budget ends; infinite before anything tells."""
        new, rest = self.done - self.first, max(0, self.total - self.done)
        needed = math.inf
        if rest == 0 or new > TOLD_AFTER_SHARE * self.total:
            needed = rest * (self.clock() - self.began) / max(1, new)
        return min(needed, self.budget_left())


@contextmanager
def make_monitor(is_main: bool, budget_left: Clock) -> Iterator[Monitor]:
    """A bar in a terminal, plain lines elsewhere, silence on all ranks but the first."""
    console = Console(stderr=True, **PLAIN)
    if not is_main or not console.is_terminal:
        yield Monitor(budget_left, write=note if is_main else lambda line: None)
        return
    what = TextColumn("{task.description:<40}", markup=False)
    left = TextColumn("{task.fields[left]} left", markup=False)
    columns = what, BarColumn(), TaskProgressColumn(), left
    # What is written to standard error meanwhile comes above the bar.
    with Progress(*columns, console=console, transient=True) as bar:
        yield Monitor(budget_left, bar=bar)
