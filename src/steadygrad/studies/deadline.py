"""The end of a study before its work is done: the budget is over, or a signal came."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

BUDGET = 0
# In order of precedence: a signal is reported even when the budget is over as well.
REASONS = (signal.SIGTERM, signal.SIGINT, BUDGET)


class StudyInterrupted(Exception):
    """Ends the trial in hand; ``reason`` is ``BUDGET``, or the signal's number."""

    def __init__(self, reason: int) -> None:
        super().__init__(reason)
        self.reason = reason


class Deadline:
    """Remembers that the study should end; the training loop asks between optimizer steps.

    The budget counts from ``began``, a reading of ``time.monotonic()``. Default: now. A worker's is
    over when the file ``stop`` is there.
    """

    def __init__(self, began: float | None = None, stop: Path | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self._deadline = math.inf
        self._stop, self._signal = stop, 0

    def limit(self, seconds: float) -> None:
        """Sets the budget. Before that there is none."""
        self._deadline = self._began + seconds

    def left(self) -> float:
        """Seconds of the budget that are left; infinite before there is one."""
        return self._deadline - time.monotonic()

    @property
    def flags(self) -> list[float]:
        """1.0 for each of ``REASONS`` that holds."""
        late = self.left() <= 0 or (self._stop is not None and self._stop.exists())
        return [float(self._signal == reason if reason else late) for reason in REASONS]

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM meanwhile; the second one of a kind ends the process."""
        # Python lets only the main thread handle signals.
        in_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
