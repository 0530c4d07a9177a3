"""Progress of a study and the time left: for a person at a terminal, and for a log."""

import math
import time
from collections.abc import Callable, Mapping

from rich.progress import Progress

from steadygrad.cli.console import note, printable

__all__ = ["BarMonitor", "LineMonitor", "Monitor", "duration"]

Clock = Callable[[], float]

# The first steps are slow: caches are cold, and the first evaluation is still to come.
KNOWN_AFTER_SECONDS, KNOWN_AFTER_SHARE = 10.0, 0.05
# A resumed study first repeats what its last checkpoint did not hold, which counts as no work.
TOLD_AFTER_SHARE = 0.01


def duration(seconds: float) -> str:
    """A time as people say it: ``45s``, ``3m20s``, ``1h05m``; ``?`` for NaN."""
    if math.isnan(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole // 60 % 60:02}m"


class Monitor:
    """Knows how far a study is and says nothing, as on all ranks but the first.

    Args:
        budget_left: Seconds of the budget that are left.
        clock: Seconds that only ever grow.
    """

    def __init__(self, budget_left: Clock, clock: Clock = time.monotonic) -> None:
        self._budget_left, self._clock = budget_left, clock
        Monitor.begin(self, 1, 0, {})

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the clock; ``done`` of the work was done before."""
        self._total, self._done, self._first, self._points = total, done, done, points
        self._began, self._warned = self._clock(), False

    def advance(self, samples: int, what: str) -> None:
        """Counts work that was done; says once which points the budget will cut."""
        self._done += samples
        warning = self._warning()
        if warning:
            self.say(warning)

    def say(self, line: str) -> None:
        """Takes a line for the user."""

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
        told = rest == 0 or new > TOLD_AFTER_SHARE * self._total
        return rest * self.elapsed / new if told and new else math.nan

    def _warning(self) -> str | None:
        """Once, as soon as it is known: which points the budget will cut."""
        new = self._done - self._first
        early = self.elapsed < KNOWN_AFTER_SECONDS and new < KNOWN_AFTER_SHARE * self._total
        needed, budget = self._needed(), self._budget_left()
        if self._warned or early or not needed > budget:
            return None
        reached = self._done + new * max(0.0, budget) / self.elapsed
        cut = [name for name, end in self._points.items() if end > reached]
        if not cut:
            return None
        self._warned = True
        *others, last = cut
        names = f"{', '.join(others)} and {last}" if others else last
        return (
            f"at the speed so far the work takes {duration(needed)} more and the budget ends in "
            f"{duration(budget)}: what is measured after {names} will be cut short or left out. "
            "Remedy: let it end, then go on by --resume RUN --budget TIME."
        )


class LineMonitor(Monitor):
    """Prints plain lines: at every twentieth of the work, and when a while went by without one.

    A while is 20 seconds, or a thirtieth of the time so far where that is longer: the lines
    between the twentieths are 30 in the first ten minutes, and about 100 in a day.
    """

    _what, _twentieth, _printed = "", 0, 0.0

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the clock."""
        super().begin(total, done, points)
        self._twentieth, self._printed = int(20 * self.part), 0.0
        note(f"{total:,} samples of work, {done:,} of them done")

    def advance(self, samples: int, what: str) -> None:
        """Prints how far the study is, when it is time to."""
        super().advance(samples, what)
        self._what = what or self._what
        twentieth, elapsed = int(20 * self.part), self.elapsed
        if twentieth == self._twentieth and elapsed - self._printed < max(20.0, elapsed / 30):
            return
        self._twentieth, self._printed = twentieth, elapsed
        note(f"{self.part:4.0%}  {duration(self.left()):>6} left  {printable(self._what)}")

    def say(self, line: str) -> None:
        """Prints the line."""
        note(f"steadygrad: {printable(line)}")


class BarMonitor(Monitor):
    """Draws a progress bar with the time left.

    Args:
        progress: Shows the field ``left`` of its task.
        budget_left: Seconds of the budget that are left.
        clock: Seconds that only ever grow.
    """

    def __init__(
        self, progress: Progress, budget_left: Clock, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(budget_left, clock)
        self._progress = progress
        self._task = progress.add_task("preparing", total=None, left="")

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the bar."""
        super().begin(total, done, points)
        self._progress.reset(self._task, total=total, completed=done)

    def advance(self, samples: int, what: str) -> None:
        """Moves the bar."""
        super().advance(samples, what)
        what, left = printable(what), self.left()
        shown = "" if math.isnan(left) else f"{duration(left)} left"
        self._progress.update(self._task, advance=samples, description=what or None, left=shown)

    def say(self, line: str) -> None:
        """Prints the line above the bar."""
        self._progress.console.print(f"steadygrad: {printable(line)}", markup=False)
