"""Progress of a study and the time left: for a person at a terminal, and for a log."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from steadygrad.cli.console import PLAIN, note, printable
from steadygrad.studies.text import listed

__all__ = ["BarMonitor", "LineMonitor", "Monitor", "duration", "make_monitor"]

Clock = Callable[[], float]

# The first tenth is slow: workers start and caches are cold. The next one tells the speed.
KNOWN_AFTER_SHARE, MARGIN = 0.1, 1.15
# A resumed study first repeats what its last checkpoint did not hold, which counts as no work.
TOLD_AFTER_SHARE = 0.01


def duration(seconds: float) -> str:
    """A time as people say it: ``45s``, ``3m20s``, ``1h05m``; ``?`` for NaN."""
    if math.isnan(seconds):
        return "?"
    minutes, whole = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        return f"{minutes}m{whole:02}s" if minutes else f"{whole}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


class Monitor:
    """Knows how far a study is and says nothing, as on all ranks but the first."""

    def __init__(self, budget_left: Clock, clock: Clock = time.monotonic) -> None:
        self._budget_left, self._clock = budget_left, clock

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the clock; ``done`` of the work was done before."""
        self._total, self._done, self._first, self._points = total, done, done, points
        self._began, self._warned = self._clock(), False
        self._known: tuple[float, int] | None = None
        self._show_begin()

    def advance(self, samples: int, what: str) -> None:
        """Counts work that was done; says once which points the budget will cut."""
        self._done += samples
        if warning := self._warning():
            self.say(warning)
        self._show(samples, printable(what))

    def skip(self, samples: int) -> None:
        """Counts work that is not needed, which says nothing about the speed."""
        self._done += samples
        self._first += samples
        if self._known is not None:
            self._known = self._known[0], self._known[1] + samples
        self._show(samples, "")

    def say(self, line: str) -> None:
        """Takes a line for the user."""

    def _show_begin(self) -> None:
        pass

    def _show(self, samples: int, what: str) -> None:
        pass

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    @property
    def part(self) -> float:
        """The part of the work that is done, 0 to 1."""
        return min(1.0, self._done / self._total)

    def left(self) -> float:
        """Seconds until the study ends, with its work or with its budget; NaN if nothing tells."""
        needed, budget = self._needed(), self._budget_left()
        return budget if budget < needed or (math.isnan(needed) and budget < math.inf) else needed

    def _needed(self) -> float:
        """Seconds for the rest of the work at the speed so far; NaN before that says anything."""
        new = self._done - self._first
        rest = max(0, self._total - self._done)
        known = rest == 0 or new > TOLD_AFTER_SHARE * self._total
        return rest * self.elapsed / new if known and new else math.nan

    def _warning(self) -> str | None:
        """Once, as soon as it is known: which points the budget will cut."""
        now, share = self._clock(), KNOWN_AFTER_SHARE * (self._total - self._first)
        if self._known is None:
            self._known = (now, self._done) if self._done - self._first >= share else None
            return None
        began, done = self._known
        new, budget = self._done - done, max(0.0, self._budget_left())
        needed = (self._total - self._done) * (now - began) / max(1, new)
        if self._warned or new < share or needed <= MARGIN * budget + 1:
            return None
        reached = self._done + new * budget / (now - began)
        cut = [name for name, end in self._points.items() if end > reached]
        if not cut:
            return None
        self._warned = True
        return (
            f"at the present speed the work takes {duration(needed)} more and the budget ends in "
            f"{duration(budget)}: what is measured after {listed(cut)} will be cut short or left "
            "out. Remedy: let it end, then continue with --resume RUN --budget TIME."
        )


class LineMonitor(Monitor):
    """Prints plain lines: at every twentieth of the work, and when a while went by without one.

    A while is 20 seconds, or a thirtieth of the time so far where that is longer: the lines
    between the twentieths are 30 in the first ten minutes, and about 100 in a day.
    """

    _what = ""

    def _show_begin(self) -> None:
        self._twentieth, self._printed = int(20 * self.part), 0.0
        note(f"{self._total:,} samples of work, {self._done:,} of them done")

    def _show(self, samples: int, what: str) -> None:
        self._what = what or self._what
        twentieth, elapsed = int(20 * self.part), self.elapsed
        if twentieth == self._twentieth and elapsed - self._printed < max(20.0, elapsed / 30):
            return
        self._twentieth, self._printed = twentieth, elapsed
        note(f"{self.part:4.0%}  {duration(self.left()):>6} left  {self._what}")

    def say(self, line: str) -> None:
        """Prints the line."""
        note(f"steadygrad: {printable(line)}")


class BarMonitor(Monitor):
    """Draws a bar with the time left; ``progress`` shows the field ``left`` of its task."""

    def __init__(self, progress: Progress, *clocks: Clock) -> None:
        super().__init__(*clocks)
        self._progress = progress
        self._task = progress.add_task("preparing", total=None, left="")

    def _show_begin(self) -> None:
        self._progress.reset(self._task, total=self._total, completed=self._done)

    def _show(self, samples: int, what: str) -> None:
        left = "" if math.isnan(self.left()) else f"{duration(self.left())} left"
        self._progress.update(self._task, advance=samples, description=what or None, left=left)

    def say(self, line: str) -> None:
        """Prints the line above the bar."""
        self._progress.console.print(f"steadygrad: {printable(line)}", markup=False)


@contextmanager
def make_monitor(is_main: bool, budget_left: Clock) -> Iterator[Monitor]:
    """A bar in a terminal, plain lines elsewhere, silence on all ranks but the first."""
    console = Console(stderr=True, **PLAIN)
    if not is_main or not console.is_terminal:
        yield (LineMonitor if is_main else Monitor)(budget_left)
        return
    what = TextColumn("{task.description:<40}", markup=False)
    left = TextColumn("{task.fields[left]}", markup=False)
    columns = what, BarColumn(), TaskProgressColumn(), left
    with Progress(*columns, console=console, transient=True) as progress:
        yield BarMonitor(progress, budget_left)
