"""Which layers are at fault, and which scales would mend it: arithmetic on recorded counts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from steadygrad.formulas.exponents import NONFINITE_BIN, limits
from steadygrad.studies.inspect.plan import AFTER, BEFORE, PARTS, SEARCH
from steadygrad.studies.inspect.tally import KINDS, add_up, lost_at, plain_shares

__all__ = ["Proposal", "Verdict", "judge", "layers_of", "propose", "shares_of"]

# A layer starves if so large a share of its gradients vanishes or loses digits by the scale alone.
STARVED = 0.1
# So that nothing is divided by zero.
LEAST_SHARE = 1e-12
# Binades to be left free between the largest gradient seen and overflow: gradients may grow.
HEADROOM = 4
# The same for the loss's scale, whose layers have less room for it.
LOSS_HEADROOM = 2
# Who overflowed within so many binades above the one scale is what holds it down.
NEAR = 2
# A layer keeps little if so much of its weights' gradients vanishes at any scale, though no more
# than half of those that come to it do.
HARDLY_ANY = 0.9
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
            scale, and is not with a scale for each layer; see :func:`_starving`.
        ceiling: Layers that overflowed little above the one scale that is left, which is too low
            for these, and how often they overflowed.
        price: By how large a share of their gradients became zero or subnormal at the scales
            proposed, and was not with one loss scale.
        broken: Layers that made values that are not finite at any scale, and in how many steps of
            one training they did.
        spilled: Layers that overflowed at the scales proposed because these are too large, and how
            often.
        inside: Layers whose weights' gradients are hardly ever normal numbers, also with scales of
            their own, and the share of those that are zero or subnormal: they may be lost inside.
    """

    starved: Mapping[str, float] = field(default_factory=dict)
    ceiling: Mapping[str, int] = field(default_factory=dict)
    price: Mapping[str, float] = field(default_factory=dict)
    broken: Mapping[str, int] = field(default_factory=dict)
    spilled: Mapping[str, int] = field(default_factory=dict)
    inside: Mapping[str, float] = field(default_factory=dict)

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


def _times(parts: Sequence[Event], what: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in parts:
        for name, count in event[what].items():
            found[name] = found.get(name, 0) + count
    return found


def _overflows(parts: Sequence[Event]) -> dict[str, int]:
    """How often layers overflowed as they would not have at a smaller scale."""
    hopeless = _times(parts, "at_any_scale")
    left = {n: c - hopeless.get(n, 0) for n, c in _times(parts, "overflows").items()}
    return {name: count for name, count in left.items() if count > 0}


def _beyond(
    parts: Sequence[Event], phase: str, than: str
) -> Iterator[tuple[str, str, float, float]]:
    """What float16 takes in one phase beyond what it does in another.

    Yields:
        Layer, kind, the share of all values, and that of the values other than zero in the other.
    """
    held, other = shares_of(parts, phase), shares_of(parts, than)
    for name in held:
        for kind in KINDS:
            mine, others = held[name][kind], other.get(name, {}).get(kind)
            if mine is not None and others is not None:
                lost = _lost(mine) - _lost(others)
                yield name, kind, lost, lost / max(LEAST_SHARE, 1.0 - others["zero"])


def _large(shares: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The largest share of each layer, where it is too large."""
    found: dict[str, float] = {}
    for name, share in shares:
        if share > STARVED:
            found[name] = max(share, found.get(name, 0.0))
    return found


def _lost(held: Mapping[str, float]) -> float:
    return held["zero"] + held["subnormal"]


def _settled(parts: Sequence[Event]) -> float:
    """Base-2 logarithm of the one loss scale at the end of the first phase."""
    before = _of(parts, BEFORE)
    return float(before[-1]["scales"][""]) if before else 0.0


def _lost_under(parts: Sequence[Event], log2_scale: float) -> dict[tuple[str, str], float]:
    """What one loss scale takes of the gradients that are there with a scale for each layer.

    Returns:
        For each layer and kind the share of values other than zero that become zero or subnormal.
    """
    settled = _of(parts, SEARCH, settled=True)
    found: dict[tuple[str, str], float] = {}
    for name in layers_of(settled):
        for kind in KINDS:
            own = [event for event in settled if name in event["plain"][kind]]
            plain = add_up(event["plain"][kind][name] for event in own)
            # Subnormal with a scale of its own as well: the exponents are spread that widely.
            held = lost_at(add_up(event[kind][name] for event in own), 0.0)
            there = max(1.0, plain[1:NONFINITE_BIN].sum().item())
            lost = (lost_at(plain, log2_scale) - held) / there
            found[name, kind] = lost
    return found


def _starving(parts: Sequence[Event]) -> dict[str, float]:
    """Share that each layer loses by the one scale, where it is large.

    Of all values: what is zero or subnormal with one scale, beyond what is with a scale for each
    layer. Few values among many zeros do not weigh there; so of those that are not zero as well, as
    far as float16 would lose them at that scale: that more become zero may be convergence.
    """
    foretold = _lost_under(parts, _settled(parts))
    return _large(
        (name, max(lost, min(relative, foretold.get((name, kind), 0.0))))
        for name, kind, lost, relative in _beyond(parts, BEFORE, SEARCH)
    )


def judge(parts: Sequence[Event]) -> Verdict:
    """Says who is at fault.

    Args:
        parts: The ``part`` events; of phases that are not whole, those there are.
    """
    starved, before, after = _starving(parts), _of(parts, BEFORE), _of(parts, AFTER)
    limit = _settled(parts) + NEAR
    near = {n for event in before for n, at in event["overflowed_at"].items() if at <= limit}
    broken = _times(before, "at_any_scale")
    return Verdict(
        starved=starved,
        # Without hunger these are the way a scale comes down at the beginning, as it should.
        ceiling={n: c for n, c in _overflows(before).items() if n in near} if starved else {},
        price=_large((name, lost) for name, _, lost, _ in _beyond(parts, AFTER, BEFORE)),
        broken={**_times(after, "at_any_scale"), **broken},
        spilled=_overflows(after),
        inside=_lost_inside(parts),
    )


def _lost_inside(parts: Sequence[Event]) -> dict[str, float]:
    found = {}
    for name, held in shares_of(parts, SEARCH).items():
        weights, activations = held["weights"], held["activations"]
        if name and weights is not None and activations is not None:
            lost = _lost(weights)
            if lost > HARDLY_ANY and _lost(activations) < 0.5:
                found[name] = lost
    return found


def propose(parts: Sequence[Event], settled: float) -> Proposal:
    """Scales that leave headroom above the largest gradient that was seen in each layer.

    Args:
        parts: The ``part`` events of the first two phases.
        settled: The one loss scale at the end of the first phase.

    Returns:
        One scale, if that is enough: no larger than ``settled`` where nothing starves, larger
        where that mends it. Otherwise one for the layers that do not starve, and others where a
        layer has room for more than the headroom above it, or for less.
    """
    starved, room = _starving(parts), _room(parts)
    spare = HEADROOM - LOSS_HEADROOM
    one = _bounded(min(room.values(), default=0) + spare)
    if not starved:
        # Only where a layer's gradients were never seen to be finite is it larger.
        return Proposal(2.0 ** min(one, _bounded(math.floor(math.log2(settled)))), {})
    if one > math.log2(settled) and _mends(parts, starved, one):
        return Proposal(2.0**one, {})
    # What lies outside of the layers cannot have a scale of its own.
    wide = [log2 for name, log2 in room.items() if not name or name not in starved]
    loss = _bounded(min(wide or room.values(), default=0) + spare)
    own = {n: log2 - loss for n, log2 in room.items() if n}
    own = {n: k for n, k in own.items() if k >= WORTH or k < -spare}
    return Proposal(2.0**loss, {n: 2.0 ** _bounded(k) for n, k in own.items()})


def _mends(parts: Sequence[Event], starved: Mapping[str, float], one: int) -> bool:
    """Whether one larger scale is known to be enough."""
    now = _large((name, share) for (name, _), share in _lost_under(parts, _settled(parts)).items())
    then = _lost_under(parts, one)
    overflowed = [at for event in _of(parts, BEFORE) for at in event["overflowed_at"].values()]
    return (
        all(at > one for at in overflowed)
        and all(name in now for name in starved)
        and max(then.values()) <= STARVED
    )


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
