"""Types of ``advise``: what is chosen and planned, what trials give, and what is concluded."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from steadygrad._checks import InputError
from steadygrad.studies import schema
from steadygrad.studies.schema import Count, Finding, NonNegative, Positive, Result, Training

TOLERANCE = "Extra samples that are acceptable, as a fraction: 0.01 to 1"
KEEP = "At each batch size keep the half-lives of Adam's second moment and of the weight decay."
SAMPLES = "Samples of the training that the advice is for. 0 or auto: as many as the budget allows."
SEEDS = (
    "Most seeds of each batch size: 4, 5, 6, 7, 8, 10, 12, 15 and so on to 64, rounded down. 0 or "
    "auto: as many as the budget allows. With --resume: a higher limit."
)

BATCH_SIZES = "Batch sizes that can be used, such as 64,128,256; beside Task.batch_size."
MAX_BATCH = "Largest batch size that can be used. 0 or auto: any."
SHARE = "In place of --budget, with --samples: a part of the time of that run here, such as 0.1."
# Half the width of a 95 % interval, in deviations.
WIDTH = 1.96
# For `--help`.
EXAMPLE = "steadygrad advise digits-deep --tolerance 0.5 --workers 4"


@dataclass(frozen=True, kw_only=True)
class Settings(schema.CommonSettings):
    """Settings of ``steadygrad advise``."""

    tolerance: Annotated[float, Meta(ge=0.01, le=1, description=TOLERANCE)] = 0.2
    dtype: schema.Dtype = "float32"
    keep_half_life: Annotated[bool, Meta(description=KEEP)] = False
    samples: Annotated[int, Meta(ge=0, lt=1 << 62, description=SAMPLES)] = 0
    seeds: Annotated[int, Meta(ge=0, le=64, description=SEEDS)] = 0
    batch_sizes: Annotated[str, Meta(description=BATCH_SIZES)] = ""
    max_batch: Annotated[int, Meta(ge=0, lt=1 << 62, description=MAX_BATCH)] = 0
    share: Annotated[float, Meta(ge=0, le=100, description=SHARE)] = 0.0

    def timed(self, speed: float) -> "Settings":
        """With the budget that the share stands for, at so many samples a second of all trials."""
        if not self.share:
            return self
        if not self.samples or self.budget != schema.CommonSettings.budget:
            found = f"--budget {self.budget:g}s as well" if self.samples else "no --samples"
            raise InputError(
                "--share is a part of the time that --samples take, in place of --budget. Found "
                f"{found}. Remedy: --samples with one of the two."
            )
        return replace(self, budget=self.share * self.samples / speed)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial."""

    # Batch sizes that can be tried, ascending; the first is the task's own, the reference. Where a
    # stand-in trains the rungs, the same again for the real model.
    arms: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=4096)]
    samples: Positive  # length of the longest training: the one that the advice is for, or a rung
    seeds: Annotated[int, Meta(ge=0, le=64)]  # most trainings of an arm
    work: Positive  # samples of the smallest batch that the budget has time for
    # Rungs before that, ascending: lengths at which the sizes are compared.
    shorter: tuple[Positive, ...] = ()
    # Samples of a longer training, for which the advice is predicted; 0: there is none.
    target: Count = 0
    stand_in: Count = 0  # parameters of `Task.proxy`'s model, which trains the rungs; 0: none does
    # The budget as a part of what the longer training takes on the same devices.
    cost: NonNegative = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes, ascending."""
        return self.arms[: len(self.arms) // (2 if self.stand_in else 1)]

    @property
    def rungs(self) -> tuple[int, ...]:
        """All lengths, ascending."""
        return (*self.shorter, self.samples)

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch that can be tried."""
        return self.arms[-1]


Header = schema.HeaderOf[Settings, Plan]


class NoiseAt(msgspec.Struct, frozen=True, kw_only=True):
    """Gradient noise scale after so many samples; fields as in ``NoiseEstimate``."""

    samples: Positive
    value: float
    low: float
    high: float
    grad_sq_norm: float
    noise_trace: float
    resolved: bool
    measurements: Count


class Noise(Result, frozen=True, tag="noise"):
    """Gradient noise scales along the reference training with the first seed."""

    key_fields = ("samples",)
    samples: Positive
    points: tuple[NoiseAt, ...]


RESULTS = Training | Noise


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Extra samples of a batch size as a fraction: their interval, infinite beyond 3 tolerances."""

    batch_size: int
    low: float
    high: float


class Checked(Cost, frozen=True, kw_only=True):
    """A batch size that was trained from the initial weights beside the smallest."""

    lr: float
    warmup_samples: int
    steps: int
    seeds: int  # pairs with the smallest batch
    loss: float  # mean final validation loss; infinite where a training diverged
    # Extra samples as a fraction of what the smallest batch needs; 0: it needs none.
    overhead: float
    within: bool  # whether it is within the tolerance, and `high` within 1.25 tolerances
    beyond: bool  # whether the whole interval is beyond the tolerance


class Recommendation(Finding, frozen=True, tag="recommendation"):
    """The fixed batch size for a run of ``samples`` from the initial weights; None: not known."""

    batch_size: int | None = None
    lr: float | None = None
    warmup_samples: int | None = None
    samples: int | None = None
    # Extra samples as a fraction, with its interval; None for the smallest batch.
    overhead: float | None = None
    low: float | None = None
    high: float | None = None
    half_life: float | None = None  # samples after which Adam's second moment is halved
    decay_half_life: float | None = None  # samples after which weights that only decay are halved
    # Why there is none: "unmeasured", "flat" (the smallest batch's loss does not fall), or
    # "undecided".
    why: str = ""


class Critical(msgspec.Struct, frozen=True, kw_only=True):
    """The critical batch size over one length, with its 95% confidence interval.

    Where no batch size was surely beyond the tolerance ``high`` is infinite.
    """

    samples: Positive
    batch_size: float
    low: float
    high: float

    @property
    def is_closed(self) -> bool:
        """Whether the interval has an upper end."""
        return self.high < math.inf

    @property
    def error(self) -> float:
        """The deviation of the size's logarithm."""
        return math.log(self.high / self.low) / (2 * WIDTH)


class Growth(Finding, frozen=True, tag="growth"):
    """The critical batch size over a training that was too long to be tried."""

    samples: Positive
    # With its 95% confidence interval; None where it is not known.
    predicted: Critical | None = None
    lengths: tuple[Critical, ...] = ()  # those that it is predicted from, ascending
    slope: float = 0.0  # its logarithm grows by this with the logarithm of the length
    agree: bool = True  # whether the lengths agree with one slope
    # Why nothing is predicted: "none" (no batch size was surely within or beyond the tolerance),
    # "stand-in" (the real model was not seen to agree with the stand-in), or "unchecked" (it was
    # not tried at any length where the stand-in has a critical size).
    why: str = ""
    # Octaves by which the best learning rate rose from the shortest length to the longest.
    drift: float = 0.0
    likely: Recommendation | None = None  # settings for the predicted size
    costs: tuple[Cost, ...] = ()  # predicted ones of batch sizes over `samples`, ascending


class Summary(schema.Summary, frozen=True, kw_only=True):
    """Content of ``summary.json``."""

    batch_size: int  # the task's own, with which the others are compared
    lr: float  # of the smallest batch in the trainings that were compared
    octaves: float = 0.0  # the advice's learning rates are the task's times 2 to this power
    tolerance: float  # extra samples that are acceptable, as a fraction
    findings: tuple[Recommendation | Growth, ...]  # the recommendation, and the growth
    recommendation: Recommendation
    growth: Growth | None = None  # where the advice is for a longer training than was tried
    # Parameters of the model that trained the rungs in the real one's place; 0: none.
    stand_in: int = 0
    named: int = 0  # largest batch size that the settings name; 0: they name none
    # The other batch sizes that were compared with the smallest, ascending.
    checked: tuple[Checked, ...]
    # Gradient noise scales along the reference training; no advice rests on them.
    noise: tuple[NoiseAt, ...]
