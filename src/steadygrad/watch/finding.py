"""The first fault of a pass: a search through the tensors that it made."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

__all__ = ["Finding", "Seen", "first_fault", "is_finite"]

BATCH, WEIGHT, INPUT, OUTPUT = "batch", "weight", "input", "output"
LOSS, GRADIENT, PARAMETER = "loss", "gradient", "parameter"
LEFT, UNSEEN = "left", "unseen"


class Seen:
    """A tensor that a module took or gave, in the order of the forward pass.

    Attributes:
        what: ``"batch"``, ``"output"``, or ``"input"`` for one that no module had given.
        name: Name of the module.
        batch: Index of the pass.
        value: Whether it is finite, or a number that is finite exactly if the tensor is, possibly
            on a device.
        gradient: Whether its gradient is finite, likewise; None if the gradient was not seen.
        takers: Modules that were handed this very tensor, inner ones first; None if unknown.
        returned: Whether the model returned it.
        weight: The weight whose gradient stands for its own; empty for none.
        time: Number of the call in compiled code.
    """

    __slots__ = (
        "batch", "gradient", "name", "returned", "takers", "time", "value", "weight", "what",
    )  # fmt: skip

    def __init__(self, what: str, name: str, batch: int, value: Any = True) -> None:
        self.what, self.name, self.batch, self.value = what, name, batch, value
        self.gradient: Any = None
        self.takers: list[str] | None = []
        self.returned, self.weight = False, ""
        self.time: Any = None


@dataclass(frozen=True)
class Finding:
    """The first fault of a batch, and its neighbours.

    Attributes:
        kind: ``"batch"``, ``"weight"``, ``"output"``, ``"loss"``, ``"gradient"`` or
            ``"parameter"``: the place where something first was not finite. ``"left"``: a gradient
            that is not finite though no pass since the last report made it so. ``"unseen"``: the
            watch has seen no forward pass.
        name: The module whose forward (``"output"``) or backward pass (``"gradient"``) made it, or
            the parameter; empty for the model's own code.
        seen_in: The tensor in which it was seen, in words.
        finite_before: The last tensor before it that was finite; empty for none.
        finite_after: The next tensor that was finite; empty for none.
        batch: Index of the batch: forward passes with gradients since the watch was made.
        rank: The process.
        last: Index of the last batch in the unbroken row of faults that begins with it.
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

    def __str__(self) -> str:
        """One paragraph: the culprit, then what is finite on either side."""
        batch = f"Batch {self.batch}" if self.batch >= 0 else "No batch"
        return (
            f"{batch}, rank {self.rank}: {self.cause}. "
            f"First not finite: {self.seen_in}. Finite before it: {self.finite_before or 'nothing'}"
            f". Finite after it: {self.finite_after or 'nothing'}."
        )

    @property
    def in_forward(self) -> bool:
        """Whether something was not finite before the backward pass began."""
        return self.kind in (BATCH, WEIGHT, OUTPUT)

    @property
    def cause(self) -> str:
        """The culprit in words."""
        return _CAUSES[self.kind].format(repr(self.name) if self.name else "the model's own code")


_CAUSES = {
    BATCH: "the batch itself is not finite",
    WEIGHT: "the weight {} is not finite, before anything was computed with it",
    OUTPUT: "the forward pass of {} overflowed or divided by zero: what it was given is finite",
    LOSS: "the loss is at fault: the model's outputs are finite, their gradient is not",
    GRADIENT: "the backward pass of {} made a gradient that is not finite",
    PARAMETER: "the gradient of {} is not finite, though that of its module's output is",
    LEFT: "the gradient of {} is not finite, and no pass since the last report made it so",
    UNSEEN: "the gradient of {} is not finite, and the watch has seen no forward pass: it was made "
    "before torch.compile or after the forward pass, or the loop calls another module",
}


def is_finite(found: Any) -> bool:
    """Whether a value or a gradient is finite; an unknown one counts as finite."""
    return found is True or found is None or (found is not False and math.isfinite(found))


def first_fault(
    seen: Sequence[Seen], called: Collection[str], weights: Sequence[str], batch: int
) -> Finding | None:
    """Finds the first non-finite value of a pass; None if all are finite.

    Args:
        seen: In the order of the forward pass; the backward pass goes through it from the end.
        called: Names of all modules that were called.
        weights: Names of weights that are not finite.
        batch: Index of the pass.
    """
    at = next((i for i, one in enumerate(seen) if not is_finite(one.value)), None)
    if at is not None:
        one = seen[at]
        kind, name = one.what, one.name
        if kind == INPUT:
            # No module gave it, so the code around this one did.
            kind, name = OUTPUT, _around(name, called)
        own = [w for w in weights if _around(w, called) == name] if kind == OUTPUT else []
        kind, name = (WEIGHT, own[0]) if own else (kind, name)
        finite = [is_finite(other.value) for other in seen]
        return Finding(kind, name, *_bracket(seen, at, finite, ""), batch, order=(0, at, not own))
    signals = [one for one in reversed(seen) if one.gradient is not None]
    finite = [is_finite(one.gradient) for one in signals]
    if all(finite):
        return None
    at = finite.index(False)
    kind, name = _backward_culprit(signals, at, finite, called)
    bracket = _bracket(signals, at, finite, "the gradient at ")
    if kind == LOSS:
        # What came before is the forward pass.
        bracket = "the gradient at the output of the model", _words(seen[-1]), bracket[2]
    return Finding(kind, name, *bracket, batch, order=(1, at, True))


def _backward_culprit(
    signals: Sequence[Seen], at: int, finite: Sequence[bool], called: Collection[str]
) -> tuple[str, str]:
    """Kind and name of the place between the last finite gradient and the first non-finite one."""
    one = signals[at]
    if one.returned or not at:
        return LOSS, ""
    if one.what == INPUT:
        return GRADIENT, one.name
    if one.weight and finite[at + 1 :] and all(finite[at + 1 :]):
        # Had the gradient at the output been at fault, it would have gone on.
        return PARAMETER, one.weight
    if one.takers is None:
        return GRADIENT, signals[at - 1].name
    known = {other.name for other in signals[:at]}
    direct = [name for name in one.takers if name in known]
    if direct:
        return GRADIENT, direct[0]
    pairs = zip(one.name.split("."), signals[at - 1].name.split("."), strict=False)
    shared = [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
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
