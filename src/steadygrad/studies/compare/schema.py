"""Types of ``compare``: what is chosen and planned, what trials give, and what is concluded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from steadygrad.studies import schema as shared
from steadygrad.studies.paired import ALPHA, MOST, pairs_needed
from steadygrad.studies.schema import Positive, Training

BASELINE = "adamw"
# Name of the task's own optimizer.
OWN = "task"
# Beyond these ratios of samples the baseline's loss curve is no guide.
LEAST_RATIO, MOST_RATIO = 0.25, 4.0
# Names of the built-in optimizers in sentences.
KNOWN: Mapping[str, str] = {
    BASELINE: "AdamW",
    "scaledadam": "ScaledAdam",
    "lans": "LANS",
    "lamb": "LAMB",
    "sgd": "SGD",
    "muon": "Muon",
}

# For `--help`.
EXAMPLE = "steadygrad compare --optimizers lans,task --add file.py:make_optimizer"
OPTIMIZERS = (
    "Optimizers to compare with AdamW: scaledadam, lans, lamb, sgd, muon, task for the task's own, "
    "and those of libraries, such as timm:adan or schedulefree:AdamWScheduleFree."
)
ADD = "Optimizers of your own: path/file.py:make_optimizer, of (model, lr); several with commas."
BATCHES = "Batch sizes as multiples of the task's, such as 1,4,16: all are tuned at each of them."
SAMPLES = "Length of the trainings; 0: as the budget allows."
SEEDS = "Most paired seeds of each optimizer, where fewer do not tell. With --resume: a higher one."


@dataclass(frozen=True, kw_only=True)
class Settings(shared.CommonSettings):
    """Settings of ``steadygrad compare``."""

    optimizers: Annotated[str, Meta(min_length=1, description=OPTIMIZERS)] = "scaledadam,lans"
    add: Annotated[str, Meta(description=ADD)] = ""
    batches: Annotated[str, Meta(min_length=1, description=BATCHES)] = "1"
    samples: Annotated[int, Meta(ge=0, lt=1 << 62, description=SAMPLES)] = 0
    seeds: Annotated[int, Meta(ge=1, le=MOST, description=SEEDS)] = MOST
    dtype: shared.Dtype = "float32"


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Traits that a step of an optimizer beside the built-in ones has shown before the study."""

    version: str = ""  # release of its library; empty where it is not known
    # Whether it has `train()` and `eval()`: no warm-up and decay are applied.
    own_schedule: bool = False
    own_rate: bool = False  # whether it estimates its learning rate: no ladder of rates is tried


class Arm(msgspec.Struct, frozen=True):
    """An optimizer at a batch size, in samples."""

    optimizer: str
    batch_size: Positive


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial."""

    # By batch size, AdamW first: the baseline of the others at that size.
    arms: Annotated[tuple[Arm, ...], Meta(min_length=2, max_length=4096)]
    # Length of the trainings, a whole number of steps of every arm, as is its half, the length of
    # the baselines' short ones.
    samples: Positive
    seeds: Annotated[int, Meta(ge=1, le=MOST)]  # most paired seeds of an arm
    work: Positive  # cost of about as many trials as tell, in samples
    traits: dict[str, Traits] = {}  # by optimizer, of those that are not built in

    def __post_init__(self) -> None:
        if any(self.arms[self.baseline(n)].optimizer != BASELINE for n in range(len(self.arms))):
            raise ValueError(f"Expected {BASELINE} as the first optimizer of each batch size")

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch."""
        return max(arm.batch_size for arm in self.arms)

    @property
    def compared(self) -> list[int]:
        """Numbers of the arms that are no baseline."""
        return [number for number in range(len(self.arms)) if self.baseline(number) != number]

    @property
    def alpha(self) -> float:
        """Chance of an error in one comparison; in all together it is at most 5 %."""
        return ALPHA / len(self.compared)

    @property
    def first(self) -> int:
        """Fewest pairs with which a verdict is possible."""
        return pairs_needed(1.0, 0.0, self.alpha) or self.seeds

    def baseline(self, number: int) -> int:
        """Number of the first arm with an arm's batch size."""
        sizes = [arm.batch_size for arm in self.arms]
        return sizes.index(sizes[number])

    def has_own_rate(self, number: int) -> bool:
        """Whether an arm's optimizer estimates its learning rate."""
        return self.traits.get(self.arms[number].optimizer, Traits()).own_rate


Header = shared.HeaderOf[Settings, Plan]
RESULTS = Training


class Ratio(msgspec.Struct, frozen=True):
    """A ratio with its confidence interval."""

    value: float
    low: float
    high: float


class Verdict(shared.Finding, frozen=True, kw_only=True, tag="verdict"):
    """An arm against the baseline of its batch size, as it was when it could first be told."""

    arm: int  # number of the arm
    optimizer: str
    batch_size: int
    lr: float  # tuned learning rate
    baseline_lr: float
    # Mean paired difference of the loss from AdamW's, below zero is better; where a run `failed`,
    # of the share of runs that diverged.
    mean: float
    low: float  # lower end of its confidence interval; `high` is the upper one
    high: float
    pairs: int  # paired seeds of the verdict
    verdict: Literal["better", "worse", "cannot tell"]
    # Pairs that should tell, were mean and spread the true ones; None where the verdict is known,
    # or where no number up to ten thousand would.
    needed: int | None
    rates_limit: bool  # whether the difference is within the error of the tuned learning rates
    lost: int  # trainings of the pairs that diverged; `baseline_lost`: of AdamW's
    baseline_lost: int
    losses: dict[int, float]  # by seed; infinite where it diverged
    baseline_losses: dict[int, float]
    # Samples that AdamW needs for the same loss, over those of the training, from a quarter to
    # four: at these it is only known to be beyond. Above 1 the optimizer saves.
    sample_ratio: Ratio | None = None
    # Time to the same loss over AdamW's, by the seconds of the pairs' trainings; None at other
    # batch sizes than the task's.
    time_ratio: Ratio | None = None

    @property
    def failed(self) -> bool:
        """Whether a run diverged, so that shares are compared."""
        return bool(self.lost or self.baseline_lost)

    @property
    def is_final(self) -> bool:
        """Whether more pairs would not help: it is told, rates limit it, or all runs diverge."""
        is_told = self.verdict != "cannot tell"
        return is_told or self.rates_limit or self.lost == self.baseline_lost == self.pairs


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The search for one arm's learning rate."""

    optimizer: str
    batch_size: int
    lr: float | None  # the tuned rate; None where the search is not done
    step: float | None  # octaves of it above the arm's own; None likewise
    # Whether worse rates were tried on both sides of the best one; None likewise, and where the
    # optimizer has a rate of its own.
    interior: bool | None
    tried: dict[int, float]  # mean losses of the search by octave


class Edge(shared.Finding, frozen=True, tag="edge"):
    """A best learning rate that is the last one tried; whether the answer hangs on it."""

    optimizer: str
    batch_size: int
    hangs: bool


class Summary(shared.Summary, frozen=True, kw_only=True):
    """Content of ``summary.json``."""

    samples: int  # length of the trainings
    confidence: float  # of each interval, 0.95 or more: all hold together with 0.95
    findings: tuple[Edge | Verdict, ...]  # the most important first
    optimizers: dict[str, str]  # names in sentences, AdamW first
    tuned: tuple[Tuned, ...]  # the search of each arm

    @property
    def verdicts(self) -> list[Verdict]:
        """In the order of the arms."""
        return sorted((x for x in self.findings if isinstance(x, Verdict)), key=lambda x: x.arm)
