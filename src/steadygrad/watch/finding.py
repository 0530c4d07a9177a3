"""The first fault of a pass: a search through the tensors that it made."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Finding", "Habits", "Seen", "first_fault", "is_finite"]

# Rows that a finding lists at most.
_MOST_ROWS = 16


@dataclass(eq=False)
class Seen:
    """A tensor that a module took or gave: an input is one that no module had given.

    Attributes:
        value, gradient: True if finite, None if not seen, else numbers, one a row or one in all,
            that are finite exactly where it is.
        second: Its gradient in a later backward pass, if the loss contains its first one.
        takers: Modules that were handed this very tensor; None if unknown.
        returned: Whether the model returned it, so that its gradient is the loss's as well.
    """

    what: Literal["batch", "input", "output"]
    name: str
    value: Any = True
    gradient: Any = None
    second: Any = None
    takers: list[str] | None = field(default_factory=list)
    returned: bool = False
    time: Any = 0

    def __str__(self) -> str:
        name = repr(self.name) if self.name else "the model"
        return "the batch" if self.what == "batch" else f"the {self.what} of {name}"


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
    finite_before: str = ""
    finite_after: str = ""
    batch: int = -1
    rank: int = 0
    last: int = -1
    # Place in the order of execution: forward, backward, a guess, or none known.
    order: tuple[int, int, bool] = field(default=(3, 0, False), repr=False)
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
        return self.kind in ("batch", "weight", "output")

    @property
    def row(self) -> int | None:
        """The row that is not finite; None if there are several, or rows cannot be told."""
        return self.rows[0] if len(self.rows) == 1 else None

    @property
    def cause(self) -> str:
        """The culprit in words."""
        return _CAUSES[self.kind].format(repr(self.name) if self.name else "the model's own code")


_CAUSES = {
    "batch": "the batch itself is not finite",
    "weight": "the weight {} is not finite, before anything was computed with it",
    "output": "the forward pass of {} made the first values that are not finite",
    "loss": "the loss is at fault: the model's outputs are finite, their gradient is not",
    "gradient": "the backward pass of {} made a gradient that is not finite",
    "parameter": "the gradient of {} is not finite, though that of its module's output is",
    "left": "the gradient of {} is not finite, and no pass since the last report made it so",
    "unseen": "the gradient of {} is not finite, and the watch has seen no forward pass: it was "
    "made before torch.compile or after the forward pass, or the loop calls another module",
    "unknown": "a gradient is not finite, and what was seen does not say why",
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
        self._seen.update({self._key(one) for one in seen if not is_finite(one.value)})

    def has(self, one: Seen) -> bool:
        """Whether a tensor that is not finite is like this in passes without a fault."""
        key = self._key(one)
        return self._seen[key] >= (self._passes if key[2] == "nan" else 1) > 0

    def _key(self, one: Seen) -> tuple[str, str, str]:
        return one.what, one.name, _sort(one.value)


def is_finite(found: Any) -> bool:
    """Whether a value or a gradient is finite; an unknown one counts as finite."""
    return bool(found.isfinite().all()) if isinstance(found, Tensor) else found is not False


def first_fault(
    seen: Sequence[Seen],
    entries: Sequence[Seen],
    called: set[str],
    weights: Sequence[str],
    habits: Habits,
    broken: Sequence[str],
) -> Finding | None:
    """Finds the first non-finite value of a pass; None if all are finite.

    Forward comes first: a layer whose input is not finite has a weight gradient of 0 * NaN, though
    all gradients at outputs are finite. ``weights`` are those that are not finite, and ``broken``
    those whose gradients the pass made non-finite.
    """
    bad = [i for i, one in enumerate(seen) if not is_finite(one.value)]
    nan = [i for i in bad if _sort(seen[i].value) == "nan"]
    new = [i for i in bad if not habits.has(seen[i])]
    for number, at in enumerate(new, 1):
        if not _is_absorbed(seen, at, new[number:]):
            # A module that is handed NaN is not to blame for giving it.
            handed = (i for i in nan if i < at and seen[at].name in (seen[i].takers or ()))
            return _in_forward(seen, next(handed, at), called, weights, order=0)
    found = _in_backward(seen, entries, called)
    # Else a guess: a value that was thought to do no harm.
    guess = sorted({*new, *nan})
    if found is None and guess and (new or broken):
        return _in_forward(seen, guess[0], called, weights, order=2)
    return _of_parameter(broken[0], seen) if found is None and broken else found


def _is_absorbed(seen: Sequence[Seen], at: int, later: Sequence[int]) -> bool:
    """Whether finite values were made of it, and it is a mask's infinity, or of the batch.

    ``later`` are those that are not finite either. The batch may be the reason of the first of
    them, unless that was made of finite tensors.
    """
    gave = [one for one in seen if one.what == "output" and one.name in (seen[at].takers or ())]
    if at:
        fine = bool(gave) and _sort(seen[at].value) == "-inf"
    else:
        gave = gave or [*seen[1:2]]
        took = _took(seen, seen[later[0]].name) if later else gave
        fine = bool(took) and all(is_finite(one.value) for one in took)
    return fine and all(is_finite(one.value) for one in gave)


def _took(seen: Sequence[Seen], name: str) -> list[Seen]:
    return [one for one in seen if name in (one.takers or ())]


def _of_parameter(name: str, seen: Sequence[Seen]) -> Finding:
    """Blames a parameter if what its module took, and the gradient of what it gave, are finite."""
    owner = name.rpartition(".")[0]
    gave = [one for one in seen if one.what == "output" and one.name == owner]
    sure = any(one.gradient is not None for one in gave)
    sure = sure and all(one.second is None and is_finite(one.gradient) for one in gave)
    sure = sure and all(is_finite(one.value) for one in (*_took(seen, owner), *gave))
    kind, culprit = ("parameter", name) if sure else ("unknown", "")
    return Finding(kind, culprit, f"the gradient of {name!r}")


def _in_forward(
    seen: Sequence[Seen], at: int, called: set[str], weights: Sequence[str], order: int
) -> Finding:
    kind: str = seen[at].what
    name = seen[at].name
    if kind == "input":
        # No module gave it, so the code around this one did.
        kind, name = "output", _around(called, name)
    own = [w for w in weights if kind == "output" and _around(called, w) == name]
    kind, name = ("weight", own[0]) if own else (kind, name)
    bracket = _bracket(seen, at, [is_finite(one.value) for one in seen], "")
    place = order, at, not own
    return Finding(kind, name, *bracket, order=place, rows=_rows(seen[at].value))


def _in_backward(seen: Sequence[Seen], entries: Sequence[Seen], called: set[str]) -> Finding | None:
    signals = [one for one in reversed(seen) if one.gradient is not None]
    finite = [is_finite(one.gradient) for one in signals]
    # A loss may contain gradients, whose own derivative enters anywhere in the model.
    bad = next((one.second for one in reversed(seen) if not is_finite(one.second)), None)
    at, kind, name, bracket = 0, "loss", "", ("", "", "")
    if not all(finite):
        at = finite.index(False)
        bad = signals[at].gradient
        kind, name = _backward_culprit(signals, at, finite, called)
        bracket = _bracket(signals, at, finite, "the gradient at ")
    for entry in entries:
        if is_finite(entry.value) and not is_finite(entry.gradient):
            bad, kind, name = entry.gradient, "loss" if entry.returned else "unknown", ""
            words = "a gradient that came in elsewhere than at the outputs, or that a hook changed"
            bracket = (words, *bracket[1:])
            break
    if bad is None:
        return None
    if kind == "loss":
        # What came before is the forward pass.
        bracket = "the gradient at the output of the model", str(seen[-1]), bracket[2]
    return Finding(kind, name, *bracket, order=(1, at, True), rows=_rows(bad))


def _backward_culprit(
    signals: Sequence[Seen], at: int, finite: Sequence[bool], called: set[str]
) -> tuple[str, str]:
    """Kind and name of the place between the last finite gradient and the first non-finite one."""
    one = signals[at]
    if not at:
        # What the model keeps, or an output that cannot be opened, may have code behind it.
        return "loss" if one.returned or one.takers is None else "unknown", ""
    if one.takers is None:
        return "gradient", signals[at - 1].name
    known = {other.name for other in signals[:at]}
    names = [name for name in one.takers if name in known]
    if len({*names}) == 1:
        return "gradient", names[0]
    # None of several is known to be at fault: the module around them is named.
    names = names or [one.name, signals[at - 1].name]
    return "gradient", _around(called, *(f"{n}." for n in names))


def _around(called: set[str], *names: str) -> str:
    """The innermost module around all of the names that was called itself."""
    around = [m for m in called if all(name.startswith(f"{m}.") for name in names)]
    return max(around, key=len, default="")


def _bracket(
    seen: Sequence[Seen], at: int, finite: Sequence[bool], prefix: str
) -> tuple[str, str, str]:
    """The tensor in words, the last finite one before it and the next after it."""
    words = [f"{prefix}{one}" if fine else "" for one, fine in zip(seen, finite, strict=True)]
    before = next(filter(None, reversed(words[:at])), "")
    return f"{prefix}{seen[at]}", before, next(filter(None, words[at + 1 :]), "")


def _sort(value: Any) -> str:
    """The kind of a value that is not finite: ``"nan"``, ``"inf"`` or only ``"-inf"``."""
    if is_finite(value):
        return ""
    if value.isnan().any():
        return "nan"
    return "inf" if bool((value == torch.inf).any()) else "-inf"


def _rows(found: Any) -> tuple[int, ...]:
    """Rows that are not finite; empty if the numbers are not those of rows."""
    if not isinstance(found, Tensor) or not found.ndim:
        return ()
    return tuple(found.isfinite().logical_not().nonzero()[:_MOST_ROWS, 0].tolist())
