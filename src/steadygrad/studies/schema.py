"""Types that all studies share: settings, the header of a run, trials and their results.

This module and all that analyses results import no torch.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from steadygrad.studies.text import show

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 62)]
PositiveFloat = Annotated[float, Meta(gt=0, lt=1e300)]
NonNegative = Annotated[float, Meta(ge=0, lt=1e300)]
Key = tuple[str | int | float, ...]
"""The kind of a result, and the values that tell it from others of its kind."""

S = TypeVar("S", bound="Summary")
Chosen = TypeVar("Chosen")
Planned = TypeVar("Planned")

# Version of the folder's format.
SCHEMA = 6
# Settings that --resume may change: they decide when a study ends, not its numbers.
FREE = ("budget", "workers", "dask", "executor", "pairs", "seeds")
# Of the budget: the machine is never quite free, and the report also takes time.
SHARE = 0.85
# Names of the built-in tasks.
TASKS = ("char-lm", "digits-classifier", "digits-autoencoder", "digits-deep")


TASK = f"Task to train: {', '.join(TASKS)}, or path/to/file.py:make_task."
BUDGET = "Time for the whole study: 30s, 5m, 2h. With --resume: time from now on."
DEVICE = "Device to train on; auto prefers CUDA, then the CPU."
DTYPE = "Type to compute in; bfloat16 and float16 by autocast."
WORKERS = (
    "Processes that run trials side by side, one device each. 0 or auto: as many as a quick "
    "measurement shows to be faster."
)
THREADS = "CPU threads of each trial. 0 or auto: the cores over the workers."
DASK = "Address of a Dask scheduler, HOST:PORT, that runs the trials."
EXECUTOR = (
    "Function that makes a concurrent.futures.Executor to run the trials: module:factory or "
    "path/file.py:factory. --workers says how many at a time."
)
SHARDING = "How torchrun's processes share the model."

Budget = Annotated[float, Meta(gt=0, lt=1e9, description=BUDGET)]
Workers = Annotated[int, Meta(ge=0, le=1024, description=WORKERS)]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], Meta(description=DEVICE)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16", "float64"], Meta(description=DTYPE)]


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings of every study; a field's description is the command line's help."""

    task: Annotated[str, Meta(min_length=1, description=TASK)] = "char-lm"
    budget: Budget = 300.0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62, description="Random seed.")] = 0
    device: Device = "auto"
    workers: Workers = 0
    threads: Annotated[int, Meta(ge=0, le=4096, description=THREADS)] = 0
    dask: Annotated[str, Meta(description=DASK)] = ""
    executor: Annotated[str, Meta(description=EXECUTOR)] = ""
    sharding: Annotated[Literal["ddp", "fsdp2"], Meta(description=SHARDING)] = "ddp"

    @property
    def words(self) -> list[str]:
        """The tasks, functions or commands that the settings name."""
        return [self.task]


class Result(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The result of one trial.

    ``time`` holds the trial's cost in samples, and what may differ between two runs with the same
    settings, such as seconds.
    """

    key_fields: ClassVar[tuple[str, ...]] = ()

    time: Mapping[str, NonNegative] = {}

    @property
    def key(self) -> Key:
        """The kind and the values of the key fields."""
        return (
            str(self.__struct_config__.tag),
            *(getattr(self, field) for field in self.key_fields),
        )


class Training(Result, frozen=True, tag="training"):
    """One training of an arm."""

    key_fields = ("arm", "samples", "step", "seed")

    arm: Count  # number of the arm in the plan's list
    samples: Count  # length of the training; 0 where a command or a function decides
    step: Annotated[float, Meta(ge=-64, le=64)]  # octaves of the learning rate above the arm's own
    seed: Count  # number of the seed; trainings with one seed are pairs
    lr: NonNegative  # peak learning rate; 0 where a command or a function decides
    loss: float  # the metric at the end; infinite if the training diverged or failed
    # Samples seen and validation loss on the way, and at the end.
    curve: tuple[tuple[float, float], ...] = ()
    failure: str = ""  # why a run of `ab` has no metric; else empty
    # The metric of a function that is called with the first pair's seed once more.
    again: float | None = None


@dataclass(frozen=True)
class Trial:
    """Work that gives one result."""

    key: Key  # of the result: its kind, and the values of its key fields
    cost: int  # samples of work that the plan reckons with
    what: str  # name in messages
    # What the trial's function takes beside the key fields.
    given: Mapping[str, Any] = field(default_factory=dict)


def seed_for(seed: int, *names: object) -> int:
    """A seed for one trial: the same on every machine, unrelated to its neighbours'."""
    text = "/".join(str(name) for name in ("steadygrad", seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def evaluation_cost(samples: int) -> int:
    """Samples of work in an evaluation: a forward pass is about a third of training."""
    return math.ceil(samples / 3)


def start_up(workers: int) -> float:
    """Seconds for loading torch and the data, for starting workers, and for the report."""
    return 12.0 if workers > 1 else 4.0


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the task that a study trains.

    The other fields are those of :class:`steadygrad.tasks.Task`.
    """

    spec: str  # a built-in name or `path/file.py:make_task`
    name: str
    sample: str
    batch_size: Positive
    lr: PositiveFloat
    lr_rule: str
    parameters: Count  # trainable numbers in the model
    train_size: Positive
    valid_size: Positive
    optimizer: str = ""
    beta2: float | None = None  # decay of the second moment; None for optimizers without one
    weight_decay: float | None = None  # that of the first parameter group; None without one
    tokens_per_sample: Positive | None = None
    warmup_samples: Count = 0
    lr_decay: str = "none"
    provenance: dict[str, str] = {}
    dependent: bool = False  # whether a sample's loss depends on the other samples of its batch


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of the trials on which their numbers depend."""

    device: Annotated[str, Meta(pattern="^(cpu|cuda|mps)$")]
    dtype: str
    world_size: Positive  # processes that share every batch
    sharding: str  # "none", "ddp" or "fsdp2"
    threads: Annotated[int, Meta(ge=1, le=4096)]
    micro_batch_size: Positive  # most samples in one forward pass
    workers: Annotated[int, Meta(ge=1, le=1 << 16)]  # trials at a time that the plan reckons with


class HeaderOf(msgspec.Struct, Generic[Chosen, Planned], frozen=True, kw_only=True):
    """The identity of a run, with a study's own settings and plan."""

    schema: Positive
    study: str
    task: TaskInfo
    settings: Chosen
    plan: Planned
    runtime: Runtime
    # Versions and hardware, of :func:`steadygrad.studies.record.environment`.
    environment: Mapping[str, Any]
    # SHA-256 of the user's files, by the function that comes from them.
    files: dict[str, dict[str, str]] = {}
    # Mean losses before training; empty where they do not repeat.
    first_losses: tuple[float, ...] = ()
    first_value: float | None = None  # `Task.evaluate`'s value before training; None without one
    time: dict[str, str] = {}  # when and where the run was created

    def rise(self, results: Iterable[Any]) -> str:
        """The answer where ``Task.evaluate`` rises and ends no training lower; empty elsewhere."""
        alike, first, inf = "Task.start" in self.task.provenance, self.first_value, math.inf
        # Other seeds begin with other weights.
        runs = (run for run in results if isinstance(run, Training) and run.loss < inf)
        ends = [run.loss for run in runs if alike or not run.seed]
        if first is None or not ends or not min(ends) >= first < (most := max(ends)):
            return ""
        rise = f"Task.evaluate falls in no training, and rises from {show(first)} to {show(most)}"
        remedy = "return 1 less it; else try another Task.lr, more data, or another --budget"
        return f"Nothing can be judged: {rise}; if it is to rise, as an accuracy, {remedy}."


Header = HeaderOf[Any, Any]


class Table(msgspec.Struct, frozen=True):
    """A table as terminal and page show it; the first ``text_columns`` hold no numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 0


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Something that a study found. Each kind has fields of its own, and one template of words."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a study. Each study's summary adds its ``findings`` and its numbers."""

    schema: int = SCHEMA  # version of the folder's format
    study: str
    status: str  # "complete", "interrupted", "budget" or "failed"
    task: str  # the task's name
    sample: str  # what one sample is called
    answer: str = ""  # the answer in one sentence
    rise: str = ""  # the answer where the header's `Task.evaluate` rises; nothing is judged then
    table: Table | None = None  # the numbers that it rests on; None where there are none yet
    remarks: tuple[str, ...] = ()  # at most three more sentences, the most important first

    @property
    def exit_code(self) -> int:
        """The program's, where nothing failed."""
        return 0

    def worded(self: S, words: Any) -> S:
        """The summary with answer, table and remarks, by the study's module of ``words``."""
        said = {name: getattr(words, name)(self) for name in ("answer", "table", "remarks")}
        said["answer"] = self.rise or said["answer"]
        return msgspec.structs.replace(self, **said)

    def to_dict(self) -> Mapping[str, Any]:
        """Plain values, as in ``summary.json``."""
        fields: Mapping[str, Any] = msgspec.to_builtins(self)
        return fields
