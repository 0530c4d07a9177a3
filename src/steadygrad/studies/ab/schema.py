"""Types of ``ab``: what is chosen and planned, what a run gives, and what is concluded."""

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from steadygrad.studies import schema as shared
from steadygrad.studies.schema import Count, Positive, Training

# Most pairs, and those of A with itself, where no setting says them.
MOST, ITSELF = 100, 12
# Squares of larger metrics would not be finite.
LARGEST = 1e100
EXAMPLE = "steadygrad ab --metric loss -- 'python a.py --seed {seed}' 'python b.py --seed {seed}'"
TASK = (
    "Tasks (built-in, path/file.py:make_task), functions of a seed (path/file.py:train) or, with "
    "--metric, commands with {seed}. A alone is compared with itself on other seeds: its noise."
)
METRIC = "Of a command: a regular expression with a group (last match), or a key of lines of JSON."
GOAL = "Whether a smaller or a larger metric is better."
ALPHA = 'Greatest probability of a wrong "better" or "worse". A loop shares it: 0.05 / changes.'
PAIRS = "Most pairs to run; 0: 100, or 12 if A is alone. With --resume: a new limit."
SAMPLES = "Samples of a task's training; 0: 12 pairs fit into the budget, at most 10 epochs."
SMALLEST = 'Stop with "no difference" once the difference is known to be at most this.'
TIMEOUT = "Time limit of a command in seconds; 0: none."


@dataclass(frozen=True, kw_only=True)
class Settings(shared.CommonSettings):
    """Settings of ``steadygrad ab``."""

    task: Annotated[
        str, Meta(min_length=1, description=TASK, extra={"nargs": "*", "metavar": "A B"})
    ] = "char-lm"
    metric: Annotated[str, Meta(description=METRIC)] = ""
    goal: Annotated[Literal["min", "max"], Meta(description=GOAL)] = "min"
    smallest_effect: Annotated[float, Meta(ge=0, lt=1e300, description=SMALLEST)] = 0.0
    alpha: Annotated[float, Meta(ge=1e-9, le=0.5, description=ALPHA)] = 0.05
    pairs: Annotated[int, Meta(ge=0, le=1000, description=PAIRS)] = 0
    samples: Annotated[int, Meta(ge=0, lt=1 << 62, description=SAMPLES)] = 0
    timeout: Annotated[float, Meta(ge=0, lt=1e9, description=TIMEOUT)] = 0.0
    workers: shared.Workers = 1  # a command may need the whole machine, and hours
    budget: shared.Budget = 86400.0
    dtype: shared.Dtype = "float32"

    def __post_init__(self) -> None:
        shlex.split(self.task)  # a record may hold half a quotation
        if self.metric:  # devices are left to the commands
            object.__setattr__(self, "device", "cpu")

    @property
    def words(self) -> list[str]:
        """The words of the command line."""
        return shlex.split(self.task)


class Plan(Struct, frozen=True, kw_only=True):
    """The arms, and amounts of work: ``samples`` of a task's training, 0 without one."""

    arms: Annotated[tuple[str, ...], Meta(min_length=2)]
    samples: Count
    work: Positive
    largest_batch: Positive


Header = shared.HeaderOf[Settings, Plan]
RESULTS = Training
Doubt = Literal["seed", "shared", "state"]


class Comparison(shared.Finding, frozen=True, kw_only=True, tag="comparison"):
    """A B against A after so many ``pairs``: all, or those up to the first verdict."""

    name: str
    verdict: Literal["better", "worse", "no difference", "cannot tell"]
    pairs: Count = 0
    # Mean difference from A; of the shares of failed runs, once a run has `failed`.
    mean: float = 0.0
    low: float = -float("inf")
    high: float = float("inf")
    failed: tuple[int, int] = (0, 0)
    # Pairs more that should be enough; None where it is told, and beyond ten thousand.
    needed: int | None = None
    # In how many pairs B is better, and worse, by more than two deviations of A.
    two_sigma: tuple[int, int] | None = None
    noise: float | None = None  # 95 % of the differences of two runs are smaller, where A is alone
    # Why no verdict would be one: `arms` are not reached by the seed, have shared what their runs
    # left, or gave another metric when called again with the same seed.
    doubt: Doubt | None = None
    arms: tuple[str, ...] = ()


class Arm(Struct, frozen=True, kw_only=True):
    """All runs of A or of a B: mean and deviation of the metric, and means of what a run took."""

    name: str
    what: str
    runs: Count
    failed: Count
    failure: str
    mean: float | None
    deviation: float | None
    seconds: float | None
    peak_bytes: float | None


class Summary(shared.Summary, frozen=True, kw_only=True):
    """Content of ``summary.json``."""

    findings: tuple[Comparison, ...]
    arms: tuple[Arm, ...]

    @property
    def exit_code(self) -> int:
        """0: a B is better; 4: it cannot be told yet; 3: none is better."""
        said = {found.verdict for found in self.findings}
        return 0 if "better" in said else 4 if "cannot tell" in said else 3
