"""Types of ``advise``."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from steadygrad.studies.schema import CommonSettings, Count, Few, Positive, PositiveFloat, Result
from steadygrad.studies.schema import Header as CommonHeader

__all__ = [
    "RESULTS",
    "Branch",
    "Header",
    "Noise",
    "Plan",
    "Point",
    "Scratch",
    "Settings",
    "Stage",
    "check",
]

Curve = tuple[tuple[Count, float], ...]
"""Pairs of samples seen and validation loss."""


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """Settings of ``steadygrad advise``."""

    tolerance: Annotated[
        float,
        Meta(
            ge=0.01, le=1, description="Extra samples that are acceptable, as a fraction: 0.01 to 1"
        ),
    ] = 0.2
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        Meta(description="Type to compute in; bfloat16 and float16 by autocast."),
    ] = "float32"
    keep_half_life: Annotated[
        bool,
        Meta(
            description="Keep the half-life of Adam's second moment and of the weight decay in "
            "samples, whatever the batch size."
        ),
    ] = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial.

    Attributes:
        batch_size: The task's own, in samples.
        points: Samples seen by the main trajectory at each point of training.
        branch_samples: Samples of each branch from each point.
        multiples: Batch sizes of the branches from each point, as multiples of ``batch_size``.
        noise_steps: Measurements of the noise scale at each point.
        repeats: Data orders of each branch.
        rates: Whether the smallest batch is trained from scratch at other learning rates.
        seeds: Runs from scratch with each batch size; 0: the advice is not checked.
        candidates: Most batch sizes to train from scratch.
        samples_per_second: Training speed of one trial that the plan reckons with.
        work: Cost of all trials, in samples.
        span: Cost of the longest chain of trials with ``workers`` of them at a time, in samples.
    """

    batch_size: Positive
    points: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)]
    branch_samples: tuple[Positive, ...]
    multiples: tuple[Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)], ...]
    noise_steps: tuple[Positive, ...]
    repeats: Few
    rates: bool
    seeds: Few
    candidates: Few
    samples_per_second: PositiveFloat
    work: Positive
    span: Positive

    @property
    def length(self) -> int:
        """Samples of the main trajectory, and of each run from scratch."""
        return self.points[-1]


class Header(CommonHeader, frozen=True, kw_only=True):
    """Header of ``advise``."""

    settings: Settings
    plan: Plan


class Point(Result, frozen=True, tag="point"):
    """The main trajectory has reached a point of training.

    Attributes:
        curve: Validation losses since the point before, this one included.
        training: Samples seen and mean training loss of stretches since the point before.
    """

    key_fields = ("point",)

    point: Count
    samples: Positive
    steps: Count
    valid_loss: float
    curve: Curve
    training: Curve


class Noise(Result, frozen=True, tag="noise"):
    """Gradient noise scale at a point; fields as in ``NoiseEstimate``."""

    key_fields = ("point",)

    point: Count
    value: float
    low: float
    high: float
    grad_sq_norm: float
    noise_trace: float
    resolved: bool
    measurements: Count
    effective: float
    samples: Count


class Branch(Result, frozen=True, tag="branch"):
    """One branch: training on from a point with another batch size.

    Attributes:
        repeat: Number of the data order.
        samples: Samples that ``loss`` stands for.
        loss: Mean validation loss near the branch's end; infinite if it diverged.
        curve: Validation losses of the smallest batch on the way.
    """

    key_fields = ("point", "repeat", "batch_size")

    point: Count
    repeat: Count
    batch_size: Positive
    lr: PositiveFloat
    steps: Count
    samples: Positive
    loss: float
    curve: Curve


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a batch-size schedule, from a number of samples on."""

    from_samples: Count
    batch_size: Positive
    lr: PositiveFloat


class Scratch(Result, frozen=True, tag="scratch"):
    """One run from scratch.

    Attributes:
        purpose: ``"constant"`` for one batch size, ``"schedule"`` for a growing one.
        repeat: Number of the seed; repeat 0 of the smallest batch is the main trajectory.
        batch_size: Batch size of the last stage, in samples.
        rate: Learning rate over the one that the task's rule gives for the batch size.
        warmup_samples: Samples over which the learning rate rises from the task's own.
        samples: Samples that ``loss`` stands for.
        loss: Mean validation loss near the end; infinite if the run diverged.
    """

    key_fields = ("purpose", "repeat", "batch_size", "rate")

    purpose: Literal["constant", "schedule"]
    repeat: Count
    batch_size: Positive
    rate: PositiveFloat
    stages: tuple[Stage, ...]
    warmup_samples: Count
    steps: Count
    samples: Positive
    loss: float
    curve: Curve


RESULTS = Point | Noise | Branch | Scratch


def check(header: Header, result: Any) -> tuple[str, str] | None:
    """Describes the error of a result about a point that the plan does not have."""
    points, point = len(header.plan.points), getattr(result, "point", 0)
    if point < points:
        return None
    return f"'point' to be below {points}, the number of points planned", str(point)
