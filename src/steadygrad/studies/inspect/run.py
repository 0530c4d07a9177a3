"""The study from its first check to its summary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from steadygrad.record import RunWriter, environment, read_run
from steadygrad.scale.layers import parts_of
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.engine import Engine
from steadygrad.studies.hardware import accelerator
from steadygrad.studies.inspect import scalers
from steadygrad.studies.inspect.plan import BEFORE, Plan, make_plan
from steadygrad.studies.inspect.settings import Settings, read_settings
from steadygrad.studies.inspect.summary import summarize
from steadygrad.studies.inspect.units import Units
from steadygrad.studies.ledger import Ledger
from steadygrad.studies.ranks import Ranks
from steadygrad.studies.resuming import go_on
from steadygrad.studies.session import Monitor, Outcome, Session, create
from steadygrad.studies.stop import Stop
from steadygrad.tasks import describe, load_task

__all__ = ["inspect", "resume"]


def inspect(
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
        plan = make_plan(settings.steps, batch_size=task.batch_size, valid_size=len(task.valid))
        header = _header(settings, engine, plan)
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

    Args:
        folder: The run's folder.
        budget_seconds: Time from now on. Default: that of the record.
        stop: As for :func:`inspect`.
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


def _engine(settings: Settings, ranks: Ranks) -> Engine:
    task = ranks.together(lambda: load_task(settings.task))
    scaling = scalers.one_scale
    engine = Engine(task, seed=settings.seed, dtype="float16", ranks=ranks, scaling=scaling)
    engine.try_once()
    return engine


def _header(settings: Settings, engine: Engine, plan: Plan) -> dict[str, Any]:
    task, ranks = engine.task, engine.ranks
    return {
        "study": "inspect",
        "seed": settings.seed,
        "task": {**describe(task, engine.model), "spec": settings.task},
        "settings": {
            "batch_size": task.batch_size,
            "lr": task.lr,
            "lr_rule": task.lr_rule,
            "steps": settings.steps,
            "budget_seconds": settings.budget_seconds,
            "device": ranks.device.type,
            "dtype": "float16",
            "world_size": ranks.size,
            "threads": torch.get_num_threads(),
        },
        "plan": {**plan.as_dict(), "layers": parts_of(engine.model)},
        "environment": environment(accelerator(ranks.device)),
    }


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
        Units(engine, plan, ledger, checkpoints, advance=monitor.advance).run()

    return Session(
        folder=folder,
        header=header,
        engine=engine,
        work=work,
        summarize=summarize,
        total=plan.work,
        done=lambda ledger: _done(ledger, plan),
        points=_points(plan),
        writer=writer,
        monitor=monitor,
        **resumed,
    )


def _points(plan: Plan) -> dict[str, int]:
    """Work done when the one loss scale, and then the scales proposed, have been tried."""
    first = plan.steps[BEFORE] * plan.batch_size + plan.evaluation
    return {"one loss scale": first, "the scales proposed": plan.work}


def _done(ledger: Ledger, plan: Plan) -> int:
    """Samples of work that are recorded already."""
    steps = (plan.stretch(event["phase"], event["part"]) for event in ledger.select("part"))
    trained = sum(last - first for first, last in steps) * plan.batch_size
    return trained + len(ledger.select("phase")) * plan.evaluation
