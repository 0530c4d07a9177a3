"""The runs of ``ab``: a task that is trained, a function that is called, a command."""

import inspect
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from steadygrad._checks import InputError
from steadygrad.studies.ab.command import RunFailed, run_command
from steadygrad.studies.ab.findings import Changes
from steadygrad.studies.ab.schema import ITSELF, LARGEST, MOST, Header, Plan, Settings
from steadygrad.studies.course import Rate
from steadygrad.studies.folder import Results
from steadygrad.studies.paired import pairs_needed
from steadygrad.studies.record import OBJECT
from steadygrad.studies.schema import SHARE, Training, Trial, evaluation_cost, start_up
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.studies.work import Workplace, make_trainer
from steadygrad.tasks import BUILT_IN, Samples, Task, TensorSamples, guarded
from steadygrad.tasks.load import load_function, load_task
from steadygrad.tasks.start import digest_of

# Pairs in which a function is called with the first pair's seed as well, before a verdict.
AGAIN = 1, 3
EPOCHS = 10  # most passes over the data where no setting says them
ROWS = TensorSamples(torch.eye(2))

Arm = Task | Callable[[int], float] | str


@dataclass(frozen=True, kw_only=True)
class Arms(Task):
    """A, with all that is compared; a stand-in for A where commands or functions do the work."""

    arms: tuple[Arm, ...]
    name: str = "runs"
    sample: str = "run"
    make_model: Callable[[], nn.Module] = lambda: nn.Linear(2, 1)
    train: Samples = ROWS
    valid: Samples = ROWS
    per_sample_loss: Callable[[nn.Module, Any], Tensor] = lambda model, x: model(x).square()[:, 0]
    make_optimizer: Callable[[Any, float], Optimizer] = SGD
    lr: float = 0.1
    batch_size: int = 1


def arms_of(arms: Sequence[Arm]) -> Arms:
    """Tasks, or commands and functions, as one task; a single one twice."""
    tasks = [arm for arm in arms if isinstance(arm, Task)]
    others = [arm for arm in arms if isinstance(arm, str) or callable(arm)]
    if len(arms) not in (len(tasks), len(others)):
        raise InputError(
            f"Expected tasks only, or functions only. Found {len(tasks)} tasks of {len(arms)}. "
            "Remedy: a function that trains the task."
        )
    given: dict[str, Any] = {f.name: getattr(t, f.name) for t in tasks[:1] for f in fields(Task)}
    names = [getattr(arm, "__qualname__", "") for arm in others]
    if any(names):  # a resume compares them with the record's
        given["provenance"] = {"functions": ", ".join(names)}
    for number, task in enumerate(tasks[1:], start=1):
        own = {key: str(x) for key, x in vars(task).items() if isinstance(x, (str, int, float))}
        own |= task.provenance | ({"Task.start": digest_of(task.start)} if task.start else {})
        more = {f"B{number}: {name}": value for name, value in own.items()}
        given["provenance"] = given["provenance"] | more
    return Arms(**given, arms=tuple(arms) * (2 if len(arms) == 1 else 1))


def load(settings: Settings, files: Mapping[str, str]) -> Arms:
    """The arms that the settings name; functions in files are at the places in ``files``."""
    words, metric = settings.words, settings.metric
    if not metric and any("{seed}" in word for word in words):
        raise InputError("Expected --metric with commands. Found none. Remedy: --metric KEY.")
    with guarded(f"--metric {metric}"):
        if "(" in metric and (groups := re.compile(metric).groups) != 1:
            say = f"Expected one group in --metric. Found {groups}. Remedy: (?:...) for the others."
            raise InputError(say)
    return arms_of(words if metric else [load_arm(files.get(word, word)) for word in words])


def load_arm(spec: str) -> Arm:
    """A task or, if it takes an argument that has no default or is the seed, a function of it."""
    if spec in BUILT_IN:
        return load_task(spec)
    function = load_function(spec)
    takes = inspect.signature(function).parameters.values()
    needed = [one for one in takes if one.default is one.empty or one.name == "seed"]
    takes_seed = any(one.kind < one.VAR_POSITIONAL for one in needed)
    return function if takes_seed else load_task(spec)


def plan_for(settings: Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
    """The number and length of runs, once all tasks have been tried."""
    task: Any = trainer.task
    count, samples = len(task.arms), 0
    arms = (settings.words * count)[:count]
    if settings.task == OBJECT:  # known by the first place that it has
        arms = [f"object {[other is arm for other in task.arms].index(True)}" for arm in task.arms]
    most = settings.pairs or (MOST if len({*arms}) > 1 else ITSELF)
    if isinstance(task.arms[0], Task):
        for arm in task.arms[1:]:
            make_trainer("ab", arm, settings, trainer.context).check_task()
        span = SHARE * max(0.0, settings.budget - start_up(workers)) * speed * workers
        fitting = int(span / (ITSELF * count)) - evaluation_cost(len(task.valid))
        samples = max(1, settings.samples or min(fitting, EPOCHS * len(task.train)))
    work = most * count * cost_of(samples, len(task.valid))
    return Plan(arms=tuple(arms), samples=samples, work=work, largest_batch=task.batch_size)


def cost_of(samples: int, valid_size: int) -> int:
    """Samples of work in a training and its evaluation; 1 for a command or a function."""
    return samples + evaluation_cost(valid_size) if samples else 1


def trials_of(header: Header, results: Results) -> list[Trial]:
    """The runs of all pairs until every B has its verdict; refused if the first one all failed."""
    plan, changes, found = header.plan, Changes(header, results), list[Trial]()
    arms = list(range(len(plan.arms)))
    why = [changes.runs(arm)[0].failure for arm in arms if 0 in changes.runs(arm)]
    if len(why) == len(arms) and all(why):
        raise InputError(
            f"Expected a metric in the first pair. Found that all its runs failed: {why[0]}. "
            "Remedy: mend that and begin anew, or first delete results/training-*."
        )
    decided = [changes.judged(arm).decided for arm in arms]
    cost = cost_of(plan.samples, header.task.valid_size)
    # Before it, there is no verdict even if all differences are equal.
    earliest = pairs_needed(1.0, 0.0, changes.alpha) or changes.pairs
    for pair in range(changes.pairs):
        if pair >= earliest and (pair - earliest) % changes.ahead == 0:
            whole = all(len(decided[arm]) >= pair for arm in arms)
            arms = [arm for arm in arms if arm == 0 or not decided[arm][:pair].any()]
            if not whole or len(arms) == 1:
                break
        # AB, BA: a machine that warms up, or slows down, favours none.
        turn = pair % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            key = ("training", arm, plan.samples, 0.0, pair)
            found.append(Trial(key, cost, f"{changes.names[arm]}, pair {pair + 1}"))
    return found


def training(
    plan: Plan, place: Workplace, arm: int, samples: int, step: float, seed: int
) -> Training:
    """One run; those of a pair share the seed, the initial weights, and the order of the data."""
    task: Any = place.trainer.task
    with guarded("An arm of the record's plan"):
        own = task.arms[arm]
    # A that is compared with itself has seeds of its own: there are at most 1,000 pairs.
    number = seed + 1000 * arm * (plan.arms[arm] == plan.arms[0])
    # The kind of error that is the arm's own.
    fault = Diverged if isinstance(own, Task) else RunFailed if isinstance(own, str) else InputError
    loss, again, took, began = math.inf, None, dict[str, float](), time.monotonic()
    try:
        loss, peak = _metric(place, own, arm, number)
        took = {"seconds": round(time.monotonic() - began, 3), **peak}
        failure = "" if abs(loss) < LARGEST else f"the metric is {loss}"
        if callable(own) and seed in AGAIN and not failure:
            with suppress(InputError):  # of the first pair's run
                again = _metric(place, own, arm, number - seed)[0]
    except fault as error:
        failure = str(error).partition(" Remedy:")[0]
    if not samples:
        place.advance(1)
    return Training(
        arm=arm,
        samples=samples,
        step=step,
        seed=seed,
        lr=0.0,
        # The square of less would be zero.
        loss=math.inf if failure else loss if abs(loss) >= 1e-100 else 0.0,
        failure=failure,
        again=again,
        time=took,
    )


TRIALS = {"training": training}


def _metric(place: Workplace, own: Arm, arm: int, number: int) -> tuple[float, dict[str, int]]:
    """The metric of an arm with a seed, and of a command the peak of its memory."""
    settings, context = place.header.settings, place.trainer.context
    if isinstance(own, Task):
        return _validation_loss(place, own, arm, number), {}
    seed = settings.seed + number
    if isinstance(own, str):
        command, folder = own.replace("{seed}", str(seed)), str(place.header.time.get("folder"))
        return run_command(command, folder, settings, context.poll)
    with guarded("The function"):
        place.trainer.seed_everything("run", number)
        return float(own(seed)), {}


def _validation_loss(place: Workplace, task: Task, arm: int, number: int) -> float:
    """The validation loss of a task at the end; its trainer is made when it is first needed."""
    if arm and arm not in place.tools:
        place.tools[arm] = make_trainer("ab", task, place.header.settings, place.trainer.context)
        place.tools[arm].check_task()
    trainer: Trainer = place.tools.get(arm, place.trainer)
    own, size, whole = replace(place, trainer=trainer), task.batch_size, trainer.micro_batch_size
    samples = max(1, place.header.plan.samples // size) * size  # whole steps
    train = partial(own.train, size, samples, number, Rate(total=samples), must_hold=True)
    try:
        return trainer.by_halves(train)[-1][1]
    finally:
        trainer.micro_batch_size = whole  # as each run begins
