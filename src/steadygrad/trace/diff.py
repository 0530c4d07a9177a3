"""Finds where two runs part: the first value that differs by more than its inputs explain."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from steadygrad.trace.equations import distance
from steadygrad.trace.passes import signal_of
from steadygrad.trace.runs import FORWARD, Run, Step, Value, size
from steadygrad.trace.sketches import Key

STAGE = {
    "data": "data",
    "start": "weights at the start",
    "input": "forward pass",
    "output": "forward pass",
    "loss": "loss",
    "signal": "backward pass",
    "gradient": "gradient",
    "before": "optimizer's state",
    "state": "optimizer's state",
    "weight": "update",
}
RANDOM = "random state"
# What rounding explains: so many roundings of a value's type, of a type of 16 bits so many, as its
# sums are taken in float32; or so many times what a rounding of the weights was measured to change.
ROUNDINGS, HALF_ROUNDINGS, MEASURED = 32.0, 4.0, 8.0
# What differences of a value's inputs explain: so many times the largest. An optimizer that divides
# by a gradient's size turns its smallest elements around: of an update, so many times the root.
GROWTH, WEIGHTS_GROWTH, ROOT_GROWTH = 32.0, 8.0, 8.0
# A derivative that jumps, as that of a ReLU, or a choice, as a router's, is another one in elements
# that are nearer to the jump than a difference: of a tensor in about its distance's share of them.
# Where that is likelier for one element than this, gradients may differ as by single elements.
RARE = 1e-5
# A distance that is worth a mention.
LEAST = 1e-5
# A distance of single states and updates that rounding explains where it reaches their gradients.
TURNED = 0.5
# How near to a multiple a value is one.
FACTOR = 1e-3
# What is a fault only where it reaches a gradient: loss scales may differ.
SCALED = ("loss", "signal")
OF_PARAMETERS = ("start", "gradient", "before", "state", "weight")


class Place(NamedTuple):
    """A value that both runs have.

    Attributes:
        distance: Relative distance; infinite where one run has no such value, or one that is not
            finite or of another shape.
        allowed: Distance that rounding and the differences of its inputs explain.
        how: The difference in words, where a number does not say it.
        ratio: Norm in B over norm in A.
        certain: Whether rounding was measured, or cannot be the reason.
        known: Whether its inputs were compared.
        module: The module, or that of the parameter.
    """

    step: int
    stage: str
    key: Key
    distance: float
    allowed: float
    how: str = ""
    ratio: float = 1.0
    certain: bool = False
    known: bool = True
    module: str = ""

    @property
    def differs(self) -> bool:
        """Whether rounding and its inputs do not explain it."""
        return self.distance > self.allowed


@dataclass
class Difference:
    """Where two runs part.

    Attributes:
        verdict: ``"same"`` within rounding, ``"part"``, or ``"unknown"``.
        first: The first place that differs.
        steps: All places that were compared, by step, in the order of computation.
        reasons: What else is known of the first place.
        remarks: What was left out, and other differences between the runs.
    """

    verdict: str
    first: Place | None
    steps: dict[int, list[Place]]
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def next(self) -> list[Place]:
        """The next three places that differ, of other modules or stages; unexplained ones first."""
        if self.first is None:
            return []
        places = self.steps[self.first.step]
        later = [x for x in places[places.index(self.first) + 1 :] if x.distance > LEAST]
        found: dict[tuple[str, str], Place] = {}
        for place in sorted(later, key=lambda x: not x.differs):
            found.setdefault((place.stage, place.module), place)
        found.pop((self.first.stage, self.first.module), None)
        return [*found.values()][:3]


def compare(a: Run, b: Run) -> Difference:
    """Compares the steps that both runs have, until they part."""
    found = Difference("same", None, {}, remarks=[*a.remarks, *b.remarks])
    noise = defaultdict[Key, float](float)
    for step in (*a.steps.values(), *b.steps.values()):
        for key, value in step.values.items():
            noise[key] = max(noise[key], value.noise)
    common = [number for number in a.steps if number in b.steps]
    alone = sorted(n for n in {*a.steps} ^ {*b.steps} if common and common[0] < n < common[-1])
    if alone:
        found.remarks.append(f"Steps that one run has alone are not compared, as step {alone[0]}.")
    last: int | None = None
    scale, idle, options = 1.0, list[Place](), list[str]()
    # Where the loss scales were first found to be others.
    since: tuple[Comparison, Place] | None = None
    for number in common:
        one = Comparison(a, b, number, last, noise, scale)
        if (factor := one.undone) != 1:
            since = since or (one, next(x for x in one.places if x.differs))
            scale *= factor
            found.remarks.append(f"From step {number} on B's loss scale is {scale:.4g} times A's.")
            one = Comparison(a, b, number, last, noise, scale)
        found.remarks += one.alone() if last is None else []
        found.steps[number], last = one.places, number
        for place in filter(lambda x: x.differs, one.places):
            is_missing = place.key.kind == "data" and place.how.startswith("missing")
            if (is_missing or (place.key.kind in SCALED and not place.how)) and not one.reaches:
                idle.append(place)
                continue
            if since and place.key.kind == "gradient" and one.is_scaled:
                # What looked like a scale that is undone was only clipped away.
                one, place = since
                found.steps[place.step] = one.places
            found.verdict = "part" if place.known else "unknown"
            found.first, found.reasons = place, one.reasons(place)
            if place.key.kind == "data":
                found.reasons += _given_elsewhere(a, b.steps[number])
            return found
        names = (place.key.name for place in one.places if place.key.kind == "start")
        texts = ((name, one.options(name)) for name in names)
        options += [f"{x[0]} At step {number}, as of {n}." for n, x in texts if x and not options]
    found.remarks += options
    if last is None or all(x.key.kind != "weight" for x in found.steps[last]):
        found.verdict = "unknown"
    bad = (n for n in found.steps for x in (a, b) for v in x.steps[n].values.values() if v.bad)
    if (broken := next(bad, None)) is not None:
        found.remarks.append(f"At step {broken} values are not finite in both runs.")
    for place in idle[:1]:
        where = f"{place.stage} of {place.module or 'the model'}"
        found.remarks.append(
            f"From step {place.step} on the {where} differs, and no gradient does."
        )
    return found


class Comparison:
    """One step of two runs.

    Args:
        a: One run.
        b: The other one.
        number: The step.
        last: The step before it that was compared.
        noise: What a rounding of the weights was measured to change, by name; 0: nothing was.
        scale: B's loss scale over A's.
    """

    def __init__(
        self, a: Run, b: Run, number: int, last: int | None, noise: Mapping[Key, float],
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.steps, self._noise = [a.steps[number], b.steps[number]], noise
        self._last = [{} if last is None else run.steps[last].values for run in (a, b)]
        # Of runs that are traced from one step on nobody knows what was before it.
        self._is_next = (number if last is None else last + 1) == number
        if last is None and min(*a.steps, *b.steps) == number:
            self._is_next = number == 0
        one, other = self.steps
        self._same_cut = (one.passes, one.world) == (other.passes, other.world)
        self._same_random = (one.generators, one.passes) == (other.generators, other.passes)
        self._values, self._scale = _with_inputs_of(self.steps), scale
        self._values[1] = {
            k: replace(v, z=[x / scale for x in v.z], norm=v.norm / scale)
            if k.kind == "signal"
            else v
            for k, v in self._values[1].items()
        }
        self._options = [
            {name: group.options for group in step.options for name in group.parameters}
            for step in self.steps
        ]
        orders = [[k for k in values if k.kind in FORWARD] for values in self._values]
        self._at = {key: i for i, key in enumerate(orders[0])}
        # Of each value what its module was handed, what it can have been made of, and its users.
        self._took = defaultdict[Key, dict[Key, None]](dict)
        self._made = defaultdict[Key, dict[Key, None]](dict)
        self._users = defaultdict[Key, list[Key]](list)
        for values, order in zip(self._values, orders, strict=True):
            frames = list[int]()  # where the module begins whose code each value was given to
            for i, key in enumerate(order):
                own = values[key]
                frames[own.since :] = [max(x, own.since) for x in frames[own.since :]]
                self._took[key] |= dict.fromkeys(order[j] for j in own.took if j < i)
                inner = (order[j] for j, frame in enumerate(frames) if frame == own.since)
                self._made[key] |= self._took[key] | dict.fromkeys(inner)
                frames.append(-1)
        # What is not added up over the batch, where micro-batches or processes are others.
        cuts = [{k: (v.batch, v.count) for k, v in x.items()} for x in self._values]
        both = self._both(*FORWARD) if not self._same_cut else []
        self._uncut = {key for key in both if cuts[0][key] != cuts[1][key]}
        left = self._uncut | {signal_of(key) for key in self._uncut}
        self._values = [{k: v for k, v in x.items() if k not in left} for x in self._values]
        for key in self._both("input", "output"):
            for value in self._made[key]:
                self._users[value].append(key)
        self._outputs = defaultdict[str, list[Key]](list)
        for key in self._both("output"):
            self._outputs[key.name].append(key)
        self._owned = [defaultdict[str, list[str]](list) for _ in self._values]
        for owned, values in zip(self._owned, self._values, strict=True):
            for key in (key for key in values if key.kind == "start"):
                owned[self._module(key.name)].append(key.name)
        types = {v.type for values in self._values for k, v in values.items() if k.kind in FORWARD}
        self._coarsest = max(map(rounding_of, types), default=0.0)
        self._distances, self._roundings = dict[Key, float](), dict[Key, float]()
        self._states = defaultdict[str, list[Key]](list)
        self.places = [
            *map(self._start, self._keys("data")),
            *map(self._start, self._both("start")),
            *map(self._forward, self._both("input", "output")),
            *map(self._loss, self._both("loss")),
            *map(self._signal, self._both("signal")),
            *self._scaled([*map(self._gradient, self._keys("gradient"))]),
            *map(self._start, self._keys("before")),
            *self._common([*map(self._state, self._keys("state"))]),
            *self._common([*map(self._update, self._both("weight"))]),
        ]

    @property
    def reaches(self) -> bool:
        """Whether a gradient differs by more than rounding."""
        return any(self._distances[key] > most for key, most in self._roundings.items())

    @property
    def undone(self) -> float:
        """A factor of B's gradients at outputs that those of weights do not have; 1: none."""
        first = next((x for x in self.places if x.key.kind == "signal"), None)
        if not (first and first.differs and self._is_factor(first.key, first.ratio)):
            return 1.0
        seen = (key for key, most in self._roundings.items() if most < first.distance / 10)
        agree = any(self._distances[key] <= self._roundings[key] for key in seen)
        return first.ratio if agree else 1.0

    @property
    def is_scaled(self) -> bool:
        """Whether most gradients differ, all by one factor."""
        own = [x for x in self.places if x.key.kind == "gradient"]
        apart = [x for x in own if x.differs]
        alike = all(self._is_factor(x.key, apart[0].ratio) for x in apart)
        return alike and 2 * len(apart) > len(own)

    def options(self, name: str) -> list[str]:
        """Options of a weight that differ."""
        one, other = (options.get(name, {}) for options in self._options)
        return [
            f"Its {option} is {one.get(option)} in A, {other.get(option)} in B."
            for option in {**one, **other}
            if one.get(option) != other.get(option)
        ]

    def alone(self) -> list[str]:
        """What is not compared."""
        a, b = ({k.name for k in x if k.kind in ("output", "weight")} for x in self._values)
        texts = [
            f"{len(own)} modules and weights are in {run} alone, such as {max(own)}: not compared."
            for run, own in (("A", a - b), ("B", b - a))
            if own
        ]
        if len(texts) == 2:
            texts.append("If they were renamed: --rename 'OLD=NEW'.")
        if self._uncut:
            texts.append(
                f"{len(self._uncut)} outputs and inputs are not compared: which dimension is the "
                "batch is not known, and micro-batches or processes are others."
            )
        return texts

    def reasons(self, first: Place) -> list[str]:
        """What else is known of the first place that differs."""
        alike = [x for x in self.places if x.differs and x.key[::2] == first.key[::2]]
        found = list[str]()
        if (
            not (first.how or first.key.kind == "weight")
            and self._is_factor(first.key, first.ratio)
            and all(abs(x.ratio / first.ratio - 1) < FACTOR for x in alike)
        ):
            others = ", as those of all that are unexplained" if len(alike) > 1 else ""
            found.append(f"B's is {first.ratio:.4g} times A's{others}.")
        for name, values in zip("AB", self._values, strict=True):
            if not any(key.kind == "gradient" for key in values):
                found.append(
                    f"The optimizer of {name} made no step, as if a scaler had skipped it."
                )
        if first.stage in (STAGE["state"], STAGE["weight"]):
            found += self.options(first.key.name)
        if first.key.kind == "data" and not self._same_random:
            found.append("Random generators are in other states as the step begins.")
        if not first.known:
            found.append("Some of what it was computed from is in one run alone, or not traced.")
        return found

    def _keys(self, kind: str) -> list[Key]:
        """Names of values in either run, of weights in both; in the order of computation."""
        keys = dict.fromkeys(k for values in self._values for k in values if k.kind == kind)
        return self._sorted(
            k for k in keys if kind == "data" or all(self._pair(Key("weight", k.name)))
        )

    def _both(self, *kinds: str) -> list[Key]:
        return self._sorted(k for k in self._values[0] if k.kind in kinds and k in self._values[1])

    def _sorted(self, keys: Iterable[Key]) -> list[Key]:
        first = {key.name: i for key, i in reversed(self._at.items())}

        def place(key: Key) -> tuple[int, bool]:
            if key.kind == "signal":
                return -self._at.get(_value(key), -1), False
            if key.kind not in OF_PARAMETERS:
                return 0, False
            # Of a state its moments before its counter.
            single = any(value.count == 1 for value in self._pair(key) if value)
            return first.get(_owner(key.name), len(first)), single

        return sorted(keys, key=place)

    def _pair(self, key: Key) -> list[Value | None]:
        return [values.get(key) for values in self._values]

    def _module(self, name: str) -> str:
        """The module around a weight that has an output in both runs."""
        return next(x for x in _around(name) if not x or x in self._outputs)

    def _base(self, key: Key) -> float:
        """The distance that rounding explains."""
        types = {value.type for value in self._pair(key) if value}
        if self._noise[key] and len(types) == 1:
            return MEASURED * self._noise[key]
        # Gradients are computed in the coarsest type that a value has, whatever their own.
        coarsest = self._coarsest if key.kind in ("signal", "gradient") else 0.0
        return max(coarsest, min(map(rounding_of, types)))

    def _place(self, key: Key, allowed: float, **known: Any) -> Place:
        one, other = self._pair(key)
        # In another cut gradients at what has no rows are other numbers, of the same sum.
        apart, how = relative(one, other, whole=key.kind not in SCALED or self._same_cut)
        self._distances[key] = apart
        if key.kind == "state":
            self._states[key.name].append(key)
        ratio = other.norm / one.norm if one and other and one.norm else 1.0
        certain = bool(self._noise[key] or how or not allowed)
        module = _owner(key.name) if key.kind in OF_PARAMETERS else key.name
        step, stage = self.steps[0].step, STAGE[key.kind]
        place = Place(step, stage, key, apart, allowed, how, ratio, certain, True, module)
        return place._replace(**known)

    def _most(self, keys: Iterable[Key]) -> float:
        return max((self._distances.get(key, 0.0) for key in keys), default=0.0)

    def _jumps(self, made: Iterable[Key], near: Iterable[Key]) -> float:
        """What single elements beyond a jump change, if it is between these values and those."""
        shares = [0.0]
        jumps = any(value.jumps for key in made for value in self._pair(key) if value)
        for key in (x for x in near if jumps and x.kind in FORWARD and x in self._distances):
            apart = self._distances[key]
            size = max(value.count * value.rows for value in self._pair(key) if value)
            shares += [apart + 1 / size] if apart * size > RARE else []
        return ROOT_GROWTH * math.sqrt(max(shares))

    def _start(self, key: Key) -> Place:
        """What the step begins with; the last step that was compared may explain it."""
        kind = "weight" if key.kind == "start" else "state"
        before = [values.get(key._replace(kind=kind)) for values in self._last]
        # Data are copied, and not computed.
        allowed = self._base(key) / (8 if key.kind == "data" else 1)
        allowed += GROWTH ** (1 if self._is_next else 3) * relative(*before)[0]
        is_new = bool(self._last[0]) and None in before
        known = key.kind == "data" or (self._is_next and not is_new)
        return self._place(key, allowed, known=known)

    def _forward(self, key: Key) -> Place:
        made = self._made[key]
        compared = not made or any(x in self._distances for x in made)
        moved, known = self._moved(key, made)
        allowed = self._base(key) + GROWTH * self._most(made) + moved
        a, b = (values[key] for values in self._values)
        # What one run hands over and the other does not, code around the module has made.
        alone = (x for x in self._took[key] if x.kind == "input" and not all(self._pair(x)))
        module = self._maker(next(alone, key))
        allowed += self._jumps([key], made) if key.kind == "input" else 0.0
        place = self._place(key, allowed, known=known and compared, module=module)
        if a.drew != b.drew:
            return place._replace(how=f"draws random numbers in {'AB'[b.drew]} alone")
        if a.drew and not self._same_random:
            return place._replace(stage=RANDOM, allowed=min(allowed, LEAST))
        if not key.name and a.scalar:
            # A number that the model itself returns: of a micro-batch a mean, or its part of one.
            return place._replace(stage="loss", allowed=allowed if self._same_cut else math.inf)
        return place

    def _loss(self, key: Key) -> Place:
        place = self._place(key, self._base(key) + GROWTH * self._most(self._at))
        is_scaled = self._scale != 1 and abs(place.ratio / self._scale - 1) < FACTOR
        return place._replace(allowed=math.inf) if is_scaled else place

    def _signal(self, key: Key) -> Place:
        """The gradient at a value: from those at what was made of it, by modules' own passes."""
        value = _value(key)
        users = self._users[value]
        sent = [x for x in map(signal_of, users) if x in self._distances]
        near = [value, *users, *(x for user in users for x in self._made[user])]
        apart = max([self._most(near), *(self._moved(user, None)[0] for user in users)])
        # A difference that all rows share grows in their sum, and not in a mean.
        apart *= math.sqrt(max(one.rows for one in self._pair(value) if one))
        allowed = self._base(key) + GROWTH * (self._most(sent) + apart) + self._jumps(users, near)
        if not sent:
            return self._place(key, allowed, stage="loss", module="")
        # Where no module took it, code did.
        takers = [x.name for x in users if value in self._took[x]] or [self._maker(users[0])]
        around = [_around(name) for name in takers]
        module = next(x for x in around[0] if all(x in names for names in around))
        return self._place(key, allowed, module=module)

    def _gradient(self, key: Key) -> Place:
        """Of a parameter: from the signals and values of its module."""
        outputs = self._outputs[self._module(key.name)]
        made = [x for one in outputs for x in self._made[one]]
        # What code of the model itself does with a parameter is not seen.
        near = [*outputs, *made] if outputs else [*self._at]
        signals = [signal_of(x) for x in outputs or near]
        terms = 1.0
        for values in self._values if all(self._pair(key)) else ():
            if raw := values[key].norm * _scale(values):
                # Terms of the sum that cancel are rounded as the largest.
                sent = max(_norms(signals, values), default=raw)
                terms = max(terms, sent * max(_norms(made, values), default=1.0) / raw)
        rounding = self._base(key) * (1.0 if self._noise[key] else terms)
        self._roundings[key] = rounding
        allowed = rounding + GROWTH * terms * self._most([*near, *signals])
        allowed += self._jumps(outputs or near, near)
        return self._place(key, allowed, known=not self._uncut)

    def _scaled(self, places: list[Place]) -> list[Place]:
        """Gradients: where most have one factor, as by clipping, what has another is the reason.

        Where neither are most, nobody knows which ones were changed and which ones only clipped.
        """
        apart = [x for x in places if x.differs]
        ratios = sorted(x.ratio for x in apart if x.distance < math.inf) or [1.0]
        alike = [x for x in apart if self._is_factor(x.key, ratios[len(ratios) // 2])]
        if not len(apart) / 4 < len(alike) < len(apart):
            return places
        if len(alike) >= len(apart) * 3 / 4:
            return [x._replace(allowed=math.inf) if x in alike else x for x in places]
        return [x._replace(known=False) for x in places]

    def _common(self, places: list[Place]) -> list[Place]:
        """States, or updates: single ones may differ where their gradient is rounding alone."""
        parts = Counter(x.key.part for x in places)
        apart = Counter(x.key.part for x in places if x.differs)
        if self._options[0] != self._options[1]:
            return places
        return [
            x._replace(allowed=max(x.allowed, TURNED))
            if 2 * apart[x.key.part] < parts[x.key.part]
            and not x.how
            and self._distances.get(Key("gradient", x.key.name))
            else x
            for x in places
        ]

    def _state(self, key: Key) -> Place:
        given = [key._replace(kind="before"), Key("gradient", key.name)]
        allowed = self._base(key) + ROOT_GROWTH * math.sqrt(self._most(given))
        if any(self._distances.values()):
            # A state with fewer numbers than its weight may be a sum over it, whose terms cancel.
            weight = Key("start", key.name)
            size = max(value.count for value in self._pair(weight) if value)
            own = [v.norm if v and v.count < size else math.inf for v in self._pair(key)]
            terms = [max(_norms([x], *self._values), default=0.0) for x in (given[1], weight)]
            allowed += self._base(key) * math.prod(terms) / (max(own) or math.inf)
        return self._place(key, allowed)

    def _update(self, key: Key) -> Place:
        """Of a weight: from its gradient and the optimizer's states; of a buffer, from outputs."""
        if key.part:
            # A mean may be far smaller than what it is taken of.
            made = [x for one in self._outputs[self._module(key.name)] for x in self._made[one]]
            own = max(values[key].norm for values in self._values) or math.inf
            terms = max([1.0, *(norm / own for norm in _norms(made, *self._values))])
            allowed = terms * (self._base(key) + GROWTH * self._most(self._at))
            return self._place(key, allowed, stage=STAGE["output"])
        start = key._replace(kind="start")
        moves = [_minus(values[key], values.get(start)) for values in self._values]
        moved = max((move.norm for move in moves if move), default=0.0)
        most = max(values[key].norm for values in self._values)
        inputs = [Key("gradient", key.name), *self._states[key.name]]
        allowed = self._base(key) * (most / moved if moved else 1.0)
        allowed += ROOT_GROWTH * math.sqrt(self._most(inputs)) + GROWTH * self._most([start])
        apart, how = relative(*moves)
        return self._place(key, allowed, distance=apart, how=how, certain=bool(how))

    def _maker(self, key: Key) -> str:
        return next(value.maker for value in self._pair(key) if value)

    def _moved(self, key: Key, made: Iterable[Key] | None) -> tuple[float, bool]:
        """What differences of a module's weights change, and whether both runs have all of these.

        The output of a linear layer moves by no more than its weights, times its input; a gradient,
        for which nothing is ``made``, in proportion.
        """
        owners = [key.name] if key.kind == "output" else _around(key.name)
        a, b = ([n for o in owners if o in owned for n in owned[o]] for owned in self._owned)
        starts = [Key("start", name) for name in a]
        norms = [max(_norms([x], *self._values), default=0.0) for x in starts]
        moved = math.hypot(*(self._most([x]) * n for x, n in zip(starts, norms, strict=True)))
        own = math.hypot(*norms)
        if made is not None:
            own = max(_norms([key], *self._values), default=0.0)
            moved *= WEIGHTS_GROWTH * max([1.0, *_norms(made, *self._values)])
        return moved / own if own else 0.0, sorted(a) == sorted(b)

    def _is_factor(self, key: Key, ratio: float) -> bool:
        """Whether one value is a multiple of the other."""
        one, other = self._pair(key)
        if not (one and other and other.norm):
            return False
        scaled = [ratio * x for x in one.z]
        return abs(ratio - 1) > FACTOR and distance(scaled, other.z) < FACTOR * other.norm


def relative(one: Value | None, other: Value | None, *, whole: bool = True) -> tuple[float, str]:
    """Relative distance of two values, and their difference in words where it is another one.

    ``whole``: whether their sizes and norms have to be alike as well.
    """
    if one is None or other is None:
        # A gradient of zeros is as none.
        is_there = any(value.norm or value.bad for value in (one, other) if value)
        return math.inf if is_there else 0.0, "missing in " + ("A" if one is None else "B")
    if one.count != other.count and whole:
        return math.inf, f"{one.count:g} elements in A, {other.count:g} in B"
    if one.bad != other.bad:
        return math.inf, f"not finite in {one.bad} elements in A, {other.bad} in B"
    most = max(one.norm, other.norm)
    apart = max(distance(one.z, other.z), whole * abs(one.norm - other.norm))
    apart = apart / most if most else 0.0
    how = f"{one.type} in A, {other.type} in B" if one.type != other.type else ""
    for name, own, rest in (("A", one, other), ("B", other, one)):
        if own.spread > LEAST > rest.spread:
            apart, how = max(apart, own.spread), f"another one on each process of {name}"
    if most and not (one.norm and other.norm):
        how = "zero in " + ("B" if one.norm else "A")
    return apart, how


def rounding_of(name: str) -> float:
    """The relative distance that rounding explains in a type, by its name; 0: whole numbers."""
    if name in ("uint8", "int8"):
        return HALF_ROUNDINGS * 2.0**-7  # a state of eight bits
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return 0.0
    return torch.finfo(found).eps * (HALF_ROUNDINGS if found.itemsize < 4 else ROUNDINGS)


def _with_inputs_of(steps: Sequence[Step]) -> list[Mapping[Key, Value]]:
    """Values of two steps; inputs of the model with another name in B have A's, in their order."""
    a, b = ([key for key in step.values if key.kind == "data"] for step in steps)
    names = dict(zip((k for k in b if k not in a), (k for k in a if k not in b), strict=False))
    return [steps[0].values, {names.get(k, k): v for k, v in steps[1].values.items()}]


def _given_elsewhere(a: Run, b: Step) -> list[str]:
    """The step at which A's model was given what B's was at another one."""
    given = {key: value for key, value in b.values.items() if key.kind == "data"}
    for number, step in a.steps.items():
        apart = [relative(step.values.get(key), value)[0] for key, value in given.items()]
        if number != b.step and max(apart, default=1.0) < LEAST:
            return [f"A was given the same at step {number}; Trace(start=...) numbers steps."]
    return []


def _norms(keys: Iterable[Key], *runs: Mapping[Key, Value]) -> list[float]:
    """Norms of those that are no whole numbers."""
    found = [values[key] for key in keys for values in runs if key in values]
    return [value.norm for value in found if rounding_of(value.type)]


def _scale(values: Mapping[Key, Value]) -> float:
    """By how much gradients were larger after the backward pass than the optimizer got them."""
    raw = next((key for key in values if key.kind == "raw"), None)
    used = raw and values.get(raw._replace(kind="gradient"))
    return values[raw].norm / used.norm if raw and used and used.norm else 1.0


def _minus(new: Value, old: Value | None) -> Value | None:
    if old is None:
        return None
    z = [x - y for x, y in zip(new.z, old.z, strict=True)]
    return replace(new, z=z, norm=size(z))


def _around(name: str) -> list[str]:
    """The name, and those of the modules around it."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _value(signal: Key) -> Key:
    kind, part = signal.part.split(".", 1)
    return Key(kind, signal.name, part, signal.call)
