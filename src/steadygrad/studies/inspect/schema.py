"""Types of ``inspect``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from steadygrad.studies.schema import CommonSettings, Count, Positive, Result
from steadygrad.studies.schema import Header as CommonHeader

__all__ = [
    "AFTER",
    "BEFORE",
    "KINDS",
    "PARTS",
    "PHASES",
    "RESULTS",
    "SEARCH",
    "Accumulation",
    "Cut",
    "Header",
    "Histogram",
    "Part",
    "Phase",
    "Plan",
    "Settings",
    "check",
    "layer_title",
    "layers_of",
]

BEFORE, SEARCH, AFTER = "before", "search", "after"
PHASES = (BEFORE, SEARCH, AFTER)
# Parts of a phase. The second half of them counts, when the phase's scales have settled.
PARTS = 8
KINDS = ("activations", "weights")
# What every page and sentence calls the layer whose name is empty.
OUTSIDE = "the rest of the model"

PhaseName = Literal["before", "search", "after"]
Number = Annotated[int, Meta(ge=-1 << 62, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """Settings of ``steadygrad inspect``."""

    steps: Annotated[
        int,
        Meta(
            ge=16,
            le=1 << 40,
            description="Optimizer steps with one loss scale; as many find scales, and as many "
            "try those proposed.",
        ),
    ] = 200
    accumulation: Annotated[
        bool,
        Meta(
            description="Check as well that the gradient is the same however a batch is cut into "
            "micro-batches."
        ),
    ] = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial.

    Attributes:
        batch_size: The task's, in samples.
        steps: Optimizer steps of each phase.
        layers: Names of the layers that can have a scale of their own.
        work: Cost of all trials, in samples.
    """

    batch_size: Positive
    steps: Positive
    layers: tuple[str, ...]
    work: Positive


class Header(CommonHeader, frozen=True, kw_only=True):
    """Header of ``inspect``."""

    settings: Settings
    plan: Plan


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of exponents.

    Attributes:
        low: Exponent of the first count.
        counts: Values of each exponent from ``low`` on.
        over: Values that are not finite.
    """

    zero: Count
    low: Number
    counts: tuple[Count, ...]
    over: Count


Layers = dict[str, Histogram]


class Part(Result, frozen=True, tag="part"):
    """An eighth of a phase.

    Attributes:
        steps: Steps of the phase so far.
        samples: Samples of the phase so far.
        loss: Mean of the training losses that were finite; None if none was.
        scales: Base-2 logarithm of each layer's scale at the end; "" is the loss.
        skipped: Steps left out because something was not finite.
        overflows: Steps in which a layer was not finite.
        at_any_scale: Steps in which a layer was not finite whatever the scale.
        overflowed_at: Base-2 logarithm of the smallest scale at which a layer overflowed.
        activations: Exponents of the gradients at each layer's output.
        weights: Exponents of the gradients of each layer's weights.
        plain: Exponents of both as they would be without scales, in the phase that finds scales.
        largest: Largest exponent without scales, by kind and layer.
        forward: Steps in which something was not finite in the forward pass, by its cause in words.
    """

    key_fields = ("phase", "part")

    @property
    def place(self) -> tuple[int, int]:
        """In the order of training."""
        return PHASES.index(self.phase), self.part

    phase: PhaseName
    part: Annotated[int, Meta(ge=0, lt=PARTS)]
    steps: Count
    samples: Count
    loss: float | None
    scales: dict[str, float]
    skipped: Count
    overflows: dict[str, Count]
    at_any_scale: dict[str, Count]
    overflowed_at: dict[str, float]
    activations: Layers
    weights: Layers
    plain: dict[str, Layers]
    largest: dict[str, dict[str, float]]
    forward: dict[str, Count] = msgspec.field(default_factory=dict)


class Phase(Result, frozen=True, tag="phase"):
    """Validation loss at the end of a phase; None where it is not finite."""

    key_fields = ("phase",)

    phase: PhaseName
    valid_loss: float | None


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One way of cutting a batch into micro-batches, and the gradient accumulated over them.

    Attributes:
        sizes: Samples of each micro-batch.
        ratio: Norm of the accumulated gradient over that of the whole batch's gradient.
        cosine: Cosine of the angle between them.
        bug: Name of the bug that it is; empty for none.
    """

    name: str
    sizes: tuple[Positive, ...]
    ratio: float
    cosine: float
    bug: str
    words: str


class Accumulation(Result, frozen=True, tag="accumulation"):
    """Gradients of one batch, cut in several ways."""

    key_fields = ()

    cuts: tuple[Cut, ...]


RESULTS = Part | Phase | Accumulation


def layer_title(name: str) -> str:
    """A layer as it is shown; the empty name stands for all that lies outside of the layers."""
    return name or OUTSIDE


def layers_of(parts: Sequence[Part]) -> list[str]:
    """All layers with a gradient, in the order of the model, the loss first."""
    seen = {name for part in parts for kind in KINDS for name in getattr(part, kind)}
    return [name for name in (parts[0].scales if parts else ()) if name in seen]


def check(header: Header, result: Any) -> tuple[str, str] | None:
    """Describes the error of a part that counts a layer's gradients without scales only."""
    for kind in KINDS if isinstance(result, Part) else ():
        alone = result.plain.get(kind, {}).keys() - getattr(result, kind).keys()
        if alone:
            return f"the layers of 'plain' to be among those of {kind!r}", f"{min(alone)!r}"
    return None
