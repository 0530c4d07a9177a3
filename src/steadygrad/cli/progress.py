"""How far a study is, and how long it still takes: for a person at a terminal, and for a log."""

import math
import sys
import time
from collections.abc import Callable, Mapping

from rich.markup import escape
from rich.progress import Progress

__all__ = ["BarMonitor", "LineMonitor", "Pace", "SilentMonitor", "duration"]

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


class Pace:
    """How fast a study goes.

    Args:
        budget_left: Seconds of the budget that are left.
        clock: Seconds that only ever grow.
    """

    def __init__(self, budget_left: Clock, clock: Clock = time.monotonic) -> None:
        self._budget_left, self._clock = budget_left, clock
        self.begin(1, 0, {})

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the clock; ``done`` of the work was done before."""
        self._total, self._done, self._first, self._points = total, done, done, points
        self._began, self._warned = self._clock(), False

    def advance(self, samples: int) -> None:
        """Counts work that was done."""
        self._done += samples

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
        return min(self._needed(), self._budget_left(), key=_nan_last)

    def _needed(self) -> float:
        """Seconds for the rest of the work at the speed so far; NaN before that says anything."""
        new = self._done - self._first
        rest = max(0, self._total - self._done)
        told = rest == 0 or new > TOLD_AFTER_SHARE * self._total
        return rest * self.elapsed / new if told and new else math.nan

    def warning(self) -> str | None:
        """Says once which points the budget will cut, when that is known.

        Returns:
            A sentence, or None.
        """
        new = self._done - self._first
        if self._warned or (
            self.elapsed < KNOWN_AFTER_SECONDS and new < KNOWN_AFTER_SHARE * self._total
        ):
            return None
        needed, budget = self._needed(), self._budget_left()
        if not needed > budget:
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


def _nan_last(seconds: float) -> float:
    return math.inf if math.isnan(seconds) else seconds


class SilentMonitor:
    """Says nothing, as on all ranks but one."""

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Ignored."""

    def advance(self, samples: int, what: str) -> None:
        """Ignored."""

    def say(self, line: str) -> None:
        """Ignored."""


class LineMonitor:
    """Prints plain lines: at every twentieth of the work, and when a while went by without one.

    A while is 20 seconds, or a thirtieth of the time so far where that is longer: the lines
    between the twentieths are 30 in the first ten minutes, and about 100 in a day.

    Args:
        budget_left: Seconds of the budget that are left.
        clock: Seconds that only ever grow.
    """

    def __init__(self, budget_left: Clock, clock: Clock = time.monotonic) -> None:
        self._pace = Pace(budget_left, clock)
        self._what, self._twentieth, self._printed = "", 0, 0.0

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the clock."""
        self._pace.begin(total, done, points)
        self._twentieth, self._printed = int(20 * self._pace.part), 0.0
        print(f"{total:,} samples of work, {done:,} of them done", file=sys.stderr, flush=True)

    def advance(self, samples: int, what: str) -> None:
        """Prints how far the study is, when it is time to."""
        self._pace.advance(samples)
        self._what = what or self._what
        warning = self._pace.warning()
        if warning:
            self.say(warning)
        twentieth, elapsed = int(20 * self._pace.part), self._pace.elapsed
        if twentieth == self._twentieth and elapsed - self._printed < max(20.0, elapsed / 30):
            return
        self._twentieth, self._printed = twentieth, elapsed
        left = duration(self._pace.left())
        line = f"{self._pace.part:4.0%}  {left:>6} left  {self._what}"
        print(line, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Prints the line."""
        print(f"steadygrad: {line}", file=sys.stderr, flush=True)


class BarMonitor:
    """Draws a progress bar with the time left.

    Args:
        progress: Shows the field ``left`` of its task.
        budget_left: Seconds of the budget that are left.
        clock: Seconds that only ever grow.
    """

    def __init__(
        self, progress: Progress, budget_left: Clock, clock: Clock = time.monotonic
    ) -> None:
        self._progress, self._pace = progress, Pace(budget_left, clock)
        self._task = progress.add_task("preparing", total=None, left="")

    def begin(self, total: int, done: int, points: Mapping[str, int]) -> None:
        """Starts the bar."""
        self._pace.begin(total, done, points)
        self._progress.reset(self._task, total=total, completed=done)

    def advance(self, samples: int, what: str) -> None:
        """Moves the bar."""
        self._pace.advance(samples)
        warning = self._pace.warning()
        if warning:
            self.say(warning)
        left = self._pace.left()
        shown = "" if math.isnan(left) else f"{duration(left)} left"
        self._progress.update(self._task, advance=samples, description=what or None, left=shown)

    def say(self, line: str) -> None:
        """Prints the line above the bar."""
        self._progress.console.print(f"steadygrad: {escape(line)}")
