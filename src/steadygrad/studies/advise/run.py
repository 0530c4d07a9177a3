"""The study from its first check to its summary."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygrad.record import RunWriter, plural, read_run
from steadygrad.studies.advise.header import make_header
from steadygrad.studies.advise.plan import Plan, make_plan
from steadygrad.studies.advise.settings import Settings, read_settings
from steadygrad.studies.advise.summary import summarize
from steadygrad.studies.advise.units import Units
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.engine import Engine
from steadygrad.studies.ledger import Ledger
from steadygrad.studies.order import main_order
from steadygrad.studies.ranks import Ranks
from steadygrad.studies.resuming import go_on
from steadygrad.studies.session import Failed, Monitor, Outcome, Session, create
from steadygrad.studies.stop import Stop
from steadygrad.tasks import load_task

__all__ = ["Failed", "Monitor", "Outcome", "advise", "resume"]

WARM_UP_STEPS = 4
CALIBRATION_SECONDS = 0.5


def advise(
    settings: Settings, folder: Path, *, stop: Stop | None = None, monitor: Monitor
) -> Outcome:
    """Runs the study in a new folder.

    Args:
        settings: What to do.
        folder: Absent or empty.
        stop: Ends the study early. Default: only when the budget, from now on, is over.
        monitor: Watches.

    Raises:
        InputError: For anything that cannot be used; the record is not begun.
        Failed: If training diverges, or the task's code raises, later on.
    """
    stop = stop or Stop()
    ranks = Ranks.join(stop, settings.resolved_device)
    try:
        engine = _engine(settings, ranks)
        task = engine.task
        plan = make_plan(
            settings.budget_seconds,
            _speed(engine),
            batch_size=task.batch_size,
            train_size=len(task.train),
            valid_size=len(task.valid),
        )
        header = make_header(settings, engine, plan)
        writer = ranks.on_main(lambda: create(folder, header))
        stop.limit(settings.budget_seconds)
        return _session(folder, engine, writer, header, plan, monitor).run()
    finally:
        ranks.leave()


def resume(
    folder: Path,
    *,
    budget_seconds: float | None = None,
    stop: Stop | None = None,
    monitor: Monitor,
) -> Outcome:
    """Goes on with a run that was killed or stopped, to the numbers it would have had.

    The settings and the plan are those of the record; the budget's clock starts again.

    Args:
        folder: The run's folder.
        budget_seconds: Time from now on. It changes when the study is cut short, not what it
            does. Default: that of the record.
        stop: As for :func:`advise`.
        monitor: Watches.

    Raises:
        InputError: If the record cannot be read, is of another study, or the task's data or the
            number of processes have changed.
        Failed: If training diverges, or the task's code raises, later on.
    """
    recorded = read_run(folder)
    settings, plan = read_settings(recorded), Plan.from_dict(recorded.header["plan"])
    arguments = recorded.header, plan, monitor

    def session(engine: Engine, writer: RunWriter | None, times: Mapping[str, Any]) -> Session:
        return _session(folder, engine, writer, *arguments, events=recorded.events, times=times)

    return go_on(
        recorded,
        settings,
        budget_seconds=budget_seconds,
        stop=stop,
        monitor=monitor,
        make_engine=_engine,
        make_session=session,
    )


def _session(
    folder: Path,
    engine: Engine,
    writer: RunWriter | None,
    header: Mapping[str, Any],
    plan: Plan,
    monitor: Monitor,
    **resumed: Any,
) -> Session:
    def work(ledger: Ledger, checkpoints: Checkpoints) -> None:
        tolerance = header["settings"]["tolerance"]
        advance = monitor.advance
        Units(engine, plan, ledger, checkpoints, tolerance=tolerance, advance=advance).run()

    return Session(
        folder=folder,
        header=header,
        engine=engine,
        work=work,
        summarize=summarize,
        total=plan.work,
        done=lambda ledger: _done(ledger, plan),
        points=_points(header, plan),
        writer=writer,
        monitor=monitor,
        **resumed,
    )


def _points(header: Mapping[str, Any], plan: Plan) -> dict[str, int]:
    """Work done when each point of training is measured."""
    sample = plural(header["task"]["sample"])
    names = (f"{point.samples:,} {sample}" for point in plan.points)
    return dict(zip(names, plan.ends(), strict=True))


def _engine(settings: Settings, ranks: Ranks) -> Engine:
    task = ranks.together(lambda: load_task(settings.task))
    engine = Engine(task, seed=settings.seed, dtype=settings.dtype, ranks=ranks)
    engine.try_once()
    return engine


def _speed(engine: Engine) -> float:
    """Samples a second: the task's own figure on CPU, else measured and rounded down."""
    task, ranks = engine.task, engine.ranks
    if task.samples_per_second is not None and ranks.device.type == "cpu":
        return task.samples_per_second
    order = main_order(len(task.train), engine.seed)
    steps = engine.run(order, 0, 1 << 40, task.batch_size)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    began, seen = time.monotonic(), 0
    # Every rank takes part until rank 0 has seen enough.
    while ranks.gather(time.monotonic() - began < CALIBRATION_SECONDS)[0]:
        for _ in range(4):
            next(steps)
            seen += task.batch_size
    speed = ranks.gather(seen / (time.monotonic() - began))[0]
    engine.restart()
    # A power of two: a machine a little busier than last time makes the same plan.
    return float(2.0 ** math.floor(math.log2(speed)))


def _done(ledger: Ledger, plan: Plan) -> int:
    """Samples of work that are recorded already."""
    trained = max((event["samples"] for event in ledger.select("point")), default=0)
    events = [*ledger.select("noise"), *ledger.select("branch")]
    return int(min(plan.work, trained + sum(event["samples"] for event in events)))
