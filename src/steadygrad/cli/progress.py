"""Progress of a study and the time left: for a person at a terminal, and for a log."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from steadygrad.cli.console import PLAIN, note, printable
from steadygrad.studies.text import listed

__all__ = ["Monitor", "duration", "make_monitor"]

Clock = Callable[[], float]

# The first tenth is slow: workers start and caches are cold. The next one tells the speed.
KNOWN_AFTER_SHARE, MARGIN = 0.1, 1.15
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
    """Shows a study's progress, the time left, and the parts that its budget will cut.

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

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the clock; ``done`` of the work was done before."""
        self.total, self.done, self.first, self.points = total, done, done, points
        self.began, self.warned = self.clock(), False
        self.twentieth, self.printed, self.what = int(20 * self.part), 0.0, ""
        # Time and work done at the end of the slow beginning.
        self.known: tuple[float, int] | None = None
        if self.bar:
            self.bar.reset(self.task, total=total, completed=done)
        else:
            self.write(f"{total:,} samples of work, {done:,} of them done")

    def advance(self, samples: int, what: str) -> None:
        """Counts work that was done; says once which points the budget will cut."""
        self.done += samples
        if not self.warned and (cut := self._cut()):
            self.warned = True
            self.say(cut)
        self._show(printable(what))

    def skip(self, samples: int) -> None:
        """Counts work that is not needed, which says nothing about the speed."""
        self.done += samples
        self.first += samples
        if self.known is not None:
            self.known = self.known[0], self.known[1] + samples
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

    def _cut(self) -> str:
        """A warning of the parts that the budget will cut, once known; else an empty text."""
        now, share = self.clock(), KNOWN_AFTER_SHARE * (self.total - self.first)
        if self.known is None:
            self.known = (now, self.done) if self.done - self.first >= share else None
            return ""
        began, done = self.known
        new, budget = self.done - done, max(0.0, self.budget_left())
        needed = (self.total - self.done) * (now - began) / max(1, new)
        if new < share or needed <= MARGIN * budget + 1:
            return ""
        reached = self.done + new * budget / (now - began)
        cut = [name for name, end in self.points.items() if end > reached]
        if not cut:
            return ""
        return (
            f"at the present speed the work takes {duration(needed)} more and the budget ends in "
            f"{duration(budget)}: what is measured after {listed(cut)} will be cut short or left "
            "out. Remedy: let it end, then continue with --resume RUN --budget TIME."
        )


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
