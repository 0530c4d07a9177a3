"""Typed lines of a record: the base classes."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

__all__ = [
    "Count",
    "End",
    "Event",
    "Few",
    "Header",
    "Key",
    "Positive",
    "PositiveFloat",
    "Runtime",
    "TaskInfo",
    "listed",
    "plural",
]

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 62)]
Few = Annotated[int, Meta(ge=0, le=64)]
"""A number of things that are gone through one by one."""
PositiveFloat = Annotated[float, Meta(gt=0, lt=1e300)]
Key = tuple[str | int, ...]
"""The name of an event's kind, and the values that tell it from others of its kind."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One line of a record: the result of one trial, or the end of a study.

    ``time`` holds what may differ between two runs with the same settings, such as seconds.
    """

    key_fields: ClassVar[tuple[str, ...]] = ()

    time: dict[str, Any] = {}

    @property
    def key(self) -> Key:
        """The event's name and its key fields."""
        name = str(self.__struct_config__.tag)
        return (name, *(getattr(self, field) for field in self.key_fields))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as :func:`steadygrad.record.dumps` takes them."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class End(Event, frozen=True, tag="end"):
    """The end of a study, or of one attempt at it."""

    status: str


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the task that a study trains.

    Attributes:
        spec: The text that names the task: a built-in name or ``path/file.py:make_task``.
        parameters: Trainable numbers in the model.
        optimizer: Name of the optimizer's class.
        beta2: Decay of the second moment; None for optimizers without one.
        weight_decay: Weight decay of the first parameter group; None without one.
        dependent: Whether a sample's loss depends on the other samples of its batch.

    The other fields are those of :class:`steadygrad.tasks.Task`.
    """

    spec: str
    name: str
    sample: str
    batch_size: Positive
    lr: PositiveFloat
    lr_rule: str
    parameters: Count
    train_size: Positive
    valid_size: Positive
    optimizer: str = ""
    beta2: float | None = None
    weight_decay: float | None = None
    tokens_per_sample: Positive | None = None
    warmup_samples: Count = 0
    lr_decay: str = "none"
    provenance: dict[str, str] = {}
    dependent: bool = False


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of the trials on which their numbers depend.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or ``"mps"``.
        dtype: Name of the type that training computes in.
        world_size: Processes that share every batch.
        sharding: ``"none"``, ``"ddp"`` or ``"fsdp2"``.
        threads: Threads of each trial.
        micro_batch_size: Most samples in one forward pass.
        workers: Trials at a time that the plan reckons with.
    """

    device: Annotated[str, Meta(pattern="^(cpu|cuda|mps)$")]
    dtype: str
    world_size: Positive
    sharding: str
    threads: Annotated[int, Meta(ge=1, le=4096)]
    micro_batch_size: Positive
    workers: Annotated[int, Meta(ge=1, le=1 << 16)]


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="run"):
    """First line of a record. Each study's header adds its ``settings`` and its ``plan``.

    Attributes:
        schema: Version of the record's format.
        environment: Versions and hardware, of :func:`steadygrad.record.environment`.
        files: SHA-256 of the user's files, by the function that comes from them.
        first_losses: Mean losses before training; empty where they do not repeat.
        time: When and where the run was created.
    """

    schema: Positive
    study: str
    task: TaskInfo
    runtime: Runtime
    environment: dict[str, Any]
    files: dict[str, dict[str, str]] = {}
    first_losses: tuple[float, ...] = ()
    time: dict[str, Any] = {}


def plural(word: str) -> str:
    """The plural of an ordinary English noun, such as a sample's name."""
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        return word[:-1] + "ies"
    return word + "s"


def listed(parts: Iterable[str]) -> str:
    """Texts as a sentence lists them: ``a, b and c``; at least one."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last
