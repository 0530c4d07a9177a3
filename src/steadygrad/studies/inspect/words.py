"""The findings in words: one template for each kind, the answer, the remarks, and the table."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.analysis import WEIGHTS_LOST
from steadygrad.studies.inspect.schema import AFTER, BEFORE, STEPS, TITLES, Proposal, Seen, Summary
from steadygrad.studies.schema import Table
from steadygrad.studies.text import listed

__all__ = ["answer", "code", "layer_title", "power", "remarks", "table"]

ENDS = {"interrupted": "was interrupted", "budget": "ran out of its budget", "failed": "failed"}
EFFECTS = {
    "nonfinite_at_any_scale": "Look for the cause in the backward pass of {}, or train it in "
    "bfloat16 or float32; torch.amp.GradScaler halves its scale at each of these steps.",
    "regressed": "With the proposed scales more gradients underflow than with one loss scale in "
    "{}.",
    "overflowed_after": "The proposed scales overflowed in {}: leave dynamic scaling on (the "
    "default), for occasional gradients are far larger than the rest.",
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
# The verdict, as it is said of all steps or of some, and its reason.
VERDICTS = {
    "unmeasured": ("no layer can be judged yet", ": the study {end} before scales were found"),
    "unseen": (
        "nothing can be said of the gradients",
        ": none was finite, down to a scale of {scale}",
    ),
    "zero": ("the training loss is exactly 0 at the end, and so are its gradients", ""),
    "enough": ("one loss scale is enough {where}", ": it settled at {scale}{overflows}"),
    "higher": (
        "one loss scale is enough if it starts at {start}{guess}",
        ": at {scale}, where it settled, gradients underflow in {underflowing}",
    ),
    "layers": ("no single loss scale fits all layers", ": {losses}"),
    "spread": (
        "no scale prevents that gradients underflow in {underflowing}",
        " at {scale}, where one loss scale settled: their exponents are too widely spread",
    ),
}


def answer(s: Summary) -> str:
    """The answer in one sentence; one that hangs on a condition opens with it."""
    (verdict, *others), told = s.findings, _told(s)
    assert isinstance(verdict, schema.Verdict)
    said, why = (text.format(**told) for text in VERDICTS[verdict.verdict])
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


def _told(s: Summary) -> dict[str, str]:
    """The sentence of each verdict, by its name."""
    found, proposal = s.diagnosis, s.proposal or Proposal(loss_scale=1.0, layer_scales={})
    before, after = s.phases.get(BEFORE), s.phases.get(AFTER)
    own = f"scales of their own for {_few(proposal.layer_scales)}"
    guess = "" if after and after.whole else " (predicted, not trained)"
    losses, skipped = f"try {own}{guess}", before.skipped if before else 0
    if before and after and after.whole and (s.status == "complete" or after.valid_loss):
        both = f"{_loss(after.valid_loss)}, with one loss scale {_loss(before.valid_loss)}"
        losses = f"with {own} the validation loss after {after.steps:,} optimizer steps is {both}"
    inside = "at the boundaries of every layer"
    return {
        "end": ENDS.get(s.status, ""),
        "scale": power(before.loss_scale) if before else "",
        "where": inside if found.internal_underflow else "for every layer (torch.amp.GradScaler)",
        "overflows": f" after {_steps(skipped)} with an overflow" * (skipped > 0),
        "start": power(proposal.loss_scale),
        "guess": guess,
        "underflowing": _in("underflowing", found.underflowing),
        "losses": losses,
    }


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    return tuple([TEMPLATES[type(found)](found, s) for found in s.findings[1:]][:3])


def _unfinished(found: schema.Unfinished, s: Summary) -> str:
    more = "" if s.status == "failed" else "; --resume continues it"
    return f"The study {ENDS[s.status]} before all steps were trained{more}."


def _shortened(found: schema.Shortened, s: Summary) -> str:
    steps = f"{found.steps} optimizer steps in each training, not {STEPS}"
    return f"The budget has time for about {steps}; --steps sets their number."


def _forward(found: schema.Forward, s: Summary) -> str:
    worst = sorted(found.causes.items(), key=lambda pair: -pair[1])
    said = "; ".join(f"in {_steps(count)} {cause}" for cause, count in worst)
    remedy = "train this part in bfloat16 or float32, or look for what makes its values so large"
    if "NaN" in worst[0][0]:
        remedy = "look for NaN in inputs and labels"
    return f"{said[0].upper()}{said[1:]}: {remedy}."


def _accumulated(found: schema.Accumulated, s: Summary) -> str:
    if found.bugs:
        return " ".join(f"Accumulation over {cut.name}: {cut.words}" for cut in found.bugs)
    return "Accumulated over micro-batches of any size, the gradient is that of the whole batch."


def _remedy(found: schema.Remedy, s: Summary) -> str:
    assert s.proposal is not None
    said = f"torch.amp.GradScaler(init_scale={_python(s.proposal.loss_scale)})"
    if s.proposal.layer_scales:
        said = f'{s.proposal.code}, or with "auto" in place of the scales'
    return f"{REMEDIES[found.loss]} {said}."


def _effect(found: schema.Effect, s: Summary) -> str:
    return EFFECTS[found.name].format(_in(found.name, found.layers))


TEMPLATES: dict[type, Callable[[Any, Summary], str]] = {
    schema.Unfinished: _unfinished,
    schema.Shortened: _shortened,
    schema.Forward: _forward,
    schema.Accumulated: _accumulated,
    schema.Remedy: _remedy,
    schema.Effect: _effect,
}


def table(s: Summary) -> Table | None:
    """A row for each layer, before and after; None where no gradient was counted."""
    found, own, rows = s.diagnosis, s.proposal.layer_scales if s.proposal else {}, []
    verdicts: dict[str, Collection[str]] = {
        "underflows": found.underflowing,
        "limiting": found.limiting,
        "nonfinite": found.nonfinite_at_any_scale,
        "regressed": found.regressed,
    }
    for layer in s.layers:
        lost = f"{_lost(layer.before)} / {_lost(layer.after)}"
        overflows = f"{layer.before.overflows:,} / {layer.after.overflows:,}"
        scale = power(own[layer.name]) if layer.name in own else "–"
        verdict = ", ".join(text for text, layers in verdicts.items() if layer.name in layers)
        rows.append((layer_title(layer.name), lost, overflows, scale, verdict or "–"))
    scales = (f"{TITLES[phase]} ({power(run.loss_scale)})" for phase, run in s.phases.items())
    heads = ("layer", "zero or subnormal", "steps that overflow", "scale of its own", "verdict")
    title = f"{s.task}: {' / '.join(scales)}"
    return Table(title, heads, tuple(rows), text_columns=1) if rows else None


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


def _in(name: str, layers: dict[str, float]) -> str:
    """Layers, the worst first, with their steps or shares, which the field's name tells."""
    steps = name in ("nonfinite_at_any_scale", "overflowed_after", "limiting")
    worst = sorted(layers.items(), key=lambda pair: -pair[1])
    return _few(f"{layer_title(n)} ({_steps(v) if steps else f'{v:.0%}'})" for n, v in worst)


def _few(names: Iterable[str]) -> str:
    found = [*names]
    return listed(
        [*found[:3], f"{len(found) - 3} more layers"] if len(found) > 4 else found or [""]
    )


def _steps(count: float) -> str:
    return f"{count:,.0f} step{'s' * (count != 1)}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
