"""Types of ``compare``."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from steadygrad.studies.schema import CommonSettings, Count, Few, Positive, PositiveFloat, Result
from steadygrad.studies.schema import Header as CommonHeader

__all__ = [
    "BASELINE",
    "LEAST_RATIO",
    "MOST_RATIO",
    "OPTIMIZERS",
    "RESULTS",
    "Header",
    "Plan",
    "Run",
    "Settings",
    "Speed",
    "check",
]

BASELINE = "adamw"
# Those that are built in beside it.
OPTIMIZERS = ("scaledadam", "lans", "lamb", "sgd", "muon")
# Beyond these ratios of samples the baseline's loss curve is no guide.
LEAST_RATIO, MOST_RATIO = 0.25, 4.0

Step = Annotated[float, Meta(ge=-64, le=64)]


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """Settings of ``steadygrad compare``."""

    optimizers: Annotated[
        str,
        Meta(
            min_length=1,
            description="Optimizers to compare with AdamW: scaledadam, lans, lamb, sgd, muon, and "
            "task for the task's own.",
        ),
    ] = "scaledadam,lans"
    add: Annotated[
        str,
        Meta(
            description="Optimizers of your own: path/file.py:make_optimizer, of (model, lr); "
            "several with commas."
        ),
    ] = ""
    batches: Annotated[
        str,
        Meta(
            min_length=1,
            description="Batch sizes as multiples of the task's, such as 1,4,16: each optimizer is "
            "tuned at each of them.",
        ),
    ] = "1"
    points: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Points of the other two knobs of each optimizer, such as weight decay and "
            "beta2, that are tried; 1: its defaults.",
        ),
    ] = 1
    samples: Annotated[
        int,
        Meta(ge=0, description="Length of the longest trainings; 0: as the budget allows."),
    ] = 0
    seeds: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Paired seeds of each verdict, at least 2; 0: 3 to 10, as the budget "
            "allows.",
        ),
    ] = 0
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        Meta(description="Type to compute in; bfloat16 and float16 by autocast."),
    ] = "float32"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial.

    Attributes:
        batch_size: The task's own, in samples.
        optimizers: Names of the optimizers, AdamW first.
        multiples: Batch sizes as multiples of the task's.
        horizons: Samples of a short run, of one twice as long, and of the longest.
        points: Points of the other knobs.
        full: Whether learning rates are also tried in runs of the longest horizon.
        seeds: Paired seeds of the verdicts.
        samples_per_second: Training speed of one trial that the plan reckons with.
        work: Cost of all trials, in samples.
        span: Cost of the longest chain of trials with ``workers`` of them at a time, in samples.
    """

    batch_size: Positive
    optimizers: Annotated[tuple[str, ...], Meta(min_length=2, max_length=64)]
    multiples: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)]
    horizons: tuple[Positive, Positive, Positive]
    points: Few
    full: bool
    seeds: Annotated[int, Meta(ge=1, le=1000)]
    samples_per_second: PositiveFloat
    work: Positive
    span: Positive


class Header(CommonHeader, frozen=True, kw_only=True):
    """Header of ``compare``."""

    settings: Settings
    plan: Plan


class Speed(Result, frozen=True, tag="speed"):
    """Costs of a step, measured in turns; ``time`` holds the seconds of a step with each optimizer.

    Attributes:
        state_bytes: Bytes of optimizer state for each weight, by optimizer.
    """

    state_bytes: dict[str, float]


class Run(Result, frozen=True, tag="training"):
    """One training from scratch, with a whole learning-rate schedule.

    Attributes:
        multiple: Batch size over the task's.
        samples: Length of the schedule.
        point: Number of the point of the other knobs; 0: the optimizer's defaults.
        step: Octaves of the learning rate above the optimizer's default; whole in the search.
        repeat: Number of the seed; 0 is the search's, the others are the verdicts'.
        lr: Peak learning rate.
        loss: Validation loss at the end; infinite if the training diverged.
        curve: Samples seen and validation loss on the way, and at the end.
    """

    key_fields = ("optimizer", "multiple", "samples", "point", "step", "repeat")

    optimizer: str
    multiple: Positive
    samples: Positive
    point: Count
    step: Step
    repeat: Count
    lr: PositiveFloat
    loss: float
    curve: tuple[tuple[Count, float], ...]


RESULTS = Speed | Run


def check(header: Header, result: Any) -> tuple[str, str] | None:
    """Refuses a result of an optimizer that the plan does not have: expected, found."""
    known = header.plan.optimizers
    if known[0] != BASELINE:
        return f"the plan's first optimizer to be {BASELINE}", repr(known[0])
    if not isinstance(result, Run) or result.optimizer in known:
        return None
    return f"'optimizer' to be one of {', '.join(known)}", repr(result.optimizer)
