"""The first fault of a pass: a search through the tensors that it made."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

__all__ = ["Finding", "Habits", "Seen", "first_fault", "is_finite"]

BATCH, WEIGHT, INPUT, OUTPUT = "batch", "weight", "input", "output"
LOSS, GRADIENT, PARAMETER = "loss", "gradient", "parameter"
LEFT, UNSEEN, UNKNOWN = "left", "unseen", "unknown"
# Comes after all that a pass has seen, in the order of execution.
_AFTER_ALL = 2
# Rows that a finding lists at most.
_MOST_ROWS = 16


class Seen:
    """A tensor that a module took or gave, in the order of the forward pass.

    ``value`` and the gradients are True for one that is finite, None for one that was
    not seen, and else numbers, one a row or one in all, that are finite exactly where it is.

    Attributes:
        what: ``"batch"``, ``"output"``, or ``"input"`` for one that no module had given.
        name: Name of the module.
        batch: Index of the pass.
        value: Its values.
        gradient: Its gradient.
        second: Its gradient in a later backward pass, if the loss contains its first one.
        takers: Modules that were handed this very tensor; None if unknown.
        returned: Whether the model returned it, so that its gradient is the loss's as well.
        within: The part of its gradient that comes from within the model, if it was returned.
        weight: The weight whose gradient stands for its own; empty for none.
        time: Number of the call in compiled code.
    """

    __slots__ = (
        "batch", "gradient", "name", "returned", "second", "takers", "time", "value", "weight",
        "what", "within",
    )  # fmt: skip

    def __init__(self, what: str, name: str, batch: int, value: Any = True) -> None:
        self.what, self.name, self.batch, self.value = what, name, batch, value
        self.gradient: Any = None
        self.second: Any = None
        self.within: Any = None
        self.takers: list[str] | None = [name] if what == INPUT else []
        self.returned, self.weight = False, ""
        self.time: Any = None


@dataclass(frozen=True)
class Finding:
    """The first fault of a batch, and its neighbours.

    Attributes:
        kind: ``"batch"``, ``"weight"``, ``"output"``, ``"loss"``, ``"gradient"`` or
            ``"parameter"``: the place where something first was not finite. ``"left"``: a gradient
            that is not finite though no pass since the last report made it so. ``"unseen"``: the
            watch has seen no forward pass. ``"unknown"``: a gradient that is not finite, and what
            was seen does not say why.
        name: The module whose forward (``"output"``) or backward pass (``"gradient"``) made it, or
            the parameter; empty for the model's own code, and where it is not known.
        seen_in: The tensor in which it was seen, in words.
        finite_before: The last tensor before it that was finite; empty for none.
        finite_after: The next tensor that was finite; empty for none.
        batch: Index of the batch: forward passes with gradients since the watch was made.
        rank: The process.
        last: Index of the last batch in the unbroken row of faults that begins with it.
        rows: Indices, in the first dimension of that tensor, whose values are not finite; at most
            16. Empty if its length is not that of the batch.
    """

    kind: str
    name: str
    seen_in: str
    finite_before: str
    finite_after: str
    batch: int
    rank: int = 0
    last: int = -1
    order: tuple[int, int, bool] = field(default=(0, 0, False), repr=False)
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        """One paragraph: the culprit, then what is finite on either side."""
        batch = f"Batch {self.batch}" if self.batch >= 0 else "No batch"
        rows = f", row{'s' * (len(self.rows) > 1)} {', '.join(map(str, self.rows))}"
        return (
            f"{batch}, rank {self.rank}: {self.cause}. "
            f"First not finite: {self.seen_in}{rows if self.rows else ''}. "
            f"Finite before it: {self.finite_before or 'nothing'}. "
            f"Finite after it: {self.finite_after or 'nothing'}."
        )

    @property
    def in_forward(self) -> bool:
        """Whether something was not finite before the backward pass began."""
        return self.kind in (BATCH, WEIGHT, OUTPUT)

    @property
    def row(self) -> int | None:
        """The row that is not finite; None if there are several, or rows cannot be told."""
        return self.rows[0] if len(self.rows) == 1 else None

    @property
    def cause(self) -> str:
        """The culprit in words."""
        return _CAUSES[self.kind].format(repr(self.name) if self.name else "the model's own code")


_CAUSES = {
    BATCH: "the batch itself is not finite",
    WEIGHT: "the weight {} is not finite, before anything was computed with it",
    OUTPUT: "the forward pass of {} made the first values that are not finite",
    LOSS: "the loss is at fault: the model's outputs are finite, their gradient is not",
    GRADIENT: "the backward pass of {} made a gradient that is not finite",
    PARAMETER: "the gradient of {} is not finite, though that of its module's output is",
    LEFT: "the gradient of {} is not finite, and no pass since the last report made it so",
    UNSEEN: "the gradient of {} is not finite, and the watch has seen no forward pass: it was made "
    "before torch.compile or after the forward pass, or the loop calls another module",
    UNKNOWN: "a gradient is not finite, and what was seen does not say why",
}


class Habits:
    """Tensors that are not finite in passes without a fault, as masks of minus infinity are.

    An infinity is a habit once it was seen in such a pass, NaN if it was in all of them.
    """

    def __init__(self) -> None:
        self._passes, self._seen = 0, Counter[tuple[str, str, str]]()

    def learn(self, seen: Sequence[Seen]) -> None:
        """Takes note of a pass without a fault."""
        self._passes += 1
        self._seen.update({_habit(one) for one in seen if not is_finite(one.value)})

    def has(self, one: Seen) -> bool:
        """Whether a tensor that is not finite is like this in passes without a fault."""
        habit = _habit(one)
        return self._seen[habit] >= (self._passes if habit[2] == "nan" else 1) > 0


def is_finite(found: Any) -> bool:
    """Whether a value or a gradient is finite; an unknown one counts as finite."""
    if isinstance(found, Tensor):
        return bool(torch.isfinite(found).all())
    return found is not False


def first_fault(
    seen: Sequence[Seen],
    called: Collection[str],
    weights: Sequence[str],
    batch: int,
    habits: Habits,
    broken: Sequence[str],
) -> Finding | None:
    """Finds the first non-finite value of a pass; None if all are finite.

    Forward comes first: a layer whose input is not finite has a weight gradient of 0 * NaN, though
    all gradients at outputs are finite.

    Args:
        seen: In the order of the forward pass; the backward pass goes through it from the end.
        called: Names of all modules that were called.
        weights: Names of weights that are not finite.
        batch: Index of the pass.
        habits: Tensors that are not finite though all is well.
        broken: Names of parameters whose gradients the pass made non-finite.
    """
    at = _source(seen, habits)
    if at is not None:
        return _in_forward(seen, at, called, weights, batch)
    found = _in_backward(seen, called, batch)
    if found is not None or not broken:
        return found
    # Values that were thought to do no harm.
    bad = [i for i, one in enumerate(seen) if not is_finite(one.value)]
    at = next((i for i in bad if not habits.has(seen[i]) or _sort(seen[i].value) == "nan"), None)
    if at is not None:
        return _in_forward(seen, at, called, weights, batch)
    return _of_parameter(broken[0], seen, batch)


def _of_parameter(name: str, seen: Sequence[Seen], batch: int) -> Finding:
    """Finding of a parameter's gradient that is not finite, of which nothing else was seen.

    It is the parameter's own fault if what its module took, and the gradient of what it gave, is
    known to be finite.
    """
    owner = name.rpartition(".")[0]
    gave = [one for one in seen if one.what == OUTPUT and one.name == owner]
    took = [one for one in seen if one.takers is not None and owner in one.takers]
    sure = any(one.gradient is not None or one.weight for one in gave)
    sure = sure and all(one.second is None and is_finite(one.gradient) for one in gave)
    sure = sure and all(is_finite(one.value) for one in (*took, *gave))
    kind, culprit = (PARAMETER, name) if sure else (UNKNOWN, "")
    seen_in = f"the gradient of {name!r}"
    return Finding(kind, culprit, seen_in, "", "", batch, last=batch, order=(_AFTER_ALL, 0, True))


def _source(seen: Sequence[Seen], habits: Habits) -> int | None:
    """Index of the first value that is not finite without being a habit; None for none."""
    bad = [i for i, one in enumerate(seen) if not is_finite(one.value)]
    new = [i for i in bad if not habits.has(seen[i])]
    back = max((i for i, one in enumerate(seen) if not is_finite(one.gradient)), default=-1)
    while new and _is_harmless(seen, new[0]) and (new[1:] or back > new[0] or new == [0]):
        if new[0] == 0 and new[1:] and not _is_source(seen, new[1]):
            break
        del new[0]
    if not new:
        return None
    # A module that is handed NaN is not to blame for giving it.
    nan = (i for i in bad if i < new[0] and _sort(seen[i].value) == "nan")
    return next((i for i in nan if seen[new[0]].name in (seen[i].takers or ())), new[0])


def _is_harmless(seen: Sequence[Seen], at: int) -> bool:
    """Whether modules made finite values of it, and it is a mask's infinity, or of the batch."""
    one = seen[at]
    gave = [other for other in seen if other.what == OUTPUT and other.name in (one.takers or ())]
    made = all(is_finite(other.value) for other in gave)
    return made and (at == 0 or (bool(gave) and _sort(one.value) == "-inf"))


def _is_source(seen: Sequence[Seen], at: int) -> bool:
    """Whether all is finite that a module took."""
    took = [one for one in seen if one.takers is not None and seen[at].name in one.takers]
    return bool(took) and all(is_finite(one.value) for one in took)


def _in_forward(
    seen: Sequence[Seen], at: int, called: Collection[str], weights: Sequence[str], batch: int
) -> Finding:
    one = seen[at]
    kind, name = one.what, one.name
    if kind == INPUT:
        # No module gave it, so the code around this one did.
        kind, name = OUTPUT, _around(name, called)
    own = [w for w in weights if _around(w, called) == name] if kind == OUTPUT else []
    kind, name = (WEIGHT, own[0]) if own else (kind, name)
    finite = [is_finite(other.value) for other in seen]
    bracket = _bracket(seen, at, finite, "")
    return Finding(kind, name, *bracket, batch, order=(0, at, not own), rows=_rows(one.value))


def _in_backward(seen: Sequence[Seen], called: Collection[str], batch: int) -> Finding | None:
    signals = [one for one in reversed(seen) if one.gradient is not None]
    finite = [is_finite(one.gradient) for one in signals]
    second = next((one.second for one in reversed(seen) if not is_finite(one.second)), None)
    if not all(finite):
        at = finite.index(False)
        kind, name = _backward_culprit(signals, at, finite, called)
        bracket = _bracket(signals, at, finite, "the gradient at ")
        rows = _rows(signals[at].gradient)
    elif second is not None:
        # The loss contains gradients, whose own derivative enters anywhere in the model.
        at, kind, name, rows, bracket = 0, LOSS, "", _rows(second), ("", "", "")
    else:
        return None
    if kind == LOSS:
        # What came before is the forward pass.
        bracket = "the gradient at the output of the model", _words(seen[-1]), bracket[2]
    return Finding(kind, name, *bracket, batch, order=(1, at, True), rows=rows)


def _backward_culprit(
    signals: Sequence[Seen], at: int, finite: Sequence[bool], called: Collection[str]
) -> tuple[str, str]:
    """Kind and name of the place between the last finite gradient and the first non-finite one."""
    one = signals[at]
    if not at or (one.returned and is_finite(one.within)):
        return LOSS, ""
    if one.weight and finite[at + 1 :] and all(finite[at + 1 :]):
        # Had the gradient at the output been at fault, it would have gone on.
        return PARAMETER, one.weight
    if one.takers is None:
        return GRADIENT, signals[at - 1].name
    known = {other.name for other in signals[:at]}
    names = [name for name in one.takers if name in known]
    # Without the modules around one that took it too.
    names = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
    if len({*names}) == 1:
        return GRADIENT, names[0]
    if one.what == INPUT and not names:
        return GRADIENT, one.name
    # None of several is known to be at fault: the module around them is named.
    pairs = zip(*(n.split(".") for n in names or (one.name, signals[at - 1].name)), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, pairs)]
    return GRADIENT, _around(".".join([*shared, ""]), called)


def _around(name: str, called: Collection[str]) -> str:
    """The innermost module around a name that was called itself."""
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return ""


def _bracket(
    seen: Sequence[Seen], at: int, finite: Sequence[bool], prefix: str
) -> tuple[str, str, str]:
    """The tensor in words, the last finite one before it and the next after it."""
    before = next((i for i in range(at - 1, -1, -1) if finite[i]), None)
    after = next((i for i in range(at + 1, len(seen)) if finite[i]), None)
    found = [prefix + _words(seen[i]) if i is not None else "" for i in (at, before, after)]
    return found[0], found[1], found[2]


def _words(one: Seen) -> str:
    if one.what == BATCH:
        return "the batch"
    return f"the {one.what} of {repr(one.name) if one.name else 'the model'}"


def _habit(one: Seen) -> tuple[str, str, str]:
    return one.what, one.name, _sort(one.value)


def _sort(value: Any) -> str:
    """What a value that is not finite holds: ``"nan"``, ``"inf"`` or only ``"-inf"``."""
    if is_finite(value) or value is False:
        return ""
    if value.isnan().any():
        return "nan"
    return "inf" if bool((value == torch.inf).any()) else "-inf"


def _rows(found: Any) -> tuple[int, ...]:
    """Rows that are not finite; empty if the numbers are not those of rows."""
    if not isinstance(found, Tensor) or not found.ndim:
        return ()
    rows: list[int] = found.isfinite().logical_not().nonzero()[:_MOST_ROWS, 0].tolist()
    return tuple(rows)
