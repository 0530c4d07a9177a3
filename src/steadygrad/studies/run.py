"""A study from its first check to its summary, however it ends."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from steadygrad._checks import InputError, launched
from steadygrad._studies import module_of
from steadygrad.studies import page, work
from steadygrad.studies.calibration import calibrate, resolve_device
from steadygrad.studies.distributed import BUDGET, Deadline, DistributedContext, StudyInterrupted
from steadygrad.studies.executors import Workers, cluster_workers, local_workers
from steadygrad.studies.folder import (
    HEADER,
    Results,
    Run,
    RunError,
    create,
    dumps,
    identity,
    read_run,
    refuse_links,
    summarize,
    understanding,
    write_summary,
)
from steadygrad.studies.paired import MOST
from steadygrad.studies.record import OBJECT, changes, load, located, make_header, remember, trusted
from steadygrad.studies.schema import FREE, Summary
from steadygrad.studies.trainer import Trainer
from steadygrad.tasks import Task


@dataclass(frozen=True)
class Outcome:
    """End of a study; ``stopped_by`` is the signal that ended it, 0 otherwise.

    ``failure``: the error of a trial or of the page, which is to be raised once results are shown.
    """

    folder: Path
    summary: Summary
    stopped_by: int = 0
    failure: InputError | None = None
    page: Path | None = None


_running = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    if not _running.acquire(blocking=False):
        # Two that share torch's random numbers would give neither's.
        raise InputError(
            "Expected one study at a time in a process. Found another one that is running. "
            "Remedy: wait for it, or another process."
        )
    try:
        yield
    finally:
        _running.release()


def conduct(
    name: str,
    given: Mapping[str, Any],
    *,
    task: Task | None = None,
    out: Path | None = None,
    continued: Path | None = None,
    deadline: Deadline,
    monitor: work.Monitor,
) -> Outcome:
    """Starts or resumes a study, and draws its page, for the command line and for Python.

    SIGINT and SIGTERM end it like its budget meanwhile. ``given`` are the settings that are not as
    by default or, in the folder ``continued`` of a run to resume, as recorded; for a ``task`` that
    only this process has the setting is ``OBJECT``. ``out`` is by default one in ``runs``. If
    training diverges, the task's code raises, or no page can be written, the outcome says so. A
    signal before the run was begun raises, and so does a budget that was over before any answer.
    """
    if out is not None and continued is not None and out.resolve() != continued.resolve():
        raise InputError(
            f"A resumed run continues in its own folder. Found out = {str(out)!r} as well. "
            "Remedy: leave out away."
        )
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]  # quick studies begin in one second
    folder = continued or out or Path(f"runs/{name}-{now}")
    common: Any = {"task": task, "deadline": deadline, "monitor": monitor}
    with _alone(), deadline.signals():
        try:
            if continued is None:
                outcome = start(name, module_of(name, "schema").Settings(**given), folder, **common)
            else:
                outcome = resume(folder, given, name=name, **common)
        except KeyboardInterrupt:
            if (folder / HEADER).exists():
                monitor.say(f"stopped; --resume {folder} continues the run.")
            raise
        try:
            if launched()[0] == 0:
                outcome = replace(outcome, page=page.write(folder))
        except InputError as error:
            # Why a study failed matters more than why its page did.
            outcome = replace(outcome, failure=outcome.failure or error)
    too_little = getattr(module_of(name, "words"), "too_little", lambda summary: None)
    is_over = outcome.summary.status == "budget" and not outcome.failure
    if is_over and (why := too_little(outcome.summary)):
        raise InputError(
            f"{why}. Found {str(outcome.folder)!r} unfinished. "
            f"Remedy: continue with --resume {outcome.folder} --budget TIME."
        )
    return outcome


def start(
    name: str,
    settings: Any,
    folder: Path,
    *,
    task: Task | None = None,
    deadline: Deadline,
    monitor: work.Monitor,
) -> Outcome:
    """Runs a study in an absent or empty folder; settings that cannot be used leave nothing there.

    The task is loaded where none is given.
    """
    joined = DistributedContext.joined(deadline, resolve_device(settings.device), settings.sharding)
    with joined as context, cluster_workers(settings, context.size) as cluster:
        task = task or context.together(lambda: load(name, settings, {}))
        trainer = work.make_trainer(name, task, settings, context)
        trainer.check_task()
        speed, workers = calibrate(trainer, settings, cluster.count() if cluster else 0)
        settings = settings.timed(speed * workers) if hasattr(settings, "timed") else settings
        plan_for = module_of(name, "trials").plan_for
        plan = plan_for(settings, trainer, speed=speed, workers=workers)
        trainer.fit_micro_batch(plan.largest_batch)
        trainer.restart()
        files = located(settings)
        header = make_header(name, settings, trainer, plan=plan, workers=workers, files=files)
        # Each rank named it by its own clock.
        folder = Path(context.gather(str(folder))[0])
        context.on_main(lambda: create(folder, header))
        context.on_main(lambda: remember(folder))
        for line in getattr(module_of(name, "words"), "planned", lambda header: ())(header):
            monitor.say(line)
        return _run(Run(folder, header, Results(), None), files, trainer, cluster, monitor)


def resume(
    folder: Path,
    given: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    task: Task | None = None,
    deadline: Deadline,
    monitor: work.Monitor,
) -> Outcome:
    """Goes on with a run that was killed or stopped, to the numbers it would have had.

    Settings and plan are those of the record, but for the ``FREE`` ones that are ``given``; the
    budget's clock starts again. ``name`` is the study that the record must be of. Default: any.
    """
    run, given = read_run(folder), dict(given or {})
    settings = _agreed(run, name, given)
    plan = run.header.plan
    if "seeds" in given:
        # Fewer than were planned would leave a verdict without its first look.
        plan = msgspec.structs.replace(plan, seeds=max(plan.seeds, settings.seeds or MOST))
    header = msgspec.structs.replace(run.header, settings=settings, plan=plan)
    with understanding(folder):
        complete = not work.trials_of(header, run.results)
        summary = summarize(header, run.results, "complete") if complete else None
    # A complete run needs neither its device nor the other ranks, but to know a task of Python's.
    if summary is not None and task is None:
        is_main = launched()[0] == 0
        if is_main and "budget" in given:
            monitor.say("this run is complete. Remedy: more seeds, or a new run with more time.")
        # As texts: a NaN is not equal to itself.
        if is_main and dumps(summary) != dumps(run.summary):
            write_summary(folder, summary)
        return Outcome(folder, summary)
    if settings.task == OBJECT and task is None:
        raise InputError(
            f"Expected a task that can be loaded. Found {str(folder)!r}, begun with {OBJECT} in "
            f"Python. Remedy: steadygrad.{header.study}(task, resume={str(folder)!r}) there."
        )
    refuse_links(folder)
    device = resolve_device(header.runtime.device)
    joined = DistributedContext.joined(deadline, device, settings.sharding)
    with joined as context, cluster_workers(settings, context.size) as cluster:
        # Only rank 0's machine knows which runs were begun there.
        files = context.gather(context.on_main(lambda: trusted(run, given)))[0] or {}
        trainer = work.recorded_trainer(header, files, context, task)
        lost = (f"results/{x} cannot be read: its trial is run again." for x in run.unreadable)
        for warning in (*changes(header, trainer), *lost):
            monitor.say(warning)
        # Read on every rank before one of them writes.
        context.gather(None)
        return _run(replace(run, header=header), files, trainer, cluster, monitor)


def _agreed(run: Run, study: str, given: Mapping[str, Any]) -> Any:
    """The record's settings; the ones that may change are as given now."""
    header = run.header
    if study and header.study != study:
        raise InputError(
            f"Expected a run of `steadygrad {study}`. Found one of `steadygrad {header.study}` in "
            f"{str(run.folder)!r}. Remedy: steadygrad {header.study} --resume."
        )
    for name, value in given.items():
        recorded = getattr(header.settings, name)
        same = value == recorded or (name == "device" and value == header.runtime.device)
        if not same and name not in FREE:
            flag = "TASK" if name == "task" else f"--{name.replace('_', '-')}"
            raise InputError(
                f"A resumed run takes {name} = {recorded!r} from the record. Found {value!r}. "
                f"Remedy: leave {flag} away, or start a new run with --out."
            )
    free = {name: value for name, value in given.items() if name in FREE}
    return replace(header.settings, **{"dask": "", "executor": "", **free})


def _run(
    run: Run,
    files: Mapping[str, str],
    trainer: Trainer,
    cluster: Workers | None,
    monitor: work.Monitor,
) -> Outcome:
    """Runs all trials of a run that is begun, and writes the summary however that ends."""
    folder, header, results, context = run.folder, run.header, run.results, trainer.context
    context.deadline.limit(header.settings.budget)
    pool = cluster or local_workers(header.settings.workers, header.runtime)
    # Other ranks may not see the folder.
    own = identity(folder) if context.is_main else ""
    place = work.Workplace(trainer, header=header, files=files, run=own)
    with understanding(folder):
        coordinator = work.Coordinator(results, folder, place, pool, monitor)
    status, reason, failure = "complete", 0, None
    try:
        coordinator.run()
    except StudyInterrupted as stopped:
        reason = stopped.reason
        status = "budget" if reason == BUDGET else "interrupted"
    except RunError:
        raise
    except InputError as error:
        status = "failed"
        failure = InputError(
            f"{error} The results are kept. --resume {folder} continues where the cause was "
            "outside of the task's files; a changed task needs a new run."
        )
        failure.__cause__ = error
    summary = summarize(header, results, status)
    if context.is_main:
        write_summary(folder, summary)
    return Outcome(folder, summary, reason, failure)
