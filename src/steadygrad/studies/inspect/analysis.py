"""Which layers float16 hurts, and which scales prevent it: arithmetic on the counts of a run."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.schema import BEFORE, KINDS, PARTS, PHASES, SEARCH, Part

# float16: exponents of its least subnormal number, its least normal one, and the first too large.
LEAST, NORMAL, OVER = -24, -14, 16
# A layer underflows if more than this share of its gradients is zero or subnormal by the scale.
UNDERFLOW = 0.1
# Binades kept free between the largest gradient seen and overflow, for gradients may grow; and the
# same for the loss scale, whose layers have less room.
HEADROOM, LOSS_HEADROOM = 4, 2
# Binades above the one loss scale within which an overflow limits it.
NEAR = 2
# Weight gradients may underflow inside a layer if more than the first share of them is zero or
# subnormal at any scale, but less than the second share of the gradients at its boundary.
WEIGHTS_LOST, BOUNDARY_LOST = 0.9, 0.5
# Binades by which a layer's own scale must exceed the others' to be proposed.
WORTH = 4
# Exponents of all proposed scales lie within plus and minus this.
MOST = 100

Phases = Mapping[str, Sequence[Part]]
# A layer and a kind.
Place = tuple[str, str]
# Number of values by exponent: zeros have minus infinity, values that are not finite infinity.
Exponents = Counter[float]


def by_phase(results: Results) -> dict[str, Sequence[Part]]:
    """The parts of each phase, in the order of training; of one that is not done none."""
    return {phase: getattr(results.get(schema.Phase, phase), "parts", ()) for phase in PHASES}


def layers_of(*phases: Sequence[Part]) -> list[str]:
    """All layers with a gradient, in the order of the model, the loss first."""
    parts = [*chain(*phases)]
    seen = {name for part in parts for kind in KINDS for name in getattr(part, kind)}
    return [name for name in (parts[0].scales if parts else ()) if name in seen]


def counts_of(phase: Sequence[Part], *, plain: bool = False) -> dict[Place, Exponents]:
    """Each layer's gradients in the second half of a phase; ``plain``: as without scales."""
    settled, found = phase[PARTS // 2 :], {}
    for name, kind in product(layers_of(settled), KINDS):
        held = (part.plain.get(kind, {}) if plain else getattr(part, kind) for part in settled)
        own = Exponents()
        for histogram in (histograms[name] for histograms in held if name in histograms):
            own.update({-math.inf: histogram.zero, math.inf: histogram.over})
            own.update({histogram.low + i: count for i, count in enumerate(histogram.counts)})
        if own:
            found[name, kind] = own
    return found


def within(held: Exponents, low: float, high: float, log2_scale: float = 0.0) -> int:
    """Number of values whose exponent a scale moves to ``low`` or above it, and below ``high``."""
    return sum(count for e, count in held.items() if low <= e + log2_scale < high)


def lost(held: Exponents, log2_scale: float = 0.0) -> int:
    """Number of nonzero values that a scale makes zero or subnormal in float16."""
    return within(held, -math.inf, NORMAL, log2_scale) - held[-math.inf]


def shares_of(phase: Sequence[Part]) -> dict[Place, schema.Shares]:
    """Shares of each layer's gradients that float16 changes, in the second half of a phase."""
    found = {}
    for place, held in counts_of(phase).items():
        total = max(1, held.total())
        found[place] = schema.Shares(
            # From half of the least number on values are rounded to it.
            zero=within(held, -math.inf, LEAST - 1) / total,
            subnormal=within(held, LEAST - 1, NORMAL) / total,
            overflow=(held.total() - within(held, -math.inf, OVER)) / total,
        )
    return found


def diagnose(phases: Phases) -> dict[schema.EffectName, Mapping[str, float]]:
    """Diagnoses float16's effects, and gives the layers of each; the first two phases are done."""
    before, search, after = (phases[phase] for phase in PHASES)
    underflowing, limit = _underflowing(before, search), before[-1].scales[""] + NEAR
    near = {name for part in before for name, at in part.overflowed_at.items() if at <= limit}
    # Steps with an overflow that a smaller scale would have prevented.
    overflows = added_up(before, "overflows") - added_up(before, "at_any_scale")
    limiting = {name: count for name, count in overflows.items() if name in near}
    nonfinite = {**added_up(after, "at_any_scale"), **added_up(before, "at_any_scale")}
    shares = {at: held.lost for at, held in shares_of(search).items()}
    internal = {
        name: share
        for (name, kind), share in shares.items()
        if name and kind == "weights" and share > WEIGHTS_LOST
        if shares.get((name, "activations"), 1.0) < BOUNDARY_LOST
    }
    return {
        "underflowing": underflowing,
        "nonfinite_at_any_scale": nonfinite,
        "regressed": _large(_excess(after, before)),
        "internal_underflow": internal,
        # If nothing underflows, these only brought the scale down from its start, as they should.
        "limiting": limiting if underflowing else {},
    }


def propose(phases: Phases) -> schema.Proposal:
    """Scales that leave headroom above the largest gradient seen in each layer.

    One scale if that is enough: no larger than the one that settled if nothing underflows, and a
    larger one if that prevents the underflow. Otherwise a loss scale for the layers that do not
    underflow, and scales of their own for layers with more room above it, or less. It rests on the
    first two phases.
    """
    before, search = phases[BEFORE], phases[SEARCH]
    underflowing, room = _underflowing(before, search), _room([*before, *search])
    settled, spare = before[-1].scales[""], HEADROOM - LOSS_HEADROOM
    one = _bounded(min(room.values(), default=0) + spare)
    if not underflowing:
        # It is larger only where a layer's gradients were never seen to be finite.
        loss = min(one, _bounded(math.floor(settled)))
        return schema.Proposal(loss_scale=2.0**loss, layer_scales={})
    prevents = (
        one > settled
        and all(at > one for part in before for at in part.overflowed_at.values())
        and _large(_lost_under(search, settled)).keys() >= underflowing.keys()
        and not _large(_lost_under(search, one))
    )
    if prevents:
        return schema.Proposal(loss_scale=2.0**one, layer_scales={})
    # The rest of the model cannot have a scale of its own.
    wide = [log2 for name, log2 in room.items() if not name or name not in underflowing]
    loss = _bounded(min(wide or room.values(), default=0) + spare)
    own = {name: log2 - loss for name, log2 in room.items() if name}
    own = {name: log2 for name, log2 in own.items() if log2 >= WORTH or log2 < -spare}
    scales = {name: 2.0 ** _bounded(log2) for name, log2 in own.items()}
    return schema.Proposal(loss_scale=2.0**loss, layer_scales=scales)


def added_up(phase: Sequence[Part], field: str) -> Counter[str]:
    """Adds up a field of counts."""
    return sum((Counter(getattr(part, field)) for part in phase), Counter())


def _excess(phase: Sequence[Part], other: Sequence[Part]) -> dict[Place, float]:
    """Share of the gradients that is zero or subnormal in one phase, less that in another."""
    less = shares_of(other)
    return {at: held.lost - less[at].lost for at, held in shares_of(phase).items() if at in less}


def _large(shares: Mapping[Place, float]) -> dict[str, float]:
    """The largest share of each layer, where it counts as underflow."""
    found: dict[str, float] = {}
    for (name, _), share in shares.items():
        if share > UNDERFLOW:
            found[name] = max(share, found.get(name, 0.0))
    return found


def _underflowing(before: Sequence[Part], search: Sequence[Part]) -> dict[str, float]:
    """Share of each layer's gradients that underflows by the one scale, where it is large.

    The larger of two: the increase in zero and subnormal values over all values, and, as many may
    be exactly zero, over the nonzero ones. The second is at most what float16 must lose of the
    measured exponents at that scale: more zeros may also come from convergence.
    """
    own, predicted = shares_of(search), _lost_under(search, before[-1].scales[""])
    shares = _excess(before, search)
    for at, more in shares.items():
        relative = more / max(1e-12, 1.0 - own[at].zero)
        shares[at] = max(more, min(relative, predicted.get(at, 0.0)))
    return _large(shares)


def _lost_under(search: Sequence[Part], log2_scale: float) -> dict[Place, float]:
    """Share of the nonzero values that one loss scale makes zero or subnormal, not their own."""
    own, found = counts_of(search), {}
    for at, plain in counts_of(search, plain=True).items():
        nonzero = plain.total() - plain[-math.inf] - plain[math.inf]
        # Subnormal with a scale of its own as well: the exponents are spread that widely.
        found[at] = (lost(plain, log2_scale) - lost(own.get(at, Exponents()))) / max(1, nonzero)
    return found


def _room(parts: Iterable[Part]) -> dict[str, int]:
    """Base-2 logarithm of the largest scale that leaves each layer its headroom."""
    largest: dict[str, float] = {}
    for held in (held for part in parts for held in part.largest.values()):
        for name, exponent in held.items():
            largest[name] = max(exponent, largest.get(name, exponent))
    return {name: int(OVER - 1 - HEADROOM - e) for name, e in largest.items() if math.isfinite(e)}


def _bounded(log2: int) -> int:
    return max(-MOST, min(MOST, log2))
