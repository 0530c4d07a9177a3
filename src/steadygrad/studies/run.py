"""A study from its first check to its summary, however it ends."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from steadygrad._checks import InputError, launched
from steadygrad.studies.calibration import calibrate, resolve_device
from steadygrad.studies.deadline import BUDGET, Deadline, StudyInterrupted
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.environment import environment
from steadygrad.studies.executors import (
    Workers,
    cuda_devices,
    dask_workers,
    made_workers,
    process_workers,
)
from steadygrad.studies.files import OBJECT, located, remember, trusted
from steadygrad.studies.folder import (
    HEADER,
    Results,
    Run,
    RunError,
    create,
    read_run,
    refuse_links,
    understanding,
    write_result,
    write_summary,
)
from steadygrad.studies.header import changes, make_header
from steadygrad.studies.schema import FREE, Header, Result, schema_of
from steadygrad.studies.strict_json import dumps
from steadygrad.studies.study import Study, study_class, study_of
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.work import Coordinator, Monitor, Worker, recorded_trainer, run_serial
from steadygrad.tasks import Task, load_task

DEPENDENT = (
    "A sample's loss depends on the other samples of its batch. The batch size is part of what is "
    "trained: no batch was cut into micro-batches, and no noise scale was measured."
)


@dataclass(frozen=True)
class Outcome:
    """End of a study.

    Attributes:
        summary: Content of ``summary.json``.
        too_little: What is missing where the study says nothing at all; None otherwise.
        stopped_by: The signal that ended it; 0 otherwise.
        is_main: Whether this process wrote the files.
        page: The page, where it was drawn.
    """

    folder: Path
    summary: dict[str, Any]
    too_little: str | None = None
    stopped_by: int = 0
    is_main: bool = True
    page: Path | None = None


class StudyFailed(InputError):
    """A trial failed after the run was begun, or the page: ``outcome`` has the results."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


def conduct(
    name: str,
    given: Mapping[str, Any],
    *,
    task: Task | None = None,
    out: Path | None = None,
    continued: Path | None = None,
    deadline: Deadline,
    monitor: Monitor,
) -> Outcome:
    """Starts or resumes a study, and draws its page, for the command line and for Python.

    SIGINT and SIGTERM end it like its budget meanwhile.

    Args:
        name: Name of the study.
        given: The settings that are not as by default or, for a run that continues, as recorded.
        task: A task that only this process has, in place of a setting.
        out: Folder of a new run. Default: one in ``runs``, named by the time.
        continued: Folder of a run to resume.
        deadline: Ends the study early.
        monitor: Watches.

    Raises:
        InputError: For anything that cannot be used, or if the budget was over too early for any
            answer.
        StudyFailed: If training diverges, the task's code raises, or no page can be written.
        StudyInterrupted: By a signal before the run was begun.
    """
    page = import_module("steadygrad.studies.page")  # says now if an extra is missing
    if task is not None:
        given = {"workers": 1, **given, "task": OBJECT}
        if given["workers"] > 1 or given.get("dask") or given.get("executor"):
            raise InputError(
                "Expected a task that workers can load. Found a Task, which only this process "
                "has. Remedy: task='path/to/file.py:make_task', or no workers."
            )
    settings = _checked(name, schema_of(name).Settings(**given))
    if out is not None and continued is not None and out.resolve() != continued.resolve():
        raise InputError(
            f"--resume continues a run in its own folder. Found --out {str(out)!r} as well. "
            "Remedy: leave --out away."
        )
    folder = continued or out or Path(f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}")
    common: dict[str, Any] = {"task": task, "deadline": deadline, "monitor": monitor}
    with deadline.signals():
        try:
            if continued is None:
                outcome = start(name, settings, folder, **common)
            else:
                outcome = resume(folder, given, name=name, **common)
        except StudyFailed as error:
            # Why a study failed matters more than why its page did.
            with suppress(Exception):
                if error.outcome.is_main:
                    error.outcome = replace(error.outcome, page=page.write(folder))
            raise
        except KeyboardInterrupt:
            if (folder / HEADER).exists():
                monitor.say(f"stopped; --resume {folder} continues the run.")
            raise
        if outcome.is_main:
            try:
                outcome = replace(outcome, page=page.write(folder))
            except InputError as error:
                if not outcome.too_little:
                    raise StudyFailed(str(error), outcome) from error
    if outcome.too_little:
        raise InputError(
            f"{outcome.too_little}. Found {str(folder)!r} unfinished. "
            "Remedy: continue with --resume RUN --budget TIME."
        )
    return outcome


def _checked(name: str, settings: Any) -> Any:
    """Checks settings made in Python as strictly as the command line's."""
    try:
        return msgspec.convert(asdict(settings), schema_of(name).Settings)
    except msgspec.ValidationError as error:
        raise InputError(f"{error}. Found {settings}. Remedy: another value.") from None


def start(
    name: str,
    settings: Any,
    folder: Path,
    *,
    task: Task | None = None,
    deadline: Deadline | None = None,
    monitor: Monitor,
) -> Outcome:
    """Runs a study in a folder that is absent or empty.

    The task is loaded where none is given. A deadline ends the study early. Default: when the
    budget, from now on, is over.

    Raises:
        InputError: For anything that cannot be used; nothing is written then.
        StudyFailed: If training diverges, or the task's code raises, later on.
    """
    kind, deadline, settings = study_class(name), deadline or Deadline(), _checked(name, settings)
    device = resolve_device(settings.device)
    joined = DistributedContext.joined(deadline, device, settings.sharding)
    with joined as context, ExitStack() as stack:
        task = task or context.together(lambda: load_task(settings.task))
        trainer = kind.make_trainer(task, settings, context)
        trainer.try_once()
        cluster = _cluster(stack, settings, context)
        speed, workers = calibrate(settings, trainer, cluster.count() if cluster else 0)
        plan = kind.make_plan(settings, trainer, speed=speed, workers=workers)
        trainer.fit_micro_batch(kind.largest_batch(plan, task))
        trainer.restart()
        header = make_header(kind, settings, trainer, workers, plan)
        context.on_main(lambda: create(folder, header))
        deadline.limit(settings.budget)
        context.on_main(lambda: remember(folder))
        study = kind(header)
        study.files = located(settings)
        pool = cluster or _local_workers(workers, header)
        return _run(study, folder, trainer, Results(), pool, monitor)


def resume(
    folder: Path,
    given: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    task: Task | None = None,
    deadline: Deadline | None = None,
    monitor: Monitor,
) -> Outcome:
    """Goes on with a run that was killed or stopped, to the numbers it would have had.

    Settings and plan are those of the record; the budget's clock starts again.

    Args:
        folder: The run's folder.
        given: Settings that a user names again; only ``FREE`` ones may differ from the record.
        name: Name of the study that the record must be of. Default: any.
        task: The task, where the run was started with one.
        deadline: As for :func:`start`.
        monitor: Watches.

    Raises:
        InputError: If the record cannot be read, or the settings, the task's data, or the number
            of processes have changed.
        StudyFailed: If training diverges, or the task's code raises, later on.
    """
    run = read_run(folder)
    header, given = run.header, dict(given or {})
    if name and header.study != name:
        raise InputError(
            f"Expected a run of `steadygrad {name}`. Found one of `steadygrad {header.study}` in "
            f"{str(folder)!r}. Remedy: steadygrad {header.study} --resume."
        )
    settings = _agreed(header, given)
    with understanding(folder):
        done = _completed(run, "budget" in given, monitor)
    if done is not None:
        return done
    if settings.task == OBJECT and task is None:
        raise InputError(
            f"Expected a task that can be loaded. Found {str(folder)!r}, begun with {OBJECT} in "
            f"Python. Remedy: steadygrad.{header.study}(task, resume={str(folder)!r}) there."
        )
    refuse_links(folder)
    deadline, device = deadline or Deadline(), resolve_device(header.runtime.device)
    joined = DistributedContext.joined(deadline, device, settings.sharding)
    with joined as context, ExitStack() as stack:
        study = study_of(header)
        # Only rank 0's machine knows which runs were begun there.
        study.files = context.gather(context.on_main(lambda: trusted(run, given)))[0] or {}
        trainer = recorded_trainer(study, context, task)
        for warning in changes(header, trainer):
            monitor.say(warning)
        for file in run.unreadable:
            monitor.say(f"results/{file} cannot be read: its trial is run again.")
        # Read on every rank before one of them writes.
        context.gather(None)
        cluster = _cluster(stack, settings, context)
        deadline.limit(settings.budget)
        pool = cluster or _local_workers(settings.workers, header)
        return _run(study, folder, trainer, run.results, pool, monitor)


def _agreed(header: Any, given: Mapping[str, Any]) -> Any:
    """The record's settings; the ones that may change are as given now."""
    for name, value in given.items():
        recorded = getattr(header.settings, name)
        same = value == recorded or (name == "device" and value == header.runtime.device)
        if not same and name not in FREE:
            flag = "TASK" if name == "task" else f"--{name.replace('_', '-')}"
            raise InputError(
                f"--resume takes {name} = {recorded!r} from the record. Found {value!r}. "
                f"Remedy: leave {flag} away, or start a new run with --out."
            )
    free = {name: value for name, value in given.items() if name in FREE}
    return replace(header.settings, **{"dask": "", "executor": "", **free})


def _completed(run: Run, more_time: bool, monitor: Monitor) -> Outcome | None:
    """The outcome of a run that is complete already; None for one that can continue.

    Asked before the ranks join: a complete run needs neither its device nor the others.
    """
    study = study_of(run.header)
    if len(study.finished(run.results)) < len(study.trials()):
        return None
    is_main = launched()[0] == 0
    if is_main and more_time:
        monitor.say("this run is complete. Remedy: start a new run with a longer --budget.")
    summary = _summary(study, run.results, "complete")
    # As texts: a NaN is not equal to itself.
    if is_main and dumps(summary) != dumps(run.summary):
        write_summary(run.folder, summary)
    return Outcome(run.folder, summary, is_main=is_main)


def _summary(study: Study, results: Results, status: str) -> dict[str, Any]:
    summary = study.summarize(results, status)
    if study.header.task.dependent:
        summary = msgspec.structs.replace(summary, remarks=(*summary.remarks[:2], DEPENDENT))
    return summary.to_dict()


def _cluster(stack: ExitStack, settings: Any, context: DistributedContext) -> Workers | None:
    """The workers that the settings name; None where they name none."""
    named = [f"--{name}" for name in ("dask", "executor") if getattr(settings, name)]
    if not named:
        return None
    if context.size > 1 or len(named) > 1:
        raise InputError(
            f"{' and '.join(named)}: expected one way to run trials, each in one process. Found "
            f"{len(named)}, in {context.size} processes. Remedy: one of them, without torchrun."
        )
    dask, executor = settings.dask, settings.executor
    pool = dask_workers(dask) if dask else made_workers(executor, settings.workers)
    stack.callback(pool.close)
    return pool


def _local_workers(workers: int, header: Header) -> Workers | None:
    """Worker processes of this machine; None where trials run in this process."""
    runtime = header.runtime
    if not workers:
        # As many as the plan reckons with, where this machine has the cores for them.
        enough = max(1, int(environment()["cores"]) // runtime.threads)
        workers = min(runtime.workers, enough) if runtime.device == "cpu" else runtime.workers
    if workers < 2 or launched()[1] > 1:
        return None
    return process_workers(workers, cuda_devices() if runtime.device == "cuda" else ())


def _run(
    study: Study,
    folder: Path,
    trainer: Trainer,
    results: Results,
    pool: Workers | None,
    monitor: Monitor,
) -> Outcome:
    """Runs all trials, and writes the summary however that ends."""
    context, worker = trainer.context, Worker(study, folder, trainer)

    def keep(result: Result) -> None:
        if results.add(result) and context.is_main:
            write_result(folder, result)

    def end(status: str) -> dict[str, Any]:
        summary = _summary(study, results, status)
        if context.is_main:
            if results.differing:
                monitor.say(
                    "the machine or its libraries are not those of the record: numbers that "
                    f"differ from it: {results.differing}."
                )
            write_summary(folder, summary)
        return summary

    with understanding(folder):
        _tell(study, results, monitor)
    status, reason = "complete", 0
    try:
        try:
            if pool is None:
                run_serial(study, results, keep, worker, monitor)
            else:
                Coordinator(study, results, keep, pool, folder, context.deadline, monitor).run()
        except StudyInterrupted as stopped:
            reason = stopped.reason
            status = "budget" if reason == BUDGET else "interrupted"
        summary = end(status)
        if status == "complete":
            worker.checkpoints.remove()
    except RunError:
        raise
    except InputError as error:
        summary = end("failed")
        outcome = Outcome(folder, summary, study.too_little(summary), is_main=context.is_main)
        more = (
            f"The results are kept. --resume {folder} continues where the cause was outside of "
            "the task's files; a changed task needs a new run."
        )
        raise StudyFailed(f"{error} {more}", outcome) from error
    too_little = study.too_little(summary) if status == "budget" else None
    return Outcome(folder, summary, too_little, reason, context.is_main)


def _tell(study: Study, results: Results, monitor: Monitor) -> None:
    """Tells the monitor the planned work, and the part that is done."""
    costs = {trial.key: trial.cost for trial in study.trials()}
    ends = dict(zip(costs, accumulate(costs.values()), strict=True))
    milestones = {name: ends[key] for name, key in study.milestones().items()}
    done = sum(costs[key] for key in study.finished(results))
    monitor.begin(sum(costs.values()), done, milestones)
