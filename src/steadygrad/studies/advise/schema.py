"""Types of ``advise``: what is chosen and planned, what trials give, and what is concluded."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steadygrad.studies import schema
from steadygrad.studies.schema import Count, Dtype, Few, Finding, Positive, PositiveFloat, Result

TOLERANCE = "Extra samples that are acceptable, as a fraction: 0.01 to 1"
KEEP = (
    "Keep the half-life of Adam's second moment and of the weight decay in samples, whatever the "
    "batch size."
)
SAMPLES = "Samples of the training that the advice is for. 0 or auto: as many as the budget allows."
TUNE = "Search the learning rate of each batch size, and compare them at their own best."
SEEDS = "Most seeds of each batch size, 3 to 64. 0 or auto: as many as the budget allows."

Curve = tuple[tuple[Count, float], ...]
"""Pairs of samples seen and validation loss."""

# For `--help`.
EXAMPLE = "steadygrad advise digits-deep --tolerance 0.5 --workers 4"


@dataclass(frozen=True, kw_only=True)
class Settings(schema.CommonSettings):
    """Settings of ``steadygrad advise``."""

    tolerance: Annotated[float, Meta(ge=0.01, le=1, description=TOLERANCE)] = 0.2
    dtype: Dtype = "float32"
    keep_half_life: Annotated[bool, Meta(description=KEEP)] = False
    samples: Annotated[int, Meta(ge=0, lt=1 << 62, description=SAMPLES)] = 0
    seeds: Annotated[int, Meta(ge=0, le=64, description=SEEDS)] = 0
    tune: Annotated[bool, Meta(description=TUNE)] = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial.

    Attributes:
        batch_size: The task's own, in samples.
        samples: Length of the training that the advice is for, at most.
        points: Samples seen by the main trajectory at each point of training.
        branch_samples: Samples of each branch from each point.
        multiples: Batch sizes of the branches from each point, as multiples of ``batch_size``.
        noise_steps: Measurements of the noise scale at each point.
        repeats: Data orders of each branch.
        seeds: Most trainings from the initial weights with each batch size.
        samples_per_second: Training speed of one trial that the plan reckons with.
        work: Samples of the smallest batch that the budget has time for.
    """

    batch_size: Positive
    samples: Positive
    points: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)]
    branch_samples: tuple[Positive, ...]
    multiples: tuple[Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)], ...]
    noise_steps: tuple[Positive, ...]
    repeats: Few
    seeds: Few
    samples_per_second: PositiveFloat
    work: Positive

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch that is tried."""
        return max(row[-1] for row in self.multiples) * self.batch_size


class Header(schema.Header, frozen=True, kw_only=True):
    """Header of ``advise``."""

    settings: Settings
    plan: Plan


class Point(Result, frozen=True, tag="point"):
    """The main trajectory has reached a point of training."""

    key_fields = ("point",)
    point: Count
    samples: Positive
    steps: Count
    valid_loss: float


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
    """One training from the initial weights.

    Attributes:
        course: Batch size, or sizes, as ``plan.course_of`` names them.
        repeat: Number of the seed.
        rate: Learning rate over the one that the task's rule gives for the batch size.
        batch_size: The last one, in samples.
        warmup_samples: Samples over which the learning rate rises from the task's own.
        place: Samples that ``loss`` stands for.
        loss: Mean validation loss near the end; infinite if the run diverged.
        curve: The same at all lengths that were passed on the way, ascending.
    """

    key_fields = ("course", "repeat", "rate", "samples")
    course: Annotated[str, Meta(pattern=r"^[1-9][0-9]*(-[1-9][0-9]*@[1-9][0-9]*)*$")]
    repeat: Count
    rate: PositiveFloat
    samples: Positive
    batch_size: Positive
    stages: tuple[Stage, ...]
    warmup_samples: Count
    steps: Count
    place: PositiveFloat
    loss: float
    curve: tuple[tuple[PositiveFloat, float], ...]


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
        fall: Fall of the smallest batch's loss over the branch, in standard errors; 0 where it is
            within rounding of the loss.
        known: Whether the interval is narrow enough to name a batch size.
        safe: Largest batch size tried that is within the tolerance, also at the interval's end; in
            a summary, one that diverged nowhere in the study.
        overhead: Extra samples by batch size tried, ascending, as a fraction of what the best
            needs; infinite where it diverged.
    """

    within: int
    beyond: float
    value: float
    low: float
    high: float
    diverged: int | None
    fall: float
    known: bool
    safe: int
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
        seeds: Pairs with the smallest batch.
        loss: Mean final validation loss; infinite where a run diverged.
        overhead: Extra samples, as a fraction of what the smallest batch needs, with its interval;
            0 where it needs none, and infinite beyond the largest known one, three tolerances.
        within: Whether it is within the tolerance, and ``high`` within 1.25 tolerances.
        beyond: Whether the whole interval is beyond the tolerance.
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
    within: bool
    beyond: bool


class Recommendation(Finding, frozen=True, tag="recommendation"):
    """The fixed batch size for a run of ``samples`` from the initial weights; None: not known.

    Attributes:
        overhead: Extra samples as a fraction, with its interval; None for the smallest batch.
        half_life: Samples after which Adam's second moment is halved.
        decay_half_life: Samples after which weights that only decay are halved.
        why: Why there is none: ``"unmeasured"``, ``"flat"`` (the smallest batch's loss does not
            fall), or ``"undecided"``.
        minutes: About how long it would take to decide, at this study's speed.
    """

    batch_size: int | None = None
    lr: float | None = None
    warmup_samples: int | None = None
    samples: int | None = None
    overhead: float | None = None
    low: float | None = None
    high: float | None = None
    half_life: float | None = None
    decay_half_life: float | None = None
    why: str = ""
    minutes: float | None = None


class OtherRate(msgspec.Struct, frozen=True, kw_only=True):
    """Validation losses at another learning rate less those at the task's own, by ``seeds`` pairs.

    Infinite where a training diverged.
    """

    lr: float
    seeds: int
    mean: float
    low: float
    high: float


class RateVerdict(Finding, frozen=True, tag="rate"):
    """Whether the learning rate of a batch size suits a run of ``samples``.

    Attributes:
        verdict: ``"low"`` or ``"high"`` where another rate is better, ``"fits"`` where none is by
            as much as the tolerated samples lower the loss, or ``""``: cannot tell.
        others: Half and twice the rate.
    """

    verdict: str
    batch_size: int
    lr: float
    samples: int
    others: tuple[OtherRate, ...]

    @property
    def better(self) -> OtherRate | None:
        """The rate that is better; None where no single one is known to be."""
        which = {"low": max, "high": min}.get(self.verdict)
        return which(self.others, key=lambda other: other.lr) if which else None


class Schedule(Finding, frozen=True, tag="schedule"):
    """A growing batch that takes fewer steps than the recommended one.

    Attributes:
        check: What was trained of it; None before three pairs.
        advised: Whether it passed.
        megatron: Megatron's option; empty where a sample has no number of tokens.
    """

    stages: tuple[Stage, ...]
    steps: int
    warmup_samples: int
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
    """The smallest batch above the advised one that was trained and is not within the tolerance."""

    run: Checked


class Flat(Finding, frozen=True, tag="flat"):
    """Points, in samples, along whose branches the smallest batch's loss does not fall.

    ``epochs``: how many times the data were seen at the last.
    """

    points: tuple[int, ...]
    epochs: float


class Unfinished(Finding, frozen=True, tag="unfinished"):
    """The study was interrupted, or it failed."""


Others = Schedule | GoingOn | Larger | Flat | Unfinished


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
        tolerance: Extra samples that are acceptable, as a fraction.
        findings: The most important first; the next four are among them.
        rates: Of the smallest batch, and of the recommended one, as far as they are known.
        checked: The other batch sizes that were compared with the smallest, ascending.
    """

    batch_size: int
    lr: float
    tolerance: float
    findings: tuple[Recommendation | RateVerdict | Others, ...]
    recommendation: Recommendation
    rates: tuple[RateVerdict, ...]
    schedule: Schedule | None
    going_on: GoingOn | None
    checked: tuple[Checked, ...]
    points: tuple[Measured, ...]
