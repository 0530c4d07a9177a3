"""The findings in words: the answer, a remark for each kind of finding, and the table."""

import math
from collections.abc import Iterable, Mapping

from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.analysis import WEIGHTS_LOST
from steadygrad.studies.inspect.schema import AFTER, BEFORE, TITLES, Proposal, Seen, Summary
from steadygrad.studies.schema import Table
from steadygrad.studies.text import ENDS, listed, unfinished

EFFECTS = {
    "nonfinite_at_any_scale": "Look for the cause in the backward pass of {}, or train it in "
    "bfloat16 or float32; torch.amp.GradScaler halves its scale at each of these steps.",
    "regressed": "More gradients underflow with the proposed scales than with one in {}.",
    "internal_underflow": f"Whatever the scale, over {WEIGHTS_LOST:.0%} of the weight gradients "
    "are zero or subnormal in {}: they are truly zero, or they underflow inside, where scaling "
    "smaller parts or bfloat16 helps.",
    "limiting": "Overflow in {} keeps the loss scale from being larger.",
}
REMEDIES = {
    "lower": "Train with",
    "not lower": "The validation loss was not lower with",
    "unknown": "Try to train with",
}


def answer(s: Summary) -> str:
    """The answer in one sentence; one that hangs on a condition opens with it."""
    verdict, *others = s.findings
    assert isinstance(verdict, schema.Verdict)
    said, why = _verdict(verdict.verdict, s)
    for found in others:
        if isinstance(found, schema.Forward):
            steps = f"{found.count:,} of {_steps(found.steps)}"
            first = f"The forward pass is not finite in {steps}, where no loss scale helps"
        elif isinstance(found, schema.Effect) and found.name == "nonfinite_at_any_scale":
            first = f"Gradients are not finite at any scale in {_in(found.name, found.layers)}"
        else:
            continue
        then = ": " if verdict.verdict == "unseen" else "; in the other steps "
        return f"{first}, so mend that first{then}{said}."
    return f"{said[0].upper()}{said[1:]}{why}."


def _verdict(verdict: str, s: Summary) -> tuple[str, str]:
    """The verdict, as it is said of all steps or of some, and its reason."""
    if verdict == "unmeasured":
        why = f"the study {ENDS.get(s.status, '')} before scales were found"
        return "no layer can be judged yet", f": {why}"
    before, after = s.phases[BEFORE], s.phases.get(AFTER)
    at = power(before.loss_scale)
    if s.proposal is None:
        why = f"none was finite, down to a scale of {at}"
        return "nothing can be said of the gradients", f": {why}"
    if verdict == "zero":
        return "the training loss is exactly 0 at the end, and so are its gradients", ""
    if verdict == "enough":
        where = "for every layer (torch.amp.GradScaler)"
        if s.effect("internal_underflow"):
            where = "at the boundaries of every layer"
        more = f" after {_steps(before.skipped)} with an overflow" if before.skipped else ""
        return f"one loss scale is enough {where}", f": it settled at {at}{more}"
    starved = f"gradients underflow in {_in('underflowing', s.effect('underflowing'))}"
    if verdict == "spread":
        why = f"one loss scale settled at {at}, and their exponents are too widely spread"
        return f"{starved}, and no scale prevents it", f": {why}"
    guess = "" if after else " (predicted, not trained)"
    if verdict == "higher":
        start = power(s.proposal.loss_scale)
        why = f"at {at}, where it settled, {starved}"
        return f"one loss scale is enough if it starts at {start}{guess}", f": {why}"
    own = f"scales of their own for {_few(s.proposal.layer_scales)}"
    if after:
        ends = (after.valid_loss, before.valid_loss)
        losses = ("not finite" if loss is None else f"{loss:.4g}" for loss in ends)
        both = ", with one loss scale ".join(losses)
        why = f"with {own} the validation loss after {after.steps:,} optimizer steps is {both}"
    else:
        why = f"try {own}{guess}"
    return "no single loss scale fits all layers", f": {why}"


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    in_answer = schema.Effect(name="underflowing", layers=s.effect("underflowing"))
    said = (_remark(found, s) for found in s.findings[1:] if found != in_answer)
    return tuple([*unfinished(s.status), *said][:3])


def _remark(found: schema.Findings, s: Summary) -> str:
    match found:
        case schema.Forward():
            worst = sorted(found.causes.items(), key=lambda pair: -pair[1])
            said = "; ".join(f"in {_steps(count)} {cause}" for cause, count in worst)
            remedy = "look for NaN in the data, or train this part in bfloat16 or float32"
            return f"{said[0].upper()}{said[1:]}: {remedy}."
        case schema.Remedy():
            assert s.proposal is not None
            said = f"torch.amp.GradScaler(init_scale={_python(s.proposal.loss_scale)})"
            if s.proposal.layer_scales:
                said = f'{s.proposal.code}, or with "auto" in place of the scales'
            return f"{REMEDIES[found.loss]} {said}."
    assert isinstance(found, schema.Effect)
    return EFFECTS[found.name].format(_in(found.name, found.layers))


def too_little(s: Summary) -> str | None:
    """Without two phases there is nothing to compare, and no diagnosis."""
    if schema.Verdict(verdict="unmeasured") not in s.findings:
        return None
    return "The budget was over before scales were found: nothing is said of the layers"


def table(s: Summary) -> Table | None:
    """A row for each layer, before and after; None where neither counted a gradient."""
    own, rows = s.proposal.layer_scales if s.proposal else {}, []
    verdicts: dict[str, schema.EffectName] = {
        "underflows": "underflowing",
        "limiting": "limiting",
        "nonfinite": "nonfinite_at_any_scale",
        "regressed": "regressed",
    }
    for layer in s.layers:
        lost = f"{_lost(layer.before)} / {_lost(layer.after)}"
        overflows = f"{layer.before.overflows:,} / {layer.after.overflows:,}"
        scale = power(own[layer.name]) if layer.name in own else "–"
        verdict = ", ".join(text for text, name in verdicts.items() if layer.name in s.effect(name))
        rows.append((layer_title(layer.name), verdict or "–", lost, overflows, scale))
    scales = (f"{TITLES[phase]} ({power(run.loss_scale)})" for phase, run in s.phases.items())
    heads = ("layer", "verdict", "zero or subnormal", "steps that overflow", "scale of its own")
    title = f"{s.task}: {' / '.join(scales)}"
    return Table(title, heads, tuple(rows), text_columns=2) if rows and s.phases else None


def _lost(seen: Seen) -> str:
    """The larger share that is zero or subnormal, at the boundaries or of the weights."""
    shares = [held.lost for held in (seen.activations, seen.weights) if held]
    return f"{max(shares):.1%}" if shares else "–"


def code(proposal: Proposal) -> str:
    """The line of Python that makes the proposed scaler."""
    layers = ", ".join(f'"{name}": {_python(s)}' for name, s in proposal.layer_scales.items())
    return f"LayerwiseGradScaler(model, {{{layers}}}, init_scale={_python(proposal.loss_scale)})"


def _python(scale: float) -> str:
    exponent = round(math.log2(scale))
    return f"2.0**{exponent}" if exponent >= 0 else f"2.0**({exponent})"


def power(scale: float) -> str:
    """A power of two as it is shown."""
    return f"2^{math.log2(scale):g}".replace("-", "−")


def layer_title(name: str) -> str:
    """A layer as it is shown; the empty name stands for all that lies outside of the layers."""
    return name or "the rest of the model"


def _in(name: str, layers: Mapping[str, float]) -> str:
    """Layers, the worst first, with their steps or shares, which the field's name tells."""
    steps = name in ("nonfinite_at_any_scale", "limiting")
    worst = sorted(layers.items(), key=lambda pair: -pair[1])
    return _few(f"{layer_title(n)} ({_steps(v) if steps else f'{v:.0%}'})" for n, v in worst)


def _few(names: Iterable[str]) -> str:
    found = [*names]
    return listed([*found[:3], f"{len(found) - 3} more layers"] if len(found) > 4 else found)


def _steps(count: float) -> str:
    return f"{count:,.0f} step{'s' * (count != 1)}"
