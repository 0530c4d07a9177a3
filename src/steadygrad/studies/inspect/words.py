"""What is said about a study of float16."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from steadygrad.studies.inspect.verdict import Proposal, Verdict

__all__ = ["Findings", "code", "sentences", "shown_layer"]

ENDINGS = {
    "budget": "The time budget was over before everything planned was measured.",
    "interrupted": "The study was interrupted before everything planned was measured.",
    "failed": "Training failed before everything planned was measured.",
}
SPREAD = "No scales that leave headroom were found to mend it: exponents are spread too widely."
ROOM = (
    "let scales back off, as they do by default, for gradients come that are far above the others."
)


@dataclass(frozen=True)
class Findings:
    """All that words are made from.

    Attributes:
        status: How the study ended.
        phases: Rows of the summary, by the phase's name.
        verdict: Who is at fault.
        proposal: The scales to take; None before there are any.
    """

    status: str
    phases: Mapping[str, Mapping[str, Any]]
    verdict: Verdict
    proposal: Proposal | None


def shown_layer(name: str) -> str:
    """A layer's name; that of the loss is empty."""
    return name or "what lies outside of the layers"


def sentences(found: Findings) -> list[str]:
    """The verdict first, then why, then what to do."""
    said = [ENDINGS[found.status]] if found.status in ENDINGS else []
    if found.proposal is None:
        return [*said, "Nothing can be said yet: go on by --resume RUN --budget TIME."]
    verdict = found.verdict
    said += [_broken(name, count) for name, count in verdict.broken.items()]
    if not verdict.fault:
        said.append(_no_fault(found, found.proposal))
    if verdict.starved:
        said += _starved(found, found.proposal)
    said += [*_spilled(verdict), *_inside(verdict)]
    return said + _after(found) + _remedy(found, found.proposal)


def _broken(name: str, count: int) -> str:
    return (
        f"{shown_layer(name)} made values that are not finite in {_times(count)}, and would at "
        "any scale: look for their cause in its backward pass, or train it in bfloat16 or float32. "
        "These steps did not move the scales here; torch's GradScaler halves its own for each."
    )


def _no_fault(found: Findings, proposal: Proposal) -> str:
    skipped = found.phases["before"]["skipped"]
    way = f" {_times(skipped)} left out while it came down from 2^16." if skipped else ""
    known = "what comes to every layer" if found.verdict.inside else "every layer"
    return (
        f"Nothing is at fault: one loss scale serves {known}. It settled at "
        f"{_power(found.phases['before']['loss_scale'])}.{way}"
    )


def _starved(found: Findings, proposal: Proposal) -> list[str]:
    verdict, scale = found.verdict, found.phases["before"]["loss_scale"]
    lost = f"gradients vanish or lose digits that need not: in {_shares(verdict.starved)}."
    if _larger(found, proposal):
        said = [f"One loss scale seems to be enough, but {_power(scale)} is too small: {lost}"]
    elif proposal.layer_scales:
        said = [
            f"No single loss scale serves all layers. At {_power(scale)}, where it settled, {lost}"
        ]
    else:
        said = [f"At {_power(scale)}, where the one loss scale settled, {lost} {SPREAD}"]
    if verdict.ceiling:
        which = _list(f"{shown_layer(n)} ({_times(c)})" for n, c in verdict.ceiling.items())
        said.append(f"It cannot be larger because of overflow in {which}.")
    if verdict.price:
        said.append(f"At the scales proposed digits are lost in {_shares(verdict.price)} instead.")
    return said


def _larger(found: Findings, proposal: Proposal) -> bool:
    """Whether the remedy is one loss scale that begins higher."""
    one = not (proposal.layer_scales or found.verdict.ceiling)
    return one and proposal.loss_scale > found.phases["before"]["loss_scale"]


def _spilled(verdict: Verdict) -> list[str]:
    if not verdict.spilled:
        return []
    which = _list(f"{shown_layer(n)} ({_times(c)})" for n, c in verdict.spilled.items())
    return [f"At the scales proposed there was overflow in {which}: {ROOM}"]


def _inside(verdict: Verdict) -> list[str]:
    if not verdict.inside:
        return []
    said = (
        "Of the weights' gradients hardly any is a normal number, at any scale, in "
        f"{_shares(verdict.inside)}: they are truly zero, or lost inside, where a scale at the "
        "layer's boundaries does not reach. Scale smaller parts of it, or train it in bfloat16."
    )
    return [said]


def _shares(layers: Mapping[str, float]) -> str:
    worst = sorted(layers.items(), key=lambda pair: -pair[1])
    return _list(f"{shown_layer(name)} ({share:.0%})" for name, share in worst)


def _after(found: Findings) -> list[str]:
    before, after = found.phases.get("before"), found.phases.get("after")
    if not (before and after) or before["valid_loss"] is None or after["valid_loss"] is None:
        return []
    losses = f"{before['valid_loss']:.4g} with one loss scale, {after['valid_loss']:.4g} with"
    return [f"Validation loss after {after['steps']} steps: {losses} the scales proposed."]


def _remedy(found: Findings, proposal: Proposal) -> list[str]:
    verdict = found.verdict
    if proposal.layer_scales:
        return [f'Train with {code(proposal)}, or with "auto" in place of the scales.']
    if verdict.starved and _larger(found, proposal):
        return [f"Train with torch.amp.GradScaler(init_scale={_python(proposal.loss_scale)})."]
    return [] if verdict.fault or verdict.inside else ["torch.amp.GradScaler is enough."]


def code(proposal: Proposal) -> str:
    """The line of Python that makes the proposed scaler."""
    loss = f"init_scale={_python(proposal.loss_scale)}"
    layers = ", ".join(f'"{name}": {_python(s)}' for name, s in proposal.layer_scales.items())
    return f"LayerwiseGradScaler(model, {{{layers}}}, {loss})"


def _python(scale: float) -> str:
    exponent = round(math.log2(scale))
    return f"2.0**{exponent}" if exponent >= 0 else f"2.0**({exponent})"


def _power(scale: float) -> str:
    return f"2^{round(math.log2(scale))}"


def _times(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _list(parts: Iterable[str]) -> str:
    *others, last = list(parts)
    return f"{', '.join(others)} and {last}" if others else last
