"""The findings of a study in sentences that a practitioner can act on."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.studies.inspect.diagnosis import WEIGHTS_LOST, Diagnosis, Proposal
from steadygrad.studies.inspect.schema import AFTER, BEFORE, layer_title
from steadygrad.studies.text import listed

__all__ = ["code", "explain"]

ENDINGS = {
    "budget": "The time budget ended before all measurements were made.",
    "interrupted": "The study was interrupted before all measurements were made.",
    "failed": "Training failed before all measurements were made.",
}


def explain(
    status: str,
    phases: Mapping[str, Mapping[str, Any]],
    diagnosis: Diagnosis,
    proposal: Proposal | None,
) -> list[str]:
    """The findings, the most important first, then the remedies; phases are rows of the summary."""
    said = [ENDINGS[status]] if status in ENDINGS else []
    if proposal is None:
        more = "" if status in ("failed", "complete") else " --resume continues the study."
        return [*said, f"No layer can be judged yet.{more}"]
    before, after = phases[BEFORE], phases.get(AFTER, {})
    # Whether the remedy is one loss scale that starts higher.
    one_scale = not (proposal.layer_scales or diagnosis.limiting)
    larger = one_scale and proposal.loss_scale > before["loss_scale"]
    scale = f"2^{math.log2(before['loss_scale']):.0f}"
    said += _forward(diagnosis, before)
    if diagnosis.forward and sum(diagnosis.forward.values()) >= before["steps"]:
        return [*said, "No step was finite, so nothing can be said of the gradients."]
    said += [
        f"In {layer_title(name)}, gradients were not finite in {_steps(count)} whatever the "
        "scale. Look for the cause in its backward pass, or train it in bfloat16 or float32. "
        "These steps did not move the scales here; torch.amp.GradScaler halves its scale at "
        "each of them."
        for name, count in diagnosis.nonfinite_at_any_scale.items()
    ]
    if before.get("loss") == 0:
        return [*said, "The training loss is exactly 0 at the end, and so are its gradients."]
    if diagnosis.underflowing:
        said += _underflow(scale, diagnosis, proposal, larger)
    elif not diagnosis.fault:
        where = "at the boundaries of" if diagnosis.internal_underflow else "for"
        way = f" after {_steps(before['skipped'])} with an overflow" if before["skipped"] else ""
        said.append(f"One loss scale is enough {where} every layer. It settled at {scale}{way}.")
    said += _elsewhere(diagnosis)
    first, last = before.get("valid_loss"), after.get("valid_loss")
    if first is not None and last is not None:
        said.append(
            f"Validation loss after {_steps(after['steps'])}: {first:.4g} with one loss scale, "
            f"{last:.4g} with the proposed scales."
        )
    return said + _remedy(diagnosis, proposal, larger)


def _forward(diagnosis: Diagnosis, before: Mapping[str, Any]) -> Iterable[str]:
    for cause, count in sorted(diagnosis.forward.items(), key=lambda pair: -pair[1]):
        remedy = "Look for NaN in inputs and labels"
        if "NaN" not in cause:
            what = "look for what makes its values so large"
            remedy = f"Train this part in bfloat16 or float32, or {what}"
        yield (
            f"In {count} of {_steps(before['steps'])}, {cause}. That is in the forward pass, where "
            f"no loss scale helps, and such steps are not counted below. {remedy}."
        )


def _underflow(scale: str, diagnosis: Diagnosis, proposal: Proposal, larger: bool) -> Iterable[str]:
    said = f"gradients underflow in {_shares(diagnosis.underflowing)}."
    if larger:
        yield f"One loss scale can be enough, but {scale} is too small: {said}"
    elif proposal.layer_scales:
        yield f"No single loss scale fits all layers. At {scale}, where it settled, {said}"
    else:
        yield (
            f"At {scale}, where the loss scale settled, {said} No scales with enough headroom "
            "prevent it: the exponents are too widely spread."
        )
    if diagnosis.limiting:
        limiting = _counts(diagnosis.limiting)
        yield f"Overflow in {limiting} keeps the loss scale from being larger."
    if diagnosis.regressed:
        yield (
            "With the proposed scales, more gradients underflow than with one loss scale in "
            f"{_shares(diagnosis.regressed)}."
        )


def _elsewhere(diagnosis: Diagnosis) -> Iterable[str]:
    if diagnosis.overflowed_after:
        yield (
            f"The proposed scales overflowed in {_counts(diagnosis.overflowed_after)}. Leave "
            "dynamic scaling on (the default): occasional gradients are far larger than the rest."
        )
    if diagnosis.internal_underflow:
        yield (
            f"Whatever the scale, over {WEIGHTS_LOST:.0%} of the weight gradients are zero or "
            f"subnormal in {_shares(diagnosis.internal_underflow)}. Either they really are zero, "
            "or they underflow inside the layer, where a boundary scale cannot help. In that "
            "case, scale smaller parts of the layer, or train it in bfloat16."
        )


def _remedy(diagnosis: Diagnosis, proposal: Proposal, larger: bool) -> list[str]:
    if proposal.layer_scales:
        return [f'Train with {code(proposal)}, or with "auto" in place of the scales.']
    if larger:
        return [f"Train with torch.amp.GradScaler(init_scale={_python(proposal.loss_scale)})."]
    enough = not (diagnosis.fault or diagnosis.internal_underflow)
    return ["torch.amp.GradScaler is enough."] if enough else []


def code(proposal: Proposal) -> str:
    """The line of Python that makes the proposed scaler."""
    loss = f"init_scale={_python(proposal.loss_scale)}"
    layers = ", ".join(f'"{name}": {_python(s)}' for name, s in proposal.layer_scales.items())
    return f"LayerwiseGradScaler(model, {{{layers}}}, {loss})"


def _shares(layers: Mapping[str, float]) -> str:
    worst = sorted(layers.items(), key=lambda pair: -pair[1])
    return listed(f"{layer_title(name)} ({share:.0%})" for name, share in worst)


def _counts(layers: Mapping[str, int]) -> str:
    return listed(f"{layer_title(name)} ({_steps(count)})" for name, count in layers.items())


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _python(scale: float) -> str:
    exponent = round(math.log2(scale))
    return f"2.0**{exponent}" if exponent >= 0 else f"2.0**({exponent})"
