"""The first fault of a pass: a search through its events, in the order of execution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Event", "Finding", "first_fault"]

BATCH, WEIGHT, INPUT, OUTPUT = "batch", "weight", "input", "output"
GRADIENT, PARAMETER = "gradient", "parameter"
FORWARD = (BATCH, WEIGHT, INPUT, OUTPUT)


@dataclass(frozen=True)
class Event:
    """One tensor that a pass through the model made or used.

    Attributes:
        what: ``"batch"``, ``"weight"``, ``"input"``, ``"output"``, ``"gradient"`` (of an output)
            or ``"parameter"`` (its gradient).
        name: The module's, or the parameter's; empty for the model itself.
        finite: Whether all its values are.
    """

    what: str
    name: str
    finite: bool


@dataclass(frozen=True)
class Finding:
    """The first fault of the first batch that was not finite.

    Attributes:
        kind: ``"batch"``, ``"weight"``, ``"input"``, ``"output"``, ``"loss"``, ``"gradient"`` or
            ``"parameter"``: the place where something first was not finite.
        name: The culprit: the module whose forward pass (``"output"``), backward pass
            (``"gradient"``) or surrounding code (``"input"``) made it, or the parameter.
        seen_in: The tensor in which it was seen, in words.
        finite_before: What was finite just before; empty for nothing.
        finite_after: What was finite next after it; empty for nothing.
        batch: Index of the batch: forward passes of the model since the watch was made.
        rank: The process.
    """

    kind: str
    name: str
    seen_in: str
    finite_before: str
    finite_after: str
    batch: int
    rank: int = 0
    order: tuple[int, int] = field(default=(0, 0), repr=False)

    def __str__(self) -> str:
        """One paragraph: the culprit, then what is finite on either side."""
        after = f"finite again: {self.finite_after}" if self.finite_after else "nothing after it is"
        return (
            f"Batch {self.batch}, rank {self.rank}: {self.cause}. "
            f"First not finite: {self.seen_in}. Finite before it: {self.finite_before or 'nothing'}"
            f"; {after}."
        )

    @property
    def in_forward(self) -> bool:
        """Whether something was not finite before the backward pass began."""
        return self.kind in FORWARD

    @property
    def cause(self) -> str:
        """The culprit in words."""
        return _CAUSES[self.kind].format(repr(self.name) if self.name else "the model's own code")


_CAUSES = {
    BATCH: "the batch itself is not finite",
    WEIGHT: "the weight {} is not finite, before anything was computed with it",
    INPUT: "code outside of any submodule, just before {}, made something that is not finite",
    OUTPUT: "the forward pass of {} overflowed or divided by zero: what it was given is finite",
    "loss": "the loss is at fault: the model's outputs are finite, their gradient is not",
    GRADIENT: "the backward pass of {} made a gradient that is not finite",
    PARAMETER: "the gradient of {} is not finite, though that of its module's output is",
}


def first_fault(
    events: Sequence[Event],
    consumers: Mapping[str, Sequence[str]],
    batch: int,
) -> Finding | None:
    """Finds the first event that is not finite; None if there is none.

    Args:
        events: In the order of execution.
        consumers: For each module, those that were handed its output itself.
        batch: Index of the pass.
    """
    at = next((i for i, event in enumerate(events) if not event.finite), None)
    if at is None:
        return None
    event = events[at]
    alike = (BATCH, OUTPUT) if event.what in FORWARD else (event.what,)
    before = [e for e in events[:at] if e.what in alike]
    after = next((e for e in events[at:] if e.finite and e.what in alike), None)
    kind, name = event.what, event.name
    if kind == GRADIENT:
        kind, name = _backward_culprit(event, before, consumers)
        before = before or [e for e in events[:at] if e.what == OUTPUT]
    return Finding(
        kind,
        name,
        _seen(event),
        _seen(before[-1]) if before else "",
        _seen(after) if after else "",
        batch,
        order=((0, at) if event.what in FORWARD else (1 + (event.what == PARAMETER), at)),
    )


def _backward_culprit(
    event: Event,
    before: Sequence[Event],
    consumers: Mapping[str, Sequence[str]],
) -> tuple[str, str]:
    """The module between the last finite gradient and the first that is not."""
    if not (event.name and before):
        return "loss", ""
    finite = [e.name for e in before]
    direct = [name for name in consumers.get(event.name, ()) if name in finite]
    # Gradients arrive in the reverse order of the forward pass.
    return GRADIENT, direct[0] if direct else finite[-1]


def _seen(event: Event) -> str:
    if event.what in (BATCH, WEIGHT):
        return {BATCH: "the batch", WEIGHT: f"the weight {event.name!r}"}[event.what]
    where = {
        INPUT: "the input of",
        OUTPUT: "the output of",
        GRADIENT: "the gradient at the output of",
        PARAMETER: "the gradient of",
    }[event.what]
    return f"{where} {repr(event.name) if event.name else 'the model'}"
