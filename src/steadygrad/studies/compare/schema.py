"""Types of ``compare``: what is chosen and planned, what trials give, and what is concluded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steadygrad.studies.schema import (
    CommonSettings,
    Count,
    Dtype,
    Positive,
    PositiveFloat,
    Result,
)
from steadygrad.studies.schema import Finding as CommonFinding
from steadygrad.studies.schema import Header as CommonHeader
from steadygrad.studies.schema import Summary as CommonSummary

BASELINE = "adamw"
# Name of the task's own optimizer.
OWN = "task"
# Beyond these ratios of samples the baseline's loss curve is no guide.
LEAST_RATIO, MOST_RATIO = 0.25, 4.0

Step = Annotated[float, Meta(ge=-64, le=64)]


@dataclass(frozen=True)
class Known:
    """A built-in optimizer: its name in sentences, and its default learning rate."""

    title: str
    lr: float


KNOWN: Mapping[str, Known] = {
    BASELINE: Known("AdamW", 1e-3),
    "scaledadam": Known("ScaledAdam", 3e-2),
    "lans": Known("LANS", 1e-3),
    "lamb": Known("LAMB", 1e-3),
    "sgd": Known("SGD", 0.1),
    "muon": Known("Muon", 1e-3),
}

# For `--help`.
EXAMPLE = "steadygrad compare --optimizers lans,task --add file.py:make_optimizer"


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """Settings of ``steadygrad compare``."""

    optimizers: Annotated[
        str,
        Meta(
            min_length=1,
            description="Optimizers to compare with AdamW: scaledadam, lans, lamb, sgd, muon, task "
            "for the task's own, and those of libraries, such as timm:adan or "
            "schedulefree:AdamWScheduleFree.",
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
    samples: Annotated[
        int, Meta(ge=0, description="Length of the longest trainings; 0: as the budget allows.")
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
    dtype: Dtype = "float32"


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Traits that a step of an optimizer beside the built-in ones has shown before the study.

    Attributes:
        version: Release of its library; empty where it is not known.
        own_schedule: Whether it has ``train()`` and ``eval()``: no warm-up and decay are applied.
        own_rate: Whether it estimates its learning rate: no ladder of rates is tried.
        matrices: Whether it takes only matrices; AdamW has the rest.
    """

    version: str = ""
    own_schedule: bool = False
    own_rate: bool = False
    matrices: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial.

    Attributes:
        batch_size: The task's own, in samples.
        optimizers: Names of the optimizers, AdamW first.
        multiples: Batch sizes as multiples of the task's.
        horizons: Samples of a short run, of one twice as long, and of the longest.
        full: Whether learning rates are also tried in runs of the longest horizon.
        seeds: Paired seeds of the verdicts.
        samples_per_second: Training speed of one trial that the plan reckons with.
        work: Cost of all trials, in samples.
        span: Cost of the longest chain of trials with ``workers`` of them at a time, in samples.
        traits: By optimizer, of those that are not built in.
    """

    batch_size: Positive
    optimizers: Annotated[tuple[str, ...], Meta(min_length=2, max_length=64)]
    multiples: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)]
    horizons: tuple[Positive, Positive, Positive]
    full: bool
    seeds: Annotated[int, Meta(ge=1, le=1000)]
    samples_per_second: PositiveFloat
    work: Positive
    span: Positive
    traits: dict[str, Traits] = {}

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch."""
        return self.multiples[-1] * self.batch_size


class Header(CommonHeader, frozen=True, kw_only=True):
    """Header of ``compare``."""

    settings: Settings
    plan: Plan


class Speed(Result, frozen=True, tag="speed"):
    """Bytes of state for each weight by optimizer; ``time`` holds the seconds of a step."""

    state_bytes: dict[str, float]


class Run(Result, frozen=True, tag="training"):
    """One training from the initial weights, with a whole learning-rate schedule.

    Attributes:
        multiple: Batch size over the task's.
        samples: Length of the schedule.
        step: Octaves of the learning rate above the optimizer's default; whole in the search.
        repeat: Number of the seed; 0 is the search's, the others are the verdicts'.
        lr: Peak learning rate.
        loss: Validation loss at the end; infinite if the training diverged.
        curve: Samples seen and validation loss on the way, and at the end.
    """

    key_fields = ("optimizer", "multiple", "samples", "step", "repeat")

    optimizer: str
    multiple: Positive
    samples: Positive
    step: Step
    repeat: Count
    lr: PositiveFloat
    loss: float
    curve: tuple[tuple[Count, float], ...]

    @property
    def end(self) -> float:
        """The loss; infinite also where it is no number."""
        return math.inf if math.isnan(self.loss) else self.loss


RESULTS = Speed | Run


def check(header: Header, result: Any) -> tuple[str, str] | None:
    """Refuses a result of an optimizer that the plan does not have: expected, found."""
    known = header.plan.optimizers
    if known[0] != BASELINE:
        return f"the plan's first optimizer to be {BASELINE}", repr(known[0])
    if not isinstance(result, Run) or result.optimizer in known:
        return None
    return f"'optimizer' to be one of {', '.join(known)}", repr(result.optimizer)


class Ratio(msgspec.Struct, frozen=True):
    """A ratio with its confidence interval."""

    value: float
    low: float
    high: float


class Difference(CommonFinding, frozen=True, kw_only=True, tag="difference"):
    """Mean paired difference of a loss from AdamW's; below zero is better.

    Attributes:
        mean: The mean; infinite where the optimizer diverged, NaN where it cannot be said.
        low: Lower end of its confidence interval; ``high`` is the upper one.
        confidence: Confidence of the interval, 0.95 or more: Holm's for several comparisons.
        p_value: P-value of Student's two-sided test, for this comparison alone.
        verdict: ``"better"``, ``"worse"`` or ``"cannot tell"``.
        needed: Seeds that would tell in four of five cases, were the mean the true one; None where
            the verdict is known, or where no number of seeds up to eight thousand would.
        rates_limit: Whether that is due to the search for learning rates.
    """

    mean: float
    low: float
    high: float
    confidence: float
    p_value: float
    verdict: str
    needed: int | None = None
    rates_limit: bool = False


class Verdict(Difference, frozen=True, kw_only=True, tag="verdict"):
    """An optimizer against AdamW, at one batch size and length of training.

    Attributes:
        multiple: Batch size over the task's.
        lr: Tuned learning rate.
        sample_ratio: Samples that AdamW needs for the same loss, over those of the training, from a
            quarter to four: at these it is only known to be beyond. Above 1 the optimizer saves.
        time_ratio: Time to the same loss over AdamW's, by the time of a step; None at other batch
            sizes than the task's.
        losses: By seed; infinite where it diverged.
        loss: Their mean; ``lost`` is the number of those that diverged.
    """

    optimizer: str
    multiple: int
    samples: int
    lr: float
    baseline_lr: float
    loss: float
    baseline_loss: float
    lost: int
    baseline_lost: int
    sample_ratio: Ratio | None
    time_ratio: Ratio | None
    losses: dict[str, float]
    baseline_losses: dict[str, float]


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The search for one optimizer's learning rate at one batch size.

    Attributes:
        lr: The tuned rate; None where the search is not done.
        step: Octaves of it above the default.
        interior: Whether worse rates were tried on both sides of the best one.
        tried: Losses by rung, and by octave.
    """

    optimizer: str
    multiple: int
    lr: float | None
    step: float
    interior: bool | None
    tried: dict[str, dict[str, float]]


class Critical(msgspec.Struct, frozen=True, kw_only=True):
    """Critical batch size of an optimizer: at most a fifth more samples than the task's own.

    Attributes:
        overheads: Extra samples as a fraction, by batch size over the task's.
        within: Largest batch size tried below all that cost more.
        beyond: Smallest one that costs more; None if none does.
    """

    optimizer: str
    overheads: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    within: int
    beyond: int | None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a training step over AdamW's, and bytes of state for each weight."""

    time_ratio: float
    state_bytes: float


class Flip(CommonFinding, frozen=True, tag="flip"):
    """A verdict that changes its sign with the length of the training."""

    optimizer: str
    multiple: int
    short: str
    long: str
    samples: tuple[int, int]


class Edge(CommonFinding, frozen=True, tag="edge"):
    """A best learning rate that is the last one tried; whether the answer hangs on it."""

    optimizer: str
    multiple: int
    hangs: bool


class Brackets(CommonFinding, frozen=True, tag="brackets"):
    """Critical batch sizes by optimizer: at least the first, and below the second."""

    sizes: dict[str, tuple[int, int | None]]


class Summary(CommonSummary, frozen=True, kw_only=True):
    """Content of ``summary.json``.

    Attributes:
        batch_size: The task's own.
        findings: The most important first, of verdicts those after the longest trainings.
        optimizers: Names in sentences, AdamW first.
        verdicts: By batch size, the shorter trainings first.
        critical: Empty where one batch size was tried.
        trained: Number of trainings, and of those that ``diverged``.
    """

    batch_size: int
    findings: tuple[Flip | Edge | Brackets | Verdict, ...]
    optimizers: dict[str, str]
    verdicts: tuple[Verdict, ...]
    flips: tuple[Flip, ...]
    tuned: tuple[Tuned, ...]
    critical: tuple[Critical, ...]
    costs: dict[str, Cost]
    trained: int
    diverged: int
    diverged_by: dict[str, int]
