"""A study is settings, a plan, trials, a summary and a page; this is its base class.

A trial is a pure function of the task, the seed and the state at its point of training, so that
trials can run in any order, in any process, and again after a crash.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, get_args

from steadygrad.studies.checkpoint import Checkpoints, State
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Header, Key, Result, Summary, schema_of
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.trials import Job, Trial, evaluation_cost
from steadygrad.tasks import Task

Advance = Callable[[int, str], None]
"""Told how many samples of work are done, as they are done, and on what."""


@dataclass
class Workplace:
    """The surroundings of a job."""

    trainer: Trainer
    checkpoints: Checkpoints
    advance: Advance

    def state(self, name: str, samples: int, again: Callable[[], object]) -> State:
        """The state after ``samples``: read, or trained ``again`` by the trial that leaves it."""
        found = self.checkpoints.load(name, samples)
        # On every rank or on none: training again takes all of them.
        if all(self.trainer.context.gather(found is not None)) and found is not None:
            return found
        again()
        return self.trainer.state(samples)

    def evaluate(self) -> float:
        """The validation loss; its cost counts as work that is done."""
        loss = self.trainer.evaluate()
        self.advance(evaluation_cost(len(self.trainer.task.valid)), "")
        return loss


class Study(ABC):
    """An experiment behind a command, whose name is ``name``."""

    name: ClassVar[str]
    # Options of the trainer that no setting names.
    training: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, header: Any) -> None:
        self.header = header
        self.plan = header.plan
        # Places of the functions in files that the settings name.
        self.files: Mapping[str, str] = {}

    @classmethod
    def make_trainer(
        cls,
        task: Task,
        settings: Any,
        context: DistributedContext,
        micro_batch_size: int | None = None,
    ) -> Trainer:
        """A trainer of a task, as the study trains it."""
        names = {"seed", "dtype", "keep_half_life"}.intersection(vars(settings))
        options = {**{name: getattr(settings, name) for name in names}, **cls.training}
        return Trainer(task, context=context, micro_batch_size=micro_batch_size, **options)

    @classmethod
    @abstractmethod
    def make_plan(cls, settings: Any, trainer: Trainer, *, speed: float, workers: int) -> Any:
        """Chooses the amounts of work, for so many trials at a time, of ``speed`` samples a second.

        Raises:
            InputError: If the budget is too small for any answer.
        """

    @classmethod
    def largest_batch(cls, plan: Any, task: Task) -> int:
        """Samples of the largest batch that the study may train on."""
        return task.batch_size

    @abstractmethod
    def trials(self) -> Sequence[Trial]:
        """All trials, in the order of the plan."""

    def run(self, job: Job, place: Workplace) -> Result:
        """Does one job, by ``TRIALS``: a ``(plan, place, **parameters) -> Result`` of each kind.

        Raises:
            StudyInterrupted: When the study has to stop.
            InputError: If training diverges where it must not, or the task's code raises.
        """
        trials = import_module(f"steadygrad.studies.{self.name}.trials").TRIALS
        parameters = {name: value for name, value in job.items() if name != "kind"}
        result: Result = trials[job["kind"]](self.plan, place, **parameters)
        return result

    @abstractmethod
    def summarize(self, results: Results, status: str) -> Summary:
        """The content of ``summary.json``: a pure function of the results and the status."""

    def too_little(self, summary: Mapping[str, Any]) -> str | None:
        """The reason why a study has no result at all; None where it has one."""
        return None

    def key_of(self, job: Job) -> Key:
        """The key of the result that a job gives."""
        kind, union = job["kind"], schema_of(self.name).RESULTS
        types = {each.__struct_config__.tag: each for each in get_args(union) or (union,)}
        return (kind, *(job[name] for name in types[kind].key_fields))

    def finished(self, results: Results) -> set[Key]:
        """Keys of the trials whose results are there, or that have nothing to do."""
        done: set[Key] = set()
        for trial in self.trials():
            if done.issuperset(trial.needs):
                job = trial.job(results)
                if job is None or self.key_of(job) in results:
                    done.add(trial.key)
        return done


def study_class(name: str) -> type[Study]:
    """The class of a study."""
    found: type[Study] = import_module(f"steadygrad.studies.{name}.study").STUDY
    return found


def study_of(header: Header) -> Study:
    """The study that a header begins."""
    return study_class(header.study)(header)
