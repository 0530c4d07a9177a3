"""The runs of ``ab``: a task that is trained, a function that is called, a command."""

import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from steadygrad._checks import InputError
from steadygrad.studies.ab.command import RunFailed, run_command
from steadygrad.studies.ab.findings import Evidence
from steadygrad.studies.ab.schema import ITSELF, MOST, Header, Plan, Run, Settings
from steadygrad.studies.ab.sequence import pairs_needed
from steadygrad.studies.files import OBJECT
from steadygrad.studies.folder import Results
from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.order import main_order
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.studies.trials import SHARE, Trial, evaluation_cost, start_up
from steadygrad.studies.work import Workplace, make_trainer
from steadygrad.tasks import BUILT_IN, Samples, Task, TensorSamples, guarded
from steadygrad.tasks.load import load_function, load_task
from steadygrad.tasks.start import digest_of

# Pairs in which a function is called with the first pair's seed as well, before a verdict.
AGAIN = 1, 4
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
        evaluation = evaluation_cost(len(task.valid))
        span = SHARE * max(0.0, settings.budget - start_up(workers)) * speed * workers
        fitting = min(int(span / (ITSELF * count)) - evaluation, EPOCHS * len(task.train))
        samples = max(1, settings.samples or fitting)
    work, size = most * count * max(1, samples), task.batch_size
    return Plan(arms=tuple(arms), samples=samples, work=work, largest_batch=size)


def trials_of(header: Header, results: Results) -> list[Trial]:
    """The runs of all pairs until every B has its verdict; refused if the first one all failed."""
    plan, evidence, found = header.plan, Evidence(header, results), list[Trial]()
    arms, first = list(range(len(plan.arms))), [run for run in evidence.runs if run.pair == 0]
    if len(first) == len(arms) and all(run.failure for run in first):
        raise InputError(
            "Expected a metric in the first pair. Found that all its runs failed: "
            f"{first[0].failure}. Remedy: mend that and begin anew, or first delete results/run-*."
        )
    decided, cost = [evidence.course(arm).decided for arm in arms], max(1, plan.samples)
    # Before it, there is no verdict even if all differences are equal.
    earliest = pairs_needed(1.0, 0.0, evidence.alpha) or evidence.pairs
    for pair in range(evidence.pairs):
        if pair >= earliest and (pair - earliest) % evidence.ahead == 0:
            whole = all(len(decided[arm]) >= pair for arm in arms)
            arms = [arm for arm in arms if arm == 0 or not decided[arm][:pair].any()]
            if not whole or len(arms) == 1:
                break
        # AB, BA: a machine that warms up, or slows down, favours none.
        turn = pair % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            found.append(_trial(arm, pair, cost, evidence.names[arm]))
    return found


def _trial(arm: int, pair: int, cost: int, name: str) -> Trial:
    job = {"kind": "run", "arm": arm, "pair": pair}
    return Trial(("run", arm, pair), cost, lambda results: job, f"{name}, pair {pair + 1}")


def run(plan: Plan, place: Workplace, arm: int, pair: int) -> Run:
    """One run; those of a pair share the seed, the initial weights, and the order of the data."""
    task: Any = place.trainer.task
    with guarded("An arm of the record's plan"):
        own = task.arms[arm]
    settings, context = place.header.settings, place.trainer.context
    # A that is compared with itself has seeds of its own: there are at most 1,000 pairs.
    number = pair + 1000 * arm * (plan.arms[arm] == plan.arms[0])
    seed, value, failure, again = settings.seed + number, None, "", None
    took: Mapping[str, float] = {}
    # The kind of error that is the arm's own.
    fault = Diverged if isinstance(own, Task) else RunFailed if isinstance(own, str) else InputError
    try:
        if isinstance(own, Task):
            value = _trained(place, own, arm, number)
        elif isinstance(own, str):
            command, cwd = own.replace("{seed}", str(seed)), str(place.header.time.get("folder"))
            value, took = run_command(command, cwd, settings, context.poll)
        else:
            began = time.monotonic()
            value = _called(place, own, seed, number)
            took = {"seconds": round(time.monotonic() - began, 3)}
            with suppress(InputError):  # of the first pair's run
                again = _called(place, own, seed - pair, number - pair) if pair in AGAIN else None
        # Squares of others would be zero or infinite.
        value = value if not abs(value) < 1e-100 else 0.0
        failure = "" if abs(value) < 1e100 else f"the metric is {value}"
    except fault as error:
        failure = str(error).partition(" Remedy:")[0]
    place.advance(max(1, plan.samples), "")
    value, again = (None, None) if failure else (value, again)
    return Run(arm=arm, pair=pair, seed=seed, value=value, again=again, failure=failure, time=took)


def _called(place: Workplace, function: Callable[[int], float], seed: int, number: int) -> float:
    with guarded("The function"):
        place.trainer.seed_everything("run", number)
        return float(function(seed))


TRIALS = {"run": run}


def _trained(place: Workplace, task: Task, arm: int, number: int) -> float:
    """The validation loss of a task; its trainer is made when it is first needed."""
    trainer, samples = place.trainer, place.header.plan.samples
    if arm and f"{arm}" not in place.tools:
        trainer = make_trainer("ab", task, place.header.settings, trainer.context)
        trainer.check_task()
        place.tools = {**place.tools, f"{arm}": trainer}
    trainer = place.tools[f"{arm}"] if arm else trainer
    trainer.restart(number)
    trainer.seed_everything("run", number)
    order, size = main_order(len(trainer.task.train), trainer.seed, number), trainer.task.batch_size
    samples = max(1, samples // size) * size  # whole steps
    for _ in trainer.run(order, 0, samples, size, rate=Rate(total=samples)):
        pass
    return float(trainer.evaluate())
