"""Which layers float16 hurts, and which scales prevent it: arithmetic on recorded counts."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from steadygrad.formulas.exponents import NONFINITE_BIN, limits
from steadygrad.studies.inspect.histogram import add_up, float16_shares, lost_at
from steadygrad.studies.inspect.schema import (
    AFTER,
    BEFORE,
    KINDS,
    PARTS,
    PHASES,
    SEARCH,
    Part,
    layers_of,
)

__all__ = ["Diagnosis", "Proposal", "by_phase", "diagnose", "propose", "shares_of"]

# A layer underflows if more than this share of its gradients is zero or subnormal by the scale.
UNDERFLOW = 0.1
# Binades kept free between the largest gradient seen and overflow: gradients may grow.
HEADROOM = 4
# The same for the loss scale, whose layers have less room.
LOSS_HEADROOM = 2
# Binades above the one loss scale within which an overflow limits it.
NEAR = 2
# Weight gradients may underflow inside a layer if more than the first share of them is zero or
# subnormal at any scale, but less than the second share of the gradients at its boundary.
WEIGHTS_LOST, BOUNDARY_LOST = 0.9, 0.5
# Binades by which a layer's own scale must exceed the others' to be proposed.
WORTH = 4
# Exponents of all proposed scales lie within plus and minus this.
MOST = 100

Place = tuple[str, str]
"""A layer and a kind."""
Shares = Mapping[Place, Mapping[str, float]]
"""See :func:`float16_shares`."""


@dataclass(frozen=True)
class Proposal:
    """Scales to train with; all are powers of two.

    Attributes:
        loss_scale: Scale of the loss, and so of every layer without one of its own.
        layer_scales: Scales of the layers that need one of their own.
    """

    loss_scale: float
    layer_scales: Mapping[str, float]


@dataclass(frozen=True)
class Diagnosis:
    """Float16's effect on each layer, by its name; values that become zero or subnormal are lost.

    Attributes:
        underflowing: Share of the gradients lost with one loss scale, and not with one a layer.
        limiting: Number of steps with an overflow, for layers whose overflows keep the loss scale
            too low for the underflowing layers.
        regressed: Share of the gradients lost with the proposed scales, and not with one.
        nonfinite_at_any_scale: Steps of one training with gradients that no scale makes finite.
        overflowed_after: Steps with an overflow that a smaller scale than proposed prevents.
        internal_underflow: Share of the weight gradients lost at any scale, perhaps inside.
        forward: Steps of one training whose forward pass was not finite, by the cause in words.
    """

    underflowing: Mapping[str, float]
    limiting: Mapping[str, int]
    regressed: Mapping[str, float]
    nonfinite_at_any_scale: Mapping[str, int]
    overflowed_after: Mapping[str, int]
    internal_underflow: Mapping[str, float]
    forward: Mapping[str, int]

    @property
    def fault(self) -> bool:
        """Whether one loss scale is not enough."""
        return bool(self.forward or self.underflowing or self.nonfinite_at_any_scale)


def diagnose(parts: Iterable[Part]) -> Diagnosis:
    """Diagnoses float16's effect on each layer; parts come in any order, some may be missing."""
    phases = by_phase(parts)
    before, after = phases[BEFORE], phases[AFTER]
    underflowing, limit = _underflowing(before, phases[SEARCH]), _settled_scale(before) + NEAR
    near = {name for part in before for name, at in part.overflowed_at.items() if at <= limit}
    limiting = {name: count for name, count in _overflows(before).items() if name in near}
    return Diagnosis(
        underflowing=underflowing,
        # If nothing underflows, these only brought the scale down from its start, as they should.
        limiting=limiting if underflowing else {},
        regressed=_large(_excess(shares_of(after), shares_of(before))),
        nonfinite_at_any_scale={**_total(after, "at_any_scale"), **_total(before, "at_any_scale")},
        overflowed_after=_overflows(after),
        internal_underflow=_internal_underflow(shares_of(phases[SEARCH])),
        forward={**_total(after, "forward"), **_total(before, "forward")},
    )


def propose(parts: Iterable[Part]) -> Proposal:
    """Scales that leave headroom above the largest gradient seen in each layer.

    One scale if that is enough: no larger than the one that settled if nothing underflows, and a
    larger one if that prevents the underflow. Otherwise a loss scale for the layers that do not
    underflow, and scales of their own for layers with more room above it, or less.

    Args:
        parts: All of the first two phases, in any order; others are ignored.
    """
    phases = by_phase(parts)
    before, search = phases[BEFORE], phases[SEARCH]
    underflowing, room = _underflowing(before, search), _room(before + search)
    settled, spare = _settled_scale(before), HEADROOM - LOSS_HEADROOM
    one = _bounded(min(room.values(), default=0) + spare)
    if not underflowing:
        # It is larger only where a layer's gradients were never seen to be finite.
        return Proposal(2.0 ** min(one, _bounded(math.floor(settled))), {})
    prevents = (
        one > settled
        and all(at > one for part in before for at in part.overflowed_at.values())
        and _large(_lost_under(search, settled)).keys() >= underflowing.keys()
        and not _large(_lost_under(search, one))
    )
    if prevents:
        return Proposal(2.0**one, {})
    # The rest of the model cannot have a scale of its own.
    wide = [log2 for name, log2 in room.items() if not name or name not in underflowing]
    loss = _bounded(min(wide or room.values(), default=0) + spare)
    own = {name: log2 - loss for name, log2 in room.items() if name}
    own = {name: log2 for name, log2 in own.items() if log2 >= WORTH or log2 < -spare}
    return Proposal(2.0**loss, {name: 2.0 ** _bounded(log2) for name, log2 in own.items()})


def by_phase(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """The parts of each phase, in the order of training."""
    ordered = sorted(parts, key=lambda part: part.part)
    return {phase: [part for part in ordered if part.phase == phase] for phase in PHASES}


def shares_of(phase: Sequence[Part]) -> Shares:
    """Shares of each layer's gradients that float16 changes, in the second half of a phase."""
    settled = phase[PARTS // 2 :]
    found = {}
    for name in layers_of(settled):
        for kind in KINDS:
            own = [layers[name] for part in settled if name in (layers := getattr(part, kind))]
            if own:
                found[name, kind] = float16_shares(add_up(own))
    return found


def _settled_scale(before: Sequence[Part]) -> float:
    """Base-2 logarithm of the one loss scale at the end of the first phase."""
    return before[-1].scales[""] if before else 0.0


def _total(phase: Sequence[Part], field: str) -> Counter[str]:
    return sum((Counter(getattr(part, field)) for part in phase), Counter())


def _overflows(phase: Sequence[Part]) -> Mapping[str, int]:
    """Steps in which a layer overflowed that a smaller scale would have prevented."""
    return _total(phase, "overflows") - _total(phase, "at_any_scale")


def _lost(shares: Shares) -> dict[Place, float]:
    """Shares that are zero or subnormal."""
    return {place: held["zero"] + held["subnormal"] for place, held in shares.items()}


def _excess(shares: Shares, other: Shares) -> dict[Place, float]:
    """Share of the gradients that is zero or subnormal in one phase, less that in another."""
    lost, less = _lost(shares), _lost(other)
    return {place: share - less[place] for place, share in lost.items() if place in less}


def _large(shares: Mapping[Place, float]) -> dict[str, float]:
    """The largest share of each layer, where it counts as underflow."""
    found: dict[str, float] = {}
    for (name, _), share in shares.items():
        if share > UNDERFLOW:
            found[name] = max(share, found.get(name, 0.0))
    return found


def _underflowing(before: Sequence[Part], search: Sequence[Part]) -> dict[str, float]:
    """Share of each layer's gradients that underflows by the one scale, where it is large.

    The larger of two rates. The first is the increase in zero and subnormal values over all
    values. In a layer whose gradients are mostly exact zeros that is small, so the second is the
    increase over the nonzero values, but no more than float16 must lose of the measured exponents
    at that scale: more zeros may also come from convergence.
    """
    own = shares_of(search)
    shares = _excess(shares_of(before), own)
    predicted = _lost_under(search, _settled_scale(before))
    for place, lost in shares.items():
        relative = lost / max(1e-12, 1.0 - own[place]["zero"])
        shares[place] = max(lost, min(relative, predicted.get(place, 0.0)))
    return _large(shares)


def _lost_under(search: Sequence[Part], log2_scale: float) -> dict[Place, float]:
    """Share of the nonzero values that are lost under one loss scale, not under a layer's own.

    A lost value becomes zero or subnormal.
    """
    settled = search[PARTS // 2 :]
    found: dict[Place, float] = {}
    for name in layers_of(settled):
        for kind in KINDS:
            own = [part for part in settled if name in part.plain[kind]]
            plain = add_up(part.plain[kind][name] for part in own)
            # Subnormal with a scale of its own as well: the exponents are spread that widely.
            held = lost_at(add_up(getattr(part, kind)[name] for part in own), 0.0)
            there = max(1.0, plain[1:NONFINITE_BIN].sum().item())
            found[name, kind] = (lost_at(plain, log2_scale) - held) / there
    return found


def _internal_underflow(shares: Shares) -> dict[str, float]:
    lost, found = _lost(shares), {}
    for (name, kind), share in lost.items():
        arrives = lost.get((name, "activations"), 1.0) < BOUNDARY_LOST
        if name and kind == "weights" and share > WEIGHTS_LOST and arrives:
            found[name] = share
    return found


def _room(parts: Sequence[Part]) -> dict[str, int]:
    """Base-2 logarithm of the largest scale that leaves each layer its headroom."""
    largest: dict[str, float] = {}
    for part in parts:
        for layers in part.largest.values():
            for name, exponent in layers.items():
                largest[name] = max(exponent, largest.get(name, exponent))
    _, _, over = limits(torch.float16)
    finite = {name: exponent for name, exponent in largest.items() if math.isfinite(exponent)}
    return {name: int(over - 1 - HEADROOM - exponent) for name, exponent in finite.items()}


def _bounded(log2: int) -> int:
    return max(-MOST, min(MOST, log2))
