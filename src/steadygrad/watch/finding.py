"""Values and gradients of one batch, and the first fault among them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

# Rows that a finding lists at most.
_MOST_ROWS = 16


@dataclass(eq=False)
class Seen:
    """A tensor that a module took or gave: an input is one that no module had given."""

    what: Literal["batch", "input", "output"]
    name: str
    # True if finite, None if not seen, else numbers, one a row or one in all, finite where it is.
    value: Any = True
    gradient: Any = None
    takers: list[str] = field(default_factory=list)  # modules that were handed this very tensor
    returned: bool = False  # whether the model returned it: its gradient is the loss's as well

    def __str__(self) -> str:
        name = repr(self.name) if self.name else "the model"
        return "the batch" if self.what == "batch" else f"the {self.what} of {name}"


@dataclass(frozen=True)
class Finding:
    """The first fault of a batch, with the last finite value before the fault.

    Attributes:
        kind: ``"batch"``, ``"weight"``, ``"output"``, ``"loss"``, ``"gradient"`` or
            ``"parameter"``: the place where something first was not finite. Of a gradient
            ``"unseen"``, where no pass was seen to make it so, and ``"unknown"``, where what was
            seen does not say why.
        name: The module whose forward (``"output"``) or backward pass (``"gradient"``) made it, or
            the parameter; empty for the model's own code, and where it is not known.
        seen_in: The tensor in which it was seen, in words.
        finite_before: The last tensor before it that was finite; empty for none.
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
    batch: int = -1
    rank: int = 0
    last: int = -1
    # Place in the order of execution: forward, backward, a guess, or none known.
    order: tuple[int, int, bool] = field(default=(3, 0, False), repr=False)
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        batch = f"Batch {self.batch}" if self.batch >= 0 else "No batch"
        rows = f", row{'s' * (len(self.rows) > 1)} {', '.join(map(str, self.rows))}"
        return (
            f"{batch}, rank {self.rank}: {self.cause}. "
            f"First not finite: {self.seen_in}{rows if self.rows else ''}. "
            f"Finite before it: {self.finite_before or 'nothing'}."
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
    "unseen": "the gradient of {} is not finite, and no pass since the last report made it so: it "
    "was left from before; or the watch was made before torch.compile or after the forward pass, "
    "or the loop calls another module",
    "unknown": "a gradient is not finite, and what was seen does not say why",
}


class Habits:
    """Tensors that are not finite in passes without a fault, as masks of minus infinity are.

    An infinity is a habit once it was seen in such a pass, NaN if it was in all of them.
    """

    def __init__(self) -> None:
        self._passes, self._seen = 0, Counter[tuple[str, str]]()

    def learn(self, seen: Sequence[Seen]) -> None:
        """Takes note of a pass without a fault."""
        self._passes += 1
        self._seen.update({(str(one), sort) for one in seen if (sort := _sort(one.value))})

    def has(self, one: Seen) -> bool:
        """Whether a tensor that is not finite is like this in passes without a fault."""
        sort = _sort(one.value)
        return self._seen[str(one), sort] >= (self._passes if sort == "nan" else 1) > 0


def is_finite(found: Any) -> bool:
    """Whether a value or a gradient is finite; an unknown one counts as finite."""
    return bool(found.isfinite().all()) if isinstance(found, Tensor) else found is not False


@dataclass(eq=False)
class Evidence:
    """Values that a forward pass gave and gradients that the backward pass gave, of one batch."""

    batch: int
    seen: list[Seen]  # in the order of the forward pass; the batch is the first one
    # Gradients that are not from the model's own graph alone; `value` is that part.
    entries: list[Seen] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    # Those of all parameters after a pass that may need to be explained.
    weights: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    twice: bool = False  # whether the loss contains gradients

    def first_fault(self, habits: Habits, broken: Sequence[str]) -> Finding | None:
        """Finds the first non-finite value; None if all are finite.

        Forward comes first: a layer whose input is not finite has a weight gradient of 0 * NaN,
        though all gradients at outputs are finite. ``broken`` are the parameters whose gradients
        the pass made non-finite.
        """
        bad = [i for i, one in enumerate(self.seen) if not is_finite(one.value)]
        nan = [i for i in bad if _sort(self.seen[i].value) == "nan"]
        new = [i for i in bad if not habits.has(self.seen[i])]
        for number, at in enumerate(new, 1):
            if not self._is_absorbed(at, new[number:]):
                # A module that is handed NaN is not to blame for giving it.
                name = self.seen[at].name
                handed = (i for i in nan if i < at and name in self.seen[i].takers)
                return self._in_forward(next(handed, at), order=0)
        found = self._in_backward()
        # Else a guess: a value that was thought to do no harm.
        guess = sorted({*new, *nan})
        if found is None and guess and (new or broken):
            return self._in_forward(guess[0], order=2)
        return self._of_parameter(broken[0]) if found is None and broken else found

    def _is_absorbed(self, at: int, later: Sequence[int]) -> bool:
        """Whether finite values were made of it, and it is a mask's infinity, or of the batch.

        ``later`` are those that are not finite either. The batch may be the reason of the first of
        them, unless that was made of finite tensors.
        """
        one = self.seen[at]
        out = [x for x in self.seen if x.what == "output" and x.name in one.takers]
        if at:
            return bool(out) and _sort(one.value) == "-inf" and all(is_finite(x.value) for x in out)
        out = out or self.seen[1:2]
        took = [x for x in self.seen if self.seen[later[0]].name in x.takers] if later else out
        return bool(took) and all(is_finite(x.value) for x in (*took, *out))

    def _in_forward(self, at: int, order: int) -> Finding:
        one = self.seen[at]
        kind, name = str(one.what), one.name
        if kind == "input":
            # No module gave it, so the code around this one did.
            kind, name = "output", self._around(name)
        weights = [n for n, found in self.weights.items() if not is_finite(found)]
        own = [n for n in weights if kind == "output" and self._around(n) == name]
        kind, name = ("weight", own[0]) if own else (kind, name)
        before = next((str(x) for x in reversed(self.seen[:at]) if is_finite(x.value)), "")
        return self._finding(kind, name, str(one), before, (order, at, not own), one.value)

    def _in_backward(self) -> Finding | None:
        signals = [one for one in reversed(self.seen) if one.gradient is not None]
        finite = [is_finite(one.gradient) for one in signals]
        entered = (x for x in self.entries if is_finite(x.value) and not is_finite(x.gradient))
        # In a loss of gradients the model's own, which came first, are its reason.
        entry = next(entered, None) if all(finite) or not self.twice else None
        at = finite.index(False) if False in finite else 0
        if entry is None and all(finite):
            return None
        bad = signals[at] if entry is None else entry
        # What the model keeps, or an output that cannot be opened, may have code behind it.
        kind, name, where = "unknown", "", f"the gradient at {bad}"
        before = f"the gradient at {signals[at - 1]}" if at else ""
        if entry is None and at:
            # The module between the two; where several took it, the one around them.
            known = {one.name for one in signals[:at]}
            names = [n for n in bad.takers if n in known]
            several = [f"{n}." for n in names or (bad.name, signals[at - 1].name)]
            kind, name = "gradient", names[0] if len({*names}) == 1 else self._around(*several)
        elif bad.returned:
            # What came before is the forward pass.
            kind, before = "loss", str(self.seen[-1])
            where = "the gradient at the output of the model"
        elif entry is not None:
            where = "a gradient that came in elsewhere than at the outputs, or that a hook changed"
        return self._finding(kind, name, where, before, (1, at, True), bad.gradient)

    def _of_parameter(self, name: str) -> Finding:
        """Blames a parameter whose module has finite inputs and a finite output gradient."""
        owner = name.rpartition(".")[0]
        gave = [one for one in self.seen if one.what == "output" and one.name == owner]
        took = [one for one in self.seen if owner in one.takers]
        sure = any(one.gradient is not None for one in gave) and not self.twice
        found = [*(one.gradient for one in gave), *(one.value for one in (*took, *gave))]
        sure = sure and all(map(is_finite, found))
        kind, culprit = ("parameter", name) if sure else ("unknown", "")
        seen_in = f"the gradient of {name!r}"
        return Finding(kind, culprit, seen_in, batch=self.batch, last=self.batch)

    def _finding(
        self, kind: str, name: str, where: str, before: str, order: tuple[int, int, bool], bad: Any
    ) -> Finding:
        # Rows are told where the numbers are those of rows.
        told = isinstance(bad, Tensor) and bad.ndim > 0
        rows = bad.isfinite().logical_not().nonzero()[:_MOST_ROWS, 0].tolist() if told else ()
        return Finding(
            kind, name, where, before, self.batch, last=self.batch, order=order, rows=tuple(rows)
        )

    def _around(self, *names: str) -> str:
        """The innermost module around all of the names that was called itself."""
        around = [m for m in self.called if all(name.startswith(f"{m}.") for name in names)]
        return max(around, key=len, default="")


def _sort(value: Any) -> str:
    """The kind of a value that is not finite: ``"nan"``, ``"inf"`` or only ``"-inf"``."""
    if is_finite(value):
        return ""
    if value.isnan().any():
        return "nan"
    return "inf" if bool((value == torch.inf).any()) else "-inf"
