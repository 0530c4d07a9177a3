"""Types of ``inspect``: what is chosen and planned, what trials give, and what is concluded."""

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
EffectName = Literal["nonfinite_at_any_scale", "regressed", "internal_underflow", "limiting"]
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

    ``steps`` are optimizer steps of each phase, ``layers`` those that can have a scale of their
    own; ``work`` is the cost of all trials, in samples.
    """

    batch_size: Positive
    steps: Positive
    layers: tuple[str, ...]
    work: Positive

    @property
    def largest_batch(self) -> int:
        """The task's own."""
        return self.batch_size


Header = schema.HeaderOf[Settings, Plan]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values by exponent, from ``low`` on; ``over``: those that are not finite."""

    zero: Count
    low: Annotated[int, Meta(ge=-1 << 62, lt=1 << 62)]
    counts: tuple[Count, ...]
    over: Count


Layers = dict[str, Histogram]


class Part(Result, frozen=True, tag="part"):
    """An eighth of a phase.

    Attributes:
        steps: Steps of the phase so far, and ``samples`` as well.
        loss: Mean of the training losses that were finite; None if none was.
        scales: Base-2 logarithm of each layer's scale at the end; "" is the loss.
        skipped: Steps left out because something was not finite.
        overflows: Steps in which a layer was not finite; ``at_any_scale``: whatever the scale.
        overflowed_at: Base-2 logarithm of the smallest scale at which a layer overflowed.
        activations: Exponents of the gradients at each layer's output; ``weights``: of its weights.
        plain: Exponents of both as they would be without scales, in the phase that finds scales.
        largest: Largest exponent without scales, by kind and layer.
        forward: Steps in which something was not finite in the forward pass, by its cause in words.
    """

    key_fields = ("phase", "part")
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

    @property
    def work(self) -> int:
        """Its share of the samples so far."""
        return self.samples // (self.part + 1)


class Phase(Result, frozen=True, tag="phase"):
    """Validation loss at the end of a phase; None where it is not finite."""

    key_fields = ("phase",)
    phase: PhaseName
    valid_loss: float | None


RESULTS = Part | Phase


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Scales to train with, powers of two; ``code`` is the line of Python that makes the scaler.

    ``loss_scale`` is that of every layer without one of its own, which multiplies it.
    """

    loss_scale: float
    layer_scales: dict[str, float]
    code: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Float16's effect on each layer, by its name; values that become zero or subnormal are lost.

    Attributes:
        underflowing: Share of the gradients lost with one loss scale, and not with one a layer.
        limiting: Number of steps with an overflow, for layers whose overflows keep the loss scale
            too low for the underflowing layers.
        regressed: Share of the gradients lost with the proposed scales, and not with one.
        nonfinite_at_any_scale: Steps of one training with gradients that no scale makes finite.
        internal_underflow: Share of the weight gradients lost at any scale, perhaps inside.
    """

    underflowing: dict[str, float] = {}
    limiting: dict[str, int] = {}
    regressed: dict[str, float] = {}
    nonfinite_at_any_scale: dict[str, int] = {}
    internal_underflow: dict[str, float] = {}


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """A training so far: its last part's mean training loss, and the scale of the loss at the end.

    ``valid_loss``: None where it was not measured or is not finite. ``whole``: all steps are done.
    """

    steps: int
    skipped: int
    loss: float | None
    loss_scale: float
    valid_loss: float | None
    whole: bool


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
    """Layers with a field of the diagnosis: shares of their gradients, or numbers of steps."""

    name: EffectName
    layers: dict[str, float]


Findings = Verdict | Forward | Remedy | Effect


class Summary(schema.Summary, frozen=True, kw_only=True):
    """Content of ``summary.json``.

    Attributes:
        findings: The verdict, then the most important first.
        diagnosis: Empty before two phases can be compared.
        proposal: None before that, and where no gradient was finite.
        phases: ``"before"``, with one loss scale, and ``"after"``, with the proposed; once begun.
        layers: All layers with a gradient, in the order of the model.
    """

    findings: tuple[Findings, ...]
    diagnosis: Diagnosis
    proposal: Proposal | None
    phases: dict[str, Training]
    layers: tuple[Layer, ...]
