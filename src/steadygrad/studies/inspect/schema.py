"""Types of ``inspect``: what is chosen and planned, what trials give, and what is concluded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from steadygrad.studies import schema
from steadygrad.studies.schema import Count, Finding, Positive, Result

BEFORE, SEARCH, AFTER = PHASES = "before", "search", "after"
TITLES = {BEFORE: "one loss scale", SEARCH: "finding scales", AFTER: "the proposed scales"}
# Parts of a phase. The second half of them counts, when the phase's scales have settled.
PARTS = 8
KINDS = ("activations", "weights")
# Steps of a phase where none are given, at most and at least.
STEPS, LEAST_STEPS = 200, 16
PhaseName = Literal["before", "search", "after"]
VerdictName = Literal["enough", "higher", "layers", "spread", "zero", "unseen", "unmeasured"]
EffectName = Literal[
    "underflowing", "nonfinite_at_any_scale", "regressed", "internal_underflow", "limiting"
]
LossName = Literal["lower", "not lower", "unknown"]
ABOUT_STEPS = (
    "Optimizer steps with one loss scale; as many find scales, and as many try those proposed. "
    f"Default: {STEPS}, or as many as the budget has time for."
)

# For `--help`.
EXAMPLE = "steadygrad inspect digits-deep --steps 400"


@dataclass(frozen=True, kw_only=True)
class Settings(schema.CommonSettings):
    """Settings of ``steadygrad inspect``."""

    steps: Annotated[int, Meta(ge=LEAST_STEPS, le=1 << 40, description=ABOUT_STEPS)] | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of work, fixed before the first trial.

    ``steps`` are optimizer steps of each phase; ``work`` is the cost of all trials, in samples;
    ``largest_batch`` is the task's own.
    """

    largest_batch: Positive
    steps: Positive
    work: Positive


Header = schema.HeaderOf[Settings, Plan]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values by exponent, from ``low`` on; ``over``: those that are not finite."""

    zero: Count
    low: Annotated[int, Meta(ge=-1 << 62, lt=1 << 62)]
    counts: tuple[Count, ...]
    over: Count


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """An eighth of a phase."""

    steps: Count  # steps of the phase so far
    loss: float | None  # mean of the training losses that were finite; None if none was
    scales: dict[str, float]  # base-2 logarithm of each layer's scale at the end; "" is the loss
    skipped: Count  # steps left out because something was not finite
    # Steps in which a layer was not finite; `at_any_scale`: whatever the scale.
    overflows: dict[str, Count]
    at_any_scale: dict[str, Count]
    # Base-2 logarithm of the smallest scale at which a layer overflowed.
    overflowed_at: dict[str, float]
    # Exponents of the gradients at each layer's output; `weights`: of its weights.
    activations: dict[str, Histogram]
    weights: dict[str, Histogram]
    # Exponents of both as they would be without scales, in the phase that finds scales.
    plain: dict[str, dict[str, Histogram]]
    largest: dict[str, dict[str, float]]  # largest exponent without scales, by kind and layer
    # Steps in which something was not finite in the forward pass, by its cause in words.
    forward: dict[str, Count] = {}


class Phase(Result, frozen=True, tag="phase"):
    """A training, and its validation loss; None where it is not finite, or scales were searched."""

    key_fields = ("phase",)
    phase: PhaseName
    parts: Annotated[tuple[Part, ...], Meta(min_length=PARTS, max_length=PARTS)]
    valid_loss: float | None


RESULTS = Phase


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Scales to train with, powers of two; ``code`` is the line of Python that makes the scaler.

    ``loss_scale`` is that of every layer without one of its own, which multiplies it.
    """

    loss_scale: float
    layer_scales: dict[str, float]
    code: str = ""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a training: its last part's mean training loss, and the scale of the loss.

    ``valid_loss``: None where it is not finite.
    """

    steps: int
    skipped: int
    loss: float | None
    loss_scale: float
    valid_loss: float | None


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of scaled gradients that float16 changes; flushed values are zero."""

    zero: float
    subnormal: float
    overflow: float

    @property
    def lost(self) -> float:
        """Share that is zero or subnormal."""
        return self.zero + self.subnormal


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Shares once the scales have settled; steps with an overflow from the beginning."""

    activations: Shares | None
    weights: Shares | None
    overflows: int


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer with one loss scale, and with the proposed scales; "" is all outside of layers."""

    name: str
    before: Seen
    after: Seen


class Verdict(Finding, frozen=True, tag="verdict"):
    """The kind of answer.

    ``verdict``: one loss scale is ``"enough"``; it is if it starts ``"higher"``; ``"layers"`` need
    scales of their own; exponents are too widely ``"spread"`` for any; the loss is ``"zero"``; all
    gradients are ``"unseen"``, for no step was finite; or two phases are not yet measured.
    """

    verdict: VerdictName


class Forward(Finding, frozen=True, tag="forward"):
    """Steps, of all of a training's, whose forward pass was not finite, by cause."""

    causes: dict[str, int]
    count: int
    steps: int


class Remedy(Finding, frozen=True, tag="remedy"):
    """The proposed scales, and their validation loss beside that of one loss scale."""

    loss: LossName


class Effect(Finding, frozen=True, tag="effect"):
    """An effect of float16 on some layers; values that become zero or subnormal are lost.

    ``name`` tells what the numbers of ``layers`` are.

    ``"underflowing"``: share of the gradients lost with one loss scale, and not with one a layer.
    ``"nonfinite_at_any_scale"``: steps of one training with gradients that no scale makes finite.
    ``"regressed"``: share of the gradients lost with the proposed scales, and not with one.
    ``"internal_underflow"``: share of the weight gradients lost at any scale, perhaps inside.
    ``"limiting"``: steps with an overflow, of layers whose overflows keep the loss scale too low
    for the underflowing ones.
    """

    name: EffectName
    layers: Mapping[str, float]


Findings = Verdict | Forward | Remedy | Effect


class Summary(schema.Summary, frozen=True, kw_only=True):
    """Content of ``summary.json``."""

    findings: tuple[Findings, ...]  # the verdict, then the most important first
    # None before two phases can be compared, and where no gradient was finite.
    proposal: Proposal | None
    # "before", with one loss scale, and "after", with the proposed; once done.
    phases: dict[str, Trained]
    layers: tuple[Layer, ...]  # all layers with a gradient, in the order of the model

    def effect(self, name: EffectName) -> Mapping[str, float]:
        """The layers of an effect; empty where there is none."""
        effects = [found for found in self.findings if isinstance(found, Effect)]
        return next((found.layers for found in effects if found.name == name), {})
