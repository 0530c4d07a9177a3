"""Which layers float16 hurts, and which scales prevent it: arithmetic on recorded counts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from steadygrad.formulas.exponents import NONFINITE_BIN, limits
from steadygrad.record.schema.inspect import AFTER, BEFORE, KINDS, PARTS, PHASES, SEARCH, Part
from steadygrad.studies.inspect.histogram import add_up, float16_shares, lost_at

__all__ = ["Diagnosis", "Proposal", "diagnose", "in_order", "layers_of", "propose", "shares_of"]

# A layer underflows if more than this share of its gradients is zero or subnormal by the scale.
UNDERFLOW = 0.1
# So that nothing is divided by zero.
LEAST_SHARE = 1e-12
# Binades kept free between the largest gradient seen and overflow: gradients may grow.
HEADROOM = 4
# The same for the loss scale, whose layers have less room.
LOSS_HEADROOM = 2
# An overflow within so many binades above the one loss scale limits it.
NEAR = 2
# Weight gradients may underflow inside a layer if more than the first share of them is zero or
# subnormal at any scale, but less than the second share of the gradients at its boundary.
WEIGHTS_LOST, BOUNDARY_LOST = 0.9, 0.5
# A layer gets a scale of its own if that is larger than the others' by so many binades.
WORTH = 4
# Exponents of all proposed scales lie within plus and minus this.
MOST = 100

Shares = Mapping[str, Mapping[str, Mapping[str, float] | None]]
"""By layer and kind: see :func:`float16_shares`."""


@dataclass(frozen=True)
class Proposal:
    """Scales to train with; all are powers of two.

    Attributes:
        loss_scale: Scale of the loss, and so of every layer without one of its own.
        layer_scales: Scales of the layers that need one of their own.
    """

    loss_scale: float
    layer_scales: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"loss_scale": self.loss_scale, "layer_scales": dict(self.layer_scales)}


@dataclass(frozen=True)
class Diagnosis:
    """What float16 does to each layer, by the layer's name.

    Attributes:
        underflowing: Share of the gradients that become zero or subnormal with one loss scale and
            not with a scale for each layer; see :func:`_underflowing`.
        limiting: Steps with an overflow, of the layers that keep the one loss scale too low for
            those that underflow.
        regressed: Share of the gradients that become zero or subnormal with the proposed scales
            and not with one loss scale.
        nonfinite_at_any_scale: Steps of one training with gradients that no scale makes finite.
        overflowed_after: Steps with an overflow that a smaller scale than the proposed one
            prevents.
        internal_underflow: Share of the weight gradients that is zero or subnormal with scales for
            each layer, too: they may underflow inside the layer.
    """

    underflowing: Mapping[str, float] = field(default_factory=dict)
    limiting: Mapping[str, int] = field(default_factory=dict)
    regressed: Mapping[str, float] = field(default_factory=dict)
    nonfinite_at_any_scale: Mapping[str, int] = field(default_factory=dict)
    overflowed_after: Mapping[str, int] = field(default_factory=dict)
    internal_underflow: Mapping[str, float] = field(default_factory=dict)

    @property
    def fault(self) -> bool:
        """Whether one loss scale is not enough."""
        return bool(self.underflowing or self.nonfinite_at_any_scale)


def in_order(parts: Iterable[Part]) -> list[Part]:
    """The parts in the order of training, phase by phase."""
    return sorted(parts, key=lambda part: (PHASES.index(part.phase), part.part))


def _of(parts: Sequence[Part], phase: str, settled: bool = False) -> list[Part]:
    first = PARTS // 2 if settled else 0
    return [part for part in parts if part.phase == phase and part.part >= first]


def layers_of(parts: Sequence[Part]) -> list[str]:
    """All layers with a gradient, in the order of the model, the loss first."""
    seen = {name for part in parts for kind in KINDS for name in getattr(part, kind)}
    return [name for name in (parts[0].scales if parts else ()) if name in seen]


def shares_of(parts: Sequence[Part], phase: str) -> Shares:
    """What became of each layer's gradients in float16 in the second half of a phase."""
    settled = _of(parts, phase, settled=True)
    return {
        name: {
            kind: float16_shares(
                add_up(getattr(part, kind)[name] for part in settled if name in getattr(part, kind))
            )
            for kind in KINDS
        }
        for name in layers_of(settled)
    }


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def _overflows(parts: Sequence[Part]) -> dict[str, int]:
    """Steps in which a layer overflowed that a smaller scale would have prevented."""
    nonfinite = _sum(part.at_any_scale for part in parts)
    overflows = _sum(part.overflows for part in parts)
    left = {name: count - nonfinite.get(name, 0) for name, count in overflows.items()}
    return {name: count for name, count in left.items() if count > 0}


def _excess(
    parts: Sequence[Part], phase: str, than: str
) -> Iterator[tuple[str, str, float, float]]:
    """How much more of the gradients is zero or subnormal in one phase than in another.

    Yields:
        Layer, kind, the share of all values, and the share of those not zero in the other phase.
    """
    held, other = shares_of(parts, phase), shares_of(parts, than)
    for name in held:
        for kind in KINDS:
            mine, others = held[name][kind], other.get(name, {}).get(kind)
            if mine is not None and others is not None:
                lost = _lost(mine) - _lost(others)
                yield name, kind, lost, lost / max(LEAST_SHARE, 1.0 - others["zero"])


def _large(shares: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The largest share of each layer, where it counts as underflow."""
    found: dict[str, float] = {}
    for name, share in shares:
        if share > UNDERFLOW:
            found[name] = max(share, found.get(name, 0.0))
    return found


def _lost(held: Mapping[str, float]) -> float:
    return held["zero"] + held["subnormal"]


def _settled(parts: Sequence[Part]) -> float:
    """Base-2 logarithm of the one loss scale at the end of the first phase."""
    before = _of(parts, BEFORE)
    return before[-1].scales[""] if before else 0.0


def _lost_under(parts: Sequence[Part], log2_scale: float) -> dict[tuple[str, str], float]:
    """What one loss scale takes of the gradients that scales for each layer keep.

    Returns:
        For each layer and kind the share of values other than zero that become zero or subnormal.
    """
    settled = _of(parts, SEARCH, settled=True)
    found: dict[tuple[str, str], float] = {}
    for name in layers_of(settled):
        for kind in KINDS:
            own = [part for part in settled if name in part.plain[kind]]
            plain = add_up(part.plain[kind][name] for part in own)
            # Subnormal with a scale of its own as well: the exponents are spread that widely.
            held = lost_at(add_up(getattr(part, kind)[name] for part in own), 0.0)
            there = max(1.0, plain[1:NONFINITE_BIN].sum().item())
            found[name, kind] = (lost_at(plain, log2_scale) - held) / there
    return found


def _underflowing(parts: Sequence[Part]) -> dict[str, float]:
    """Share of each layer's gradients that underflows by the one scale, where it is large.

    The larger of two rates. The first is the increase in zero and subnormal values over all
    values. In a layer whose gradients are mostly exact zeros that is small, so the second is the
    increase over the nonzero values, but no more than float16 must lose of the measured exponents
    at that scale: more zeros may also come from convergence.
    """
    predicted = _lost_under(parts, _settled(parts))
    return _large(
        (name, max(lost, min(relative, predicted.get((name, kind), 0.0))))
        for name, kind, lost, relative in _excess(parts, BEFORE, SEARCH)
    )


def diagnose(parts: Sequence[Part]) -> Diagnosis:
    """Says what float16 does to each layer.

    Args:
        parts: In order; of an unfinished phase, those that are there.
    """
    underflowing, before, after = _underflowing(parts), _of(parts, BEFORE), _of(parts, AFTER)
    limit = _settled(parts) + NEAR
    near = {name for part in before for name, at in part.overflowed_at.items() if at <= limit}
    return Diagnosis(
        underflowing=underflowing,
        # If nothing underflows, these only brought the scale down from its start, as they should.
        limiting={name: count for name, count in _overflows(before).items() if name in near}
        if underflowing
        else {},
        regressed=_large((name, lost) for name, _, lost, _ in _excess(parts, AFTER, BEFORE)),
        nonfinite_at_any_scale={
            **_sum(part.at_any_scale for part in after),
            **_sum(part.at_any_scale for part in before),
        },
        overflowed_after=_overflows(after),
        internal_underflow=_internal_underflow(parts),
    )


def _internal_underflow(parts: Sequence[Part]) -> dict[str, float]:
    found = {}
    for name, held in shares_of(parts, SEARCH).items():
        weights, activations = held["weights"], held["activations"]
        if name and weights is not None and activations is not None:
            lost = _lost(weights)
            if lost > WEIGHTS_LOST and _lost(activations) < BOUNDARY_LOST:
                found[name] = lost
    return found


def propose(parts: Iterable[Part]) -> Proposal:
    """Scales that leave headroom above the largest gradient seen in each layer.

    Args:
        parts: All of the first two phases, in any order; others are ignored.

    Returns:
        One scale if that is enough: no larger than the one that settled if nothing underflows, and
        a larger one if that prevents the underflow. Otherwise a loss scale for the layers that do
        not underflow, and scales of their own for layers with more room above it, or less.
    """
    parts = in_order(part for part in parts if part.phase != AFTER)
    underflowing, room, settled = _underflowing(parts), _room(parts), _settled(parts)
    spare = HEADROOM - LOSS_HEADROOM
    one = _bounded(min(room.values(), default=0) + spare)
    if not underflowing:
        # It is larger only where a layer's gradients were never seen to be finite.
        return Proposal(2.0 ** min(one, _bounded(math.floor(settled))), {})
    if one > settled and _is_enough(parts, underflowing, one):
        return Proposal(2.0**one, {})
    # The rest of the model cannot have a scale of its own.
    wide = [log2 for name, log2 in room.items() if not name or name not in underflowing]
    loss = _bounded(min(wide or room.values(), default=0) + spare)
    own = {name: log2 - loss for name, log2 in room.items() if name}
    own = {name: log2 for name, log2 in own.items() if log2 >= WORTH or log2 < -spare}
    return Proposal(2.0**loss, {name: 2.0 ** _bounded(log2) for name, log2 in own.items()})


def _is_enough(parts: Sequence[Part], underflowing: Mapping[str, float], one: int) -> bool:
    """Whether one larger scale is known to prevent the underflow."""
    now = _large((name, share) for (name, _), share in _lost_under(parts, _settled(parts)).items())
    overflowed = [at for part in _of(parts, BEFORE) for at in part.overflowed_at.values()]
    return (
        all(at > one for at in overflowed)
        and all(name in now for name in underflowing)
        and max(_lost_under(parts, one).values()) <= UNDERFLOW
    )


def _room(parts: Sequence[Part]) -> dict[str, int]:
    """Base-2 logarithm of the largest scale that leaves each layer its headroom."""
    _, _, over = limits(torch.float16)
    largest: dict[str, float] = {}
    for part in parts:
        for kind in KINDS:
            for name, exponent in part.largest[kind].items():
                largest[name] = max(largest.get(name, -math.inf), exponent)
    finite = {name: exponent for name, exponent in largest.items() if math.isfinite(exponent)}
    return {name: int(over - 1 - HEADROOM - exponent) for name, exponent in finite.items()}


def _bounded(log2: int) -> int:
    return max(-MOST, min(MOST, log2))
