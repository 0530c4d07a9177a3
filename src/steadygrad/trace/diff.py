"""Finds where two runs part: the first value that differs by more than its inputs explain."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from steadygrad.trace.equations import distance
from steadygrad.trace.passes import signal_of
from steadygrad.trace.runs import FORWARD, Run, Value
from steadygrad.trace.sketches import Key

__all__ = ["Difference", "Place", "compare"]

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
# A distance that is worth a mention.
LEAST = 1e-5
# A distance of single states and updates that rounding explains where it reaches their gradients.
TURNED = 0.5
# How near to a multiple a value is one.
FACTOR = 1e-3
# What is a fault only where it reaches a gradient: loss scales may differ.
SCALED = ("loss", "signal")
OF_PARAMETERS = ("start", "gradient", "before", "state", "weight")
INPUTS_OF_UPDATE = ("gradient", "state")


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
    last: int | None = None
    # Values that differed and reached no gradient, so far.
    idle: dict[tuple[str, str], tuple[Comparison, Place]] = {}
    for number in (n for n in a.steps if n in b.steps):
        one = Comparison(a, b, number, last, noise)
        found.remarks += one.alone() if last is None else []
        found.steps[number], last = one.places, number
        for place in filter(lambda x: x.differs, one.places):
            since, first = idle.setdefault((place.stage, place.module), (one, place))
            if place.key.kind in SCALED and not (place.how or one.reaches):
                continue
            found.verdict = "part" if first.known else "unknown"
            found.first, found.reasons = first, since.reasons(first)
            return found
    if last is None:
        found.verdict = "unknown"
    for _, place in [*idle.values()][:1]:
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
    """

    def __init__(
        self, a: Run, b: Run, number: int, last: int | None, noise: Mapping[Key, float]
    ) -> None:
        self.steps, self._noise = [a.steps[number], b.steps[number]], noise
        self._last = [] if last is None else [run.steps[last].values for run in (a, b)]
        self._is_next = last == number - 1
        cuts = [(step.passes, step.world) for step in self.steps]
        self._same_cut = cuts[0] == cuts[1]
        self._values = [step.values for step in self.steps]
        self._orders = [[k for k in values if k.kind in FORWARD] for values in self._values]
        # What each value was made of, and what each was handed to, in either run.
        self._took, self._made = defaultdict[Key, set[Key]](set), defaultdict[Key, set[Key]](set)
        for values, order in zip(self._values, self._orders, strict=True):
            for key, taken, direct in _sources([values[key] for key in order], order):
                self._took[key] |= taken
                self._made[key] |= taken | direct
        self._users = defaultdict[Key, list[Key]](list)
        for key in self._keys("input", "output"):
            for source in self._made[key]:
                self._users[source].append(key)
        self._owned = [_owned(values, self._orders) for values in self._values]
        both = (values[k] for values in self._values for k in values if k.kind in FORWARD)
        self._coarsest = max((rounding_of(value.type) for value in both), default=0.0)
        self._distances, self._roundings = dict[Key, float](), dict[Key, float]()
        self.places = [
            *map(self._root, self._keys("data", both=False)),
            *map(self._start, self._keys("start")),
            *map(self._forward, self._keys("input", "output")),
            *map(self._loss, self._keys("loss")),
            *map(self._signal, self._keys("signal")),
            *self._scaled(map(self._gradient, self._keys("gradient", both=False))),
            *map(self._start, self._keys("before", both=False)),
            *self._common(map(self._state, self._keys("state", both=False))),
            *self._common(map(self._update, self._keys("weight"))),
        ]

    @property
    def reaches(self) -> bool:
        """Whether gradients differ by more than rounding: one clearly, or half of them at all."""
        own = [x.key for x in self.places if x.key.kind == "gradient"]
        clear = any(self._distances[x] > self._roundings[x] for x in own)
        return clear or sum(self._distances[x] > self._base(x) for x in own) >= len(own) / 2

    def alone(self) -> list[str]:
        """Names of modules and weights that one run has alone, and are not compared."""
        kinds = ("output", "weight")
        names = [{k.name for k in values if k.kind in kinds} for values in self._values]
        pairs = (("A", names[0] - names[1]), ("B", names[1] - names[0]))
        texts = [
            f"{run} alone has {len(own)} names, such as {min(own)}." for run, own in pairs if own
        ]
        return [*texts, "Names are mapped by --rename."] if len(texts) == 2 else texts

    def reasons(self, first: Place) -> list[str]:
        """What else is known of the first place that differs."""
        a, b = self.steps
        apart = [x for x in self.places if x.differs and x.key[::2] == first.key[::2]]
        found = list[str]()
        alone = first.how or not _is_factor(self._pair(first.key), first.ratio)
        if not alone and all(abs(x.ratio / first.ratio - 1) < FACTOR for x in apart):
            found.append(f"B's is {first.ratio:.4g} times A's, as all that differ are.")
        for name, values in zip("AB", self._values, strict=True):
            if not any(key.kind == "gradient" for key in values):
                found.append(f"The optimizer of {name} made no step.")
        if first.stage in (STAGE["state"], STAGE["weight"]):
            for i, (one, other) in enumerate(zip(a.options, b.options, strict=False)):
                found += [
                    f"Group {i} has {name} = {one.get(name)} in A, {other.get(name)} in B."
                    for name in {**one, **other}
                    if one.get(name) != other.get(name)
                ]
        if not first.known:
            found.append("What it was computed from was not compared.")
        return found

    def _keys(self, *kinds: str, both: bool = True) -> list[Key]:
        """Names of values in the order of computation: in both runs, or of weights in both."""
        found = [k for values in self._values for k in values if k.kind in kinds]
        found = [k for k in dict.fromkeys(found) if not both or self._pair(k)[2]]
        if found and found[0].kind not in FORWARD:
            found = [k for k in found if k.kind == "signal" or self._pair(_weight(k))[2]]
        if kinds == ("signal",):
            places = {signal_of(key): i for i, key in enumerate(self._orders[0])}
            found.sort(key=lambda key: -places.get(key, -1))
        if found and found[0].kind in OF_PARAMETERS:
            order = {key.name: i for i, key in reversed([*enumerate(self._orders[0])])}
            counts = {k: value.count for values in self._values for k, value in values.items()}
            # Of a state its moments before its counter.
            found.sort(key=lambda k: (order.get(_owner(k.name), len(order)), counts[k] == 1))
        return found

    def _pair(self, key: Key) -> tuple[Value | None, Value | None, bool]:
        """The value in each run, and whether both have it."""
        one, other = (values.get(key) for values in self._values)
        return one, other, one is not None and other is not None

    def _base(self, key: Key) -> float:
        """The distance that rounding explains."""
        types = {values[key].type for values in self._values if key in values}
        if self._noise[key] and len(types) == 1:
            return MEASURED * self._noise[key]
        # Gradients are computed in the coarsest type that a value has, whatever their own.
        coarsest = self._coarsest if key.kind in ("signal", "gradient") else 0.0
        return max(coarsest, min(map(rounding_of, types)))

    def _place(self, key: Key, allowed: float, **known: Any) -> Place:
        one, other, _ = self._pair(key)
        # In another cut gradients at what has no rows are other numbers, of the same sum.
        apart, how = relative(one, other, whole=key.kind != "signal" or self._same_cut)
        self._distances[key] = apart
        ratio = other.norm / one.norm if one and other and one.norm else 1.0
        number, stage = self.steps[0].number, STAGE[key.kind]
        certain = bool(self._noise[key] or how or not allowed)
        module = _owner(key.name) if key.kind in OF_PARAMETERS else key.name
        place = Place(number, stage, key, apart, allowed, how, ratio, certain, True, module)
        return place._replace(**known)

    def _most(self, keys: Iterable[Key]) -> float:
        return max((self._distances.get(key, 0.0) for key in keys), default=0.0)

    def _root(self, key: Key) -> Place:
        """A value that nothing in the step was computed for."""
        return self._place(key, self._base(key))

    def _start(self, key: Key) -> Place:
        """A weight or a state, which the last step that was compared may explain."""
        allowed, kind = self._base(key), "weight" if key.kind == "start" else "state"
        if self._last:
            before = [values.get(key._replace(kind=kind)) for values in self._last]
            allowed += GROWTH ** (1 if self._is_next else 3) * relative(*before)[0]
        return self._place(key, allowed, known=not self._last or self._is_next)

    def _forward(self, key: Key) -> Place:
        made = self._made[key]
        common = [x for x in made if x in self._distances]
        moved, known = self._moved(key, made)
        allowed = self._base(key) + GROWTH * self._most(common) + moved
        one, other, _ = self._pair(key)
        # What one run hands over and the other does not, code around the module has made.
        alone = (x for x in self._took[key] if x.kind == "input" and not self._pair(x)[2])
        module = self._maker(next(alone, key))
        place = self._place(key, allowed, known=known and bool(common or not made), module=module)
        drew = [value.drew for value in (one, other) if value]
        if drew[0] != drew[1]:
            return place._replace(how=f"draws random numbers in {'AB'[drew[1]]} alone")
        if drew[0] and not self._same_random():
            return place._replace(stage=RANDOM, allowed=min(allowed, LEAST))
        if one and not key.name and one.scalar:
            # A number that the model itself returns: of a micro-batch a mean, or its part of one.
            return place._replace(stage="loss", allowed=allowed if self._same_cut else math.inf)
        return place

    def _loss(self, key: Key) -> Place:
        outputs = (x for x in self._distances if x.kind == "output")
        return self._place(key, self._base(key) + GROWTH * self._most(outputs))

    def _signal(self, key: Key) -> Place:
        """The gradient at a value: from those at what was made of it, by modules' own passes."""
        value = _value(key)
        users = self._users[value]
        sent = [x for x in map(signal_of, users) if x in self._distances]
        near = [*sent, value, *users, *(x for user in users for x in self._made[user])]
        moved = max((self._moved(user, None)[0] for user in users), default=0.0)
        allowed = self._base(key) + GROWTH * (self._most(near) + moved)
        if not sent:
            return self._place(key, allowed, stage="loss", module="")
        takers = {x.name for x in users if value in self._took[x]}
        # Where no module took it, code did.
        return self._place(key, allowed, module=_around(takers or {self._maker(users[0])}))

    def _gradient(self, key: Key) -> Place:
        """Of a parameter: from the signals and values of its module."""
        owner = next((o for o, names in self._owned[0].items() if key.name in names), "")
        outputs = [x for x in self._distances if x.kind == "output" and x.name == owner]
        made = [x for one in outputs for x in self._made[one]]
        # What code of the model itself does with a parameter is not seen.
        near = [*outputs, *made] if outputs else [x for x in self._distances if x.kind in FORWARD]
        signals = [signal_of(x) for x in outputs or near]
        one, other, _ = self._pair(key)
        terms = 1.0
        if one is not None and other is not None and one.norm and other.norm:
            # Terms of the sum that cancel are rounded as the largest.
            sent = max(self._norms(signals), default=one.norm)
            terms = max(1.0, sent * max(self._norms(made), default=1.0) / max(one.norm, other.norm))
        rounding = self._base(key) * (1.0 if self._noise[key] else terms)
        self._roundings[key] = rounding
        return self._place(key, rounding + GROWTH * terms * self._most([*near, *signals]))

    def _scaled(self, places: Iterable[Place]) -> list[Place]:
        """Gradients: where most have one factor, as by clipping, what has another is the reason."""
        places = [*places]
        ratios = sorted(x.ratio for x in places if x.differs and x.distance < math.inf)
        ratio = ratios[len(ratios) // 2] if ratios else 1.0
        alike = [x for x in places if x.differs and _is_factor(self._pair(x.key), ratio)]
        others = [x for x in places if x.differs and x not in alike]
        if others and len(alike) > len(others):
            places = [x._replace(allowed=math.inf) if x in alike else x for x in places]
        return places

    def _common(self, places: Iterable[Place]) -> list[Place]:
        """States, or updates: single ones may differ where their gradient is rounding alone."""
        kinds = defaultdict[str, list[Place]](list)
        for place in (places := [*places]):
            kinds[place.key.part].append(place)
        options = [step.options for step in self.steps]
        few = {
            part
            for part, some in kinds.items()
            if sum(place.differs for place in some) < len(some) / 2 and options[0] == options[1]
        }
        return [
            x._replace(allowed=max(x.allowed, TURNED))
            if x.key.part in few and not x.how and self._distances.get(Key("gradient", x.key.name))
            else x
            for x in places
        ]

    def _state(self, key: Key) -> Place:
        inputs = [key._replace(kind="before"), Key("gradient", key.name)]
        apart = self._most(inputs)
        grown = max(GROWTH * apart, ROOT_GROWTH * math.sqrt(apart))
        return self._place(key, self._base(key) + grown)

    def _update(self, key: Key) -> Place:
        """Of a weight: from its gradient and the optimizer's states; of a buffer, from outputs."""
        if key.part:
            outputs = self._most(x for x in self._distances if x.kind in FORWARD)
            stage = STAGE["output"]
            return self._place(key, self._base(key) + GROWTH * outputs, stage=stage)
        start = key._replace(kind="start")
        moves = [_minus(values[key], values.get(start)) for values in self._values]
        size = max((move.norm for move in moves if move), default=0.0)
        most = max(value.norm for value in self._pair(key)[:2] if value)
        inputs = [x for x in self._distances if x.name == key.name and x.kind in INPUTS_OF_UPDATE]
        allowed = self._base(key) * (most / size if size else 1.0)
        allowed += ROOT_GROWTH * math.sqrt(self._most(inputs)) + GROWTH * self._most([start])
        apart, how = relative(*moves)
        return self._place(key, allowed, distance=apart, how=how, certain=bool(how))

    def _maker(self, key: Key) -> str:
        return next(values[key].maker for values in self._values if key in values)

    def _moved(self, key: Key, made: Iterable[Key] | None) -> tuple[float, bool]:
        """What differences of a module's weights change, and whether both runs have all of these.

        The output of a linear layer moves by no more than its weights, times its input; a gradient,
        for which nothing is ``made``, in proportion.
        """
        around = [o for o in self._owned[0] if not o or f"{key.name}.".startswith(f"{o}.")]
        owners = [key.name] if key.kind == "output" else around
        names = [[n for o in owners for n in owned.get(o, ())] for owned in self._owned]
        starts = [Key("start", name) for name in names[0]]
        norms = [max(self._norms([x]), default=0.0) for x in starts]
        moved = math.hypot(*(self._most([x]) * n for x, n in zip(starts, norms, strict=True)))
        if made is None:
            size = math.hypot(*norms)
        else:
            size = max(self._norms([key]), default=0.0)
            moved *= WEIGHTS_GROWTH * max([1.0, *self._norms(made)])
        return moved / size if size else 0.0, sorted(names[0]) == sorted(names[1])

    def _norms(self, keys: Iterable[Key]) -> list[float]:
        """Norms of those that are no whole numbers."""
        found = (values[key] for values in self._values for key in keys if key in values)
        return [value.norm for value in found if rounding_of(value.type)]

    def _same_random(self) -> bool:
        """Whether a model draws the same numbers in both runs."""
        one, other = (
            [{k: r.get(k) for k in ("torch", "cuda")} for r in step.random] + [step.passes]
            for step in self.steps
        )
        return one == other


def relative(one: Value | None, other: Value | None, *, whole: bool = True) -> tuple[float, str]:
    """Relative distance of two values, and their difference in words where it is another one.

    ``whole``: whether their sizes and norms have to be alike as well.
    """
    if one is None or other is None:
        return math.inf if one or other else 0.0, "missing in " + ("A" if one is None else "B")
    if one.count != other.count and whole:
        return math.inf, f"{one.count:g} elements in A, {other.count:g} in B"
    if one.z is None or other.z is None:
        same = one.z is other.z
        return 0.0 if same else math.inf, "" if same else "not finite in " + "AB"[one.z is not None]
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


def _is_factor(pair: tuple[Value | None, Value | None, bool], ratio: float) -> bool:
    """Whether one value is a multiple of the other."""
    one, other, _ = pair
    if one is None or other is None or one.z is None or other.z is None or not other.norm:
        return False
    scaled = [ratio * x for x in one.z]
    return abs(ratio - 1) > FACTOR and distance(scaled, other.z) < FACTOR * other.norm


def rounding_of(name: str) -> float:
    """The relative distance that rounding explains in a type, by its name; 0: whole numbers."""
    if name in ("uint8", "int8"):
        return HALF_ROUNDINGS * 2.0**-7  # a state of eight bits
    found = getattr(torch, name, None)
    if found is None or not found.is_floating_point:
        return 0.0
    return torch.finfo(found).eps * (HALF_ROUNDINGS if found.itemsize < 4 else ROUNDINGS)


def _sources(
    values: Sequence[Value], order: Sequence[Key]
) -> Iterator[tuple[Key, set[Key], set[Key]]]:
    """What each value was handed, and what the code that made it had at hand beside."""
    # Where the module begins whose code each value was given to.
    frames = [-1] * len(order)
    for i, value in enumerate(values):
        for place in range(value.since, i):
            frames[place] = max(frames[place], value.since)
    for i, (key, value) in enumerate(zip(order, values, strict=True)):
        inner = range(value.since, i)
        taken = {order[place] for place in value.took if place < i}
        yield key, taken, {order[place] for place in inner if frames[place] == value.since}


def _minus(new: Value, old: Value | None) -> Value | None:
    if old is None or old.z is None or new.z is None:
        return None
    z = [x - y for x, y in zip(new.z, old.z, strict=True)]
    return replace(new, z=z, norm=distance(z, [0.0] * len(z)))


def _owned(values: Mapping[Key, Value], orders: Sequence[Sequence[Key]]) -> dict[str, list[str]]:
    """Names of the weights of each module that has an output in both runs; of others, around it."""
    modules = {k.name for k in orders[0] if k.kind == "output"} & {k.name for k in orders[1]}
    found: dict[str, list[str]] = {}
    for name in (key.name for key in values if key.kind == "start"):
        around = [m for m in modules if f"{name}.".startswith(f"{m}.") and m]
        found.setdefault(max(around, key=len, default=""), []).append(name)
    return found


def _around(names: Iterable[str]) -> str:
    """The name, or that of the module around all of several."""
    first, *others = (name.split(".") for name in names)
    for other in others:
        same = [a == b for a, b in zip(first, other, strict=False)]
        first = first[: [*same, False].index(False)]
    return ".".join(first)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _weight(key: Key) -> Key:
    return Key("weight", key.name, key.part if key.kind in ("start", "weight") else "")


def _value(signal: Key) -> Key:
    kind, part = signal.part.split(".", 1)
    return Key(kind, signal.name, part, signal.call)
