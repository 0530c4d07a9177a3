"""Which layers are at fault, and which scales would mend it: arithmetic on recorded counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from steadygrad.formulas.exponents import limits
from steadygrad.studies.inspect.plan import AFTER, BEFORE, PARTS, SEARCH
from steadygrad.studies.inspect.tally import KINDS, add_up, plain_shares

__all__ = ["Proposal", "Verdict", "judge", "layers_of", "propose", "shares_of"]

# A layer starves if so large a share of its gradients vanishes or loses digits by the scale alone.
STARVED = 0.1
# Binades to be left free between the largest gradient seen and overflow: gradients may grow.
HEADROOM = 4
# The same for the loss's scale, whose layers have less room for it.
LOSS_HEADROOM = 2
# A layer gets a scale of its own where it has room for so many binades more than the others.
WORTH = 4

Event = Mapping[str, Any]
Shares = Mapping[str, Mapping[str, Mapping[str, float] | None]]
"""By layer and kind: see :func:`plain_shares`."""


@dataclass(frozen=True)
class Proposal:
    """Scales to train with; all powers of two.

    Attributes:
        loss_scale: Of the loss, and so of every layer that has none of its own.
        layer_scales: The own scales of those that need one.
    """

    loss_scale: float
    layer_scales: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """Who is at fault; names of layers.

    Attributes:
        starved: By how large a share of their gradients became zero or subnormal with one loss
            scale, and is not with a scale for each layer.
        ceiling: Layers whose overflow keeps the one scale too low for these, and how often they
            overflowed.
        price: By how large a share of their gradients became zero or subnormal at the scales
            proposed, and was not with one loss scale.
        broken: Layers that overflow with one scale and at the scales proposed, and how often they
            did at the latter.
    """

    starved: Mapping[str, float] = field(default_factory=dict)
    ceiling: Mapping[str, int] = field(default_factory=dict)
    price: Mapping[str, float] = field(default_factory=dict)
    broken: Mapping[str, int] = field(default_factory=dict)

    @property
    def fault(self) -> bool:
        """Whether anything is."""
        return bool(self.starved or self.broken)


def _of(parts: Sequence[Event], phase: str, settled: bool = False) -> list[Event]:
    first = PARTS // 2 if settled else 0
    return [event for event in parts if event["phase"] == phase and event["part"] >= first]


def layers_of(parts: Sequence[Event]) -> list[str]:
    """All layers in which a gradient was seen, in the order of the model, the loss first."""
    seen = {name for event in parts for kind in KINDS for name in event[kind]}
    return [name for name in (parts[0]["scales"] if parts else ()) if name in seen]


def shares_of(parts: Sequence[Event], phase: str) -> Shares:
    """What float16 held of each layer's gradients in the second half of a phase."""
    settled = _of(parts, phase, settled=True)
    return {
        name: {
            kind: plain_shares(
                add_up(event[kind][name] for event in settled if name in event[kind])
            )
            for kind in KINDS
        }
        for name in layers_of(settled)
    }


def _overflows(parts: Sequence[Event]) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in parts:
        for name, count in event["overflows"].items():
            found[name] = found.get(name, 0) + count
    return found


def _loses(parts: Sequence[Event], phase: str, than: str) -> dict[str, float]:
    """Share that a layer loses in one phase beyond that in another, where it is large."""
    held, other = shares_of(parts, phase), shares_of(parts, than)
    found = {}
    for name in held:
        lost = 0.0
        for kind in KINDS:
            mine, other_s = held[name][kind], other.get(name, {}).get(kind)
            if mine is not None and other_s is not None:
                lost = max(lost, _lost(mine) - _lost(other_s))
        if lost > STARVED:
            found[name] = lost
    return found


def _lost(held: Mapping[str, float]) -> float:
    return held["zero"] + held["subnormal"]


def judge(parts: Sequence[Event]) -> Verdict:
    """Says who is at fault.

    Args:
        parts: The ``part`` events; of phases that are not whole, those there are.
    """
    starved = _loses(parts, BEFORE, SEARCH)
    overflowed = _overflows(_of(parts, BEFORE))
    return Verdict(
        starved=starved,
        # Without hunger these are the way a scale comes down at the beginning, as it should.
        ceiling={n: c for n, c in overflowed.items() if n not in starved} if starved else {},
        price=_loses(parts, AFTER, BEFORE),
        broken={n: c for n, c in _overflows(_of(parts, AFTER)).items() if n in overflowed},
    )


def propose(parts: Sequence[Event], settled: float) -> Proposal:
    """Scales that leave headroom above the largest gradient that was seen in each layer.

    Args:
        parts: The ``part`` events of the first two phases.
        settled: The one loss scale at the end of the first phase.

    Returns:
        One scale, if that is enough: no larger than ``settled``. Otherwise one for the layers
        that do not starve, and others where a layer has room for more than the headroom above it.
    """
    starved = _loses(parts, BEFORE, SEARCH)
    room = _room(parts)
    wide = {name: log2 for name, log2 in room.items() if name not in starved} or room
    loss = min(wide.values(), default=0) + HEADROOM - LOSS_HEADROOM
    if not starved:
        # Only where a layer's gradients were never seen to be finite is it larger.
        return Proposal(2.0 ** _bounded(min(loss, math.floor(math.log2(settled)))), {})
    own = {n: log2 - loss for n, log2 in room.items() if n and log2 - loss >= WORTH}
    return Proposal(2.0 ** _bounded(loss), {n: 2.0 ** _bounded(k) for n, k in own.items()})


def _room(parts: Sequence[Event]) -> dict[str, int]:
    """Base-2 logarithm of the largest scale that leaves each layer its headroom."""
    _, _, over = limits(torch.float16)
    largest: dict[str, float] = {}
    for event in parts:
        for kind in KINDS:
            for name, exponent in event["largest"][kind].items():
                largest[name] = max(largest.get(name, -math.inf), exponent)
    found = {name: e for name, e in largest.items() if math.isfinite(e)}
    return {name: int(over - 1 - HEADROOM - exponent) for name, exponent in found.items()}


def _bounded(log2: int) -> int:
    return max(-100, min(100, log2))
