"""Going on with a run that was killed or stopped, whatever its study."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from steadygrad._checks import check_number
from steadygrad.record import Run, RunWriter
from steadygrad.studies.changes import changes
from steadygrad.studies.engine import Engine
from steadygrad.studies.ranks import Ranks
from steadygrad.studies.session import Monitor, Outcome, Session, finished
from steadygrad.studies.stop import Stop

__all__ = ["go_on"]


class _Settings(Protocol):
    @property
    def budget_seconds(self) -> float: ...

    @property
    def resolved_device(self) -> torch.device: ...


S = TypeVar("S", bound=_Settings)


def go_on(
    recorded: Run,
    settings: S,
    *,
    budget_seconds: float | None,
    stop: Stop | None,
    monitor: Monitor,
    make_engine: Callable[[S, Ranks], Engine],
    make_session: Callable[[Engine, RunWriter | None, Mapping[str, Any]], Session],
) -> Outcome:
    """Goes on to the numbers that the run would have had.

    Args:
        recorded: The run.
        settings: Those of its record.
        budget_seconds: Time from now on. Default: that of the record.
        stop: Ends the study early. Default: only when the budget is over.
        monitor: Watches.
        make_engine: Makes what trains.
        make_session: Given that, the record's writer, and what the end of the record says of this
            time, makes the rest of the study.

    Raises:
        InputError: If the time is no time, or the task or the number of processes have changed.
        Failed: If training diverges, or the task's code raises, later on.
    """
    budget = settings.budget_seconds if budget_seconds is None else budget_seconds
    check_number("budget_seconds", budget, low=0, low_open=True)
    done = finished(recorded, budget_seconds, monitor)
    if done is not None:
        return done
    stop = stop or Stop()
    ranks = Ranks.join(stop, settings.resolved_device)
    try:
        engine = make_engine(settings, ranks)
        for warning in changes(recorded.header, engine):
            monitor.say(warning)
        # Read on every rank before one of them writes.
        ranks.gather(None)
        writer = ranks.on_main(lambda: RunWriter.resume(recorded.folder))
        stop.limit(budget)
        # Under "time": a run that had more of it is the same run.
        times = {} if budget == settings.budget_seconds else {"time": {"budget_seconds": budget}}
        return make_session(engine, writer, times).run()
    finally:
        ranks.leave()
