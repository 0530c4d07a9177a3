"""Types of ``advise``: what is chosen and planned, what trials give, and what is concluded."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from steadygrad.studies import schema
from steadygrad.studies.schema import Count, Few, Finding, Positive, PositiveFloat, Result

TOLERANCE = "Extra samples that are acceptable, as a fraction: 0.01 to 1"
KEEP = (
    "Keep the half-life of Adam's second moment and of the weight decay in samples, whatever the "
    "batch size."
)
# A sample overhead that stands for itself and more: the curves begin at a quarter of a run.
CAP = 3.0

Curve = tuple[tuple[Count, float], ...]
"""Pairs of samples seen and validation loss."""

# For `--help`.
EXAMPLE = "steadygrad advise digits-deep --tolerance 0.5 --workers 4"


@dataclass(frozen=True, kw_only=True)
class Settings(schema.CommonSettings):
    """Settings of ``steadygrad advise``."""

    tolerance: Annotated[float, Meta(ge=0.01, le=1, description=TOLERANCE)] = 0.2
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        Meta(description="Type to compute in; bfloat16 and float16 by autocast."),
    ] = "float32"
    keep_half_life: Annotated[bool, Meta(description=KEEP)] = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial.

    Attributes:
        batch_size: The task's own, in samples.
        points: Samples seen by the main trajectory at each point of training.
        branch_samples: Samples of each branch from each point.
        multiples: Batch sizes of the branches from each point, as multiples of ``batch_size``.
        noise_steps: Measurements of the noise scale at each point.
        repeats: Data orders of each branch.
        rates: Whether the smallest batch is trained at other learning rates.
        seeds: Runs from the initial weights with each batch size; 0: the advice is not checked.
        candidates: Most batch sizes to train from the initial weights.
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
        """Samples of the main trajectory, and of each run from the initial weights."""
        return self.points[-1]

    @property
    def largest_batch(self) -> int:
        """Samples of the largest branch."""
        return max(row[-1] for row in self.multiples) * self.batch_size


class Header(schema.Header, frozen=True, kw_only=True):
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
        loss: Mean validation loss near the end; infinite if it diverged.
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
    """One run from the initial weights.

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
    expected = f"'point' to be below {points}, the number of points planned"
    return (expected, str(point)) if point >= points else None


class Critical(msgspec.Struct, frozen=True, kw_only=True):
    """The critical batch size at one point of training.

    Attributes:
        within: Largest batch size that was trained within the tolerance.
        beyond: Smallest one that was not; infinite if all were.
        value: By interpolation; NaN when the smallest batch's loss did not fall.
        low: Lower end of the 95% interval, at most ``within``.
        high: Upper end, at least ``beyond``.
        diverged: Smallest batch size that diverged; None if none did. Where the loss is flat, only
            a loss that is not finite counts.
        level: Validation loss that a batch size within the tolerance reaches.
        fall: Fall of the smallest batch's loss over the branch, in standard errors; 0 where it is
            within rounding of the loss.
        known: Whether the interval is narrow enough to name a batch size.
        safe: Largest batch size tried that is within the tolerance, also at the interval's end; in
            a summary, one that diverged nowhere in the study.
        spread: Standard deviation of one branch's loss, its data order included.
        overhead: Extra samples by batch size tried, ascending, as a fraction of what the best
            needs; 3 stands for more.
    """

    within: int
    beyond: float
    value: float
    low: float
    high: float
    diverged: int | None
    level: float
    fall: float
    known: bool
    safe: int
    spread: float
    overhead: dict[str, float]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes tried, ascending."""
        return tuple(map(int, self.overhead))

    @property
    def resolved(self) -> bool:
        """Whether the loss fell enough to distinguish batch sizes."""
        return not math.isnan(self.value)


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A batch size, or a schedule and its last one, that was trained from the initial weights.

    Attributes:
        loss: Mean final validation loss; infinite where a run diverged.
        overhead: Extra samples, as a fraction of what the smallest batch needs.
        low: Lower end of its 95% interval over seeds.
        high: Upper end.
        upper: Overhead that the truth exceeds with a chance of 10 %.
        within: Whether it is within the tolerance; see ``runs.checked_runs``.
    """

    batch_size: int
    stages: tuple[Stage, ...]
    warmup_samples: int
    steps: int
    seeds: int
    loss: float
    overhead: float
    low: float
    high: float
    upper: float
    within: bool

    @property
    def diverged(self) -> bool:
        """Whether the overhead is at or above the largest one that is distinguished."""
        return self.overhead >= CAP


class Recommendation(Finding, frozen=True, tag="recommendation"):
    """The fixed batch size for a run of ``samples`` from the initial weights; None: not known.

    Attributes:
        overhead: Extra samples as a fraction, where it was trained; with its 95% interval.
        basis: ``"trained"``, ``"predicted"``, ``"own"`` (the task's), or ``"none"``.
        known: Whether it passed its check, or the next larger one is known to fail.
        half_life: Samples after which Adam's second moment is halved.
        decay_half_life: Samples after which weights that only decay are halved.
        why: Why there is none: ``"unmeasured"``; ``"runs"``, the loss did not fall before any
            point; or along the branches it is ``"zero"``, falls ``"slightly"``, or is ``"flat"``.
    """

    batch_size: int | None = None
    lr: float | None = None
    warmup_samples: int | None = None
    samples: int | None = None
    overhead: float | None = None
    low: float | None = None
    high: float | None = None
    basis: str = "none"
    known: bool = False
    half_life: float | None = None
    decay_half_life: float | None = None
    why: str = ""


class RateVerdict(Finding, frozen=True, tag="rate"):
    """Whether the task's learning rate suits a run of ``samples``; 0: no other was trained.

    Attributes:
        verdict: ``"low"``, ``"high"``, ``"fits"``, or ``""`` where there is none.
        why: Why there is none: the losses are the ``"same"`` at all rates, or ``"zero"``, or
            ``"rising"`` over the run.
        losses: Mean losses over the last 40 % of the run, by rate relative to the task's own.
        overheads: Extra samples that each rate needs by a fit through the task's own losses, as a
            fraction between bounds; negative where it needs fewer. Empty without a verdict.
        elsewhere: Whether the recommended run has another length.
        first: Whether the rate has to be tuned before the recommendation is followed.
    """

    verdict: str = ""
    why: str = ""
    samples: int = 0
    losses: dict[str, float] = msgspec.field(default_factory=dict)
    overheads: dict[str, float] = msgspec.field(default_factory=dict)
    elsewhere: bool = False
    first: bool = False


class Schedule(Finding, frozen=True, tag="schedule"):
    """A growing batch that takes fewer steps than the recommended one.

    Attributes:
        basis: ``"trained"``, with its ``check``, or ``"predicted"``.
        advised: Whether it passed its check.
        megatron: Megatron's option; empty where a sample has no number of tokens.
    """

    stages: tuple[Stage, ...]
    steps: int
    warmup_samples: int
    basis: str
    advised: bool
    check: Checked | None
    megatron: str


class GoingOn(Finding, frozen=True, tag="going on"):
    """A batch size for the next ``samples``, from the last point that tells batch sizes apart.

    ``known``: whether the critical batch size is. ``diverged``: a batch size that bounds it by
    diverging elsewhere in the study.
    """

    from_samples: int
    samples: int
    batch_size: int
    lr: float
    known: bool
    diverged: int | None


class Larger(Finding, frozen=True, tag="larger"):
    """The smallest larger batch that was trained and was not within the tolerance; None: none.

    ``gap``: whether it failed for certain, and a size below it was not tried. ``diverged``: a batch
    size that diverged in another run, and bounds the recommendation.
    """

    run: Checked | None
    gap: bool
    diverged: int | None


class Flat(Finding, frozen=True, tag="flat"):
    """Points, in samples, along whose branches the smallest batch's loss does not fall.

    ``epochs``: how many times the data were seen at the last. ``how``: as ``Recommendation.why``.
    """

    points: tuple[int, ...]
    epochs: float
    how: str


class Unplanned(Finding, frozen=True, tag="unplanned"):
    """The budget was too short for a run from the initial weights."""


class Unfinished(Finding, frozen=True, tag="unfinished"):
    """The study ended after so many of the planned points."""

    measured: int
    planned: int


Others = Schedule | GoingOn | Larger | Flat | Unplanned | Unfinished


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements at a point of training; ``resolved``: whether it tells batch sizes apart."""

    samples: int
    valid_loss: float
    noise: Noise | None
    critical: Critical | None
    resolved: bool


class Summary(schema.Summary, frozen=True, kw_only=True):
    """Content of ``summary.json``.

    Attributes:
        batch_size: The task's own, with which the others are compared.
        lr: The task's learning rate.
        tolerance: Extra samples that are acceptable, as a fraction.
        findings: The most important first; the next four are among them.
        checked: The other batch sizes that were trained with every seed, ascending.
        points: Points of training at which the study measured.
    """

    batch_size: int
    lr: float
    tolerance: float
    findings: tuple[Recommendation | RateVerdict | Others, ...]
    recommendation: Recommendation
    rate: RateVerdict
    schedule: Schedule | None
    going_on: GoingOn | None
    checked: tuple[Checked, ...]
    points: tuple[Measured, ...]
