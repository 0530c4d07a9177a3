"""The findings of a study: a pure function of the header and the results."""

import math
from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import schema, words
from steadygrad.studies.inspect.analysis import by_phase, diagnose, layers_of, propose, shares_of
from steadygrad.studies.inspect.schema import AFTER, BEFORE, PARTS, SEARCH, STEPS, Part, Summary

__all__ = ["summarize"]

Phases = dict[str, list[Part]]


def summarize(header: schema.Header, results: Results, status: str) -> Summary:
    """Draws the conclusions; ``status`` is as in :class:`steadygrad.studies.schema.Summary`."""
    parts = results.select(Part)
    phases = by_phase(parts)
    compared = len(phases[BEFORE]) == len(phases[SEARCH]) == PARTS
    found, proposal = diagnose(parts if compared else []), propose(parts) if compared else None
    verdict, forward = _verdict(phases, found, proposal), _forward(phases)
    before, after = results.get(schema.Phase, BEFORE), results.get(schema.Phase, AFTER)
    if proposal:
        # Where no gradient was finite there is nothing to propose.
        unseen = verdict == "unseen"
        proposal = None if unseen else replace(proposal, code=words.code(proposal))
    cuts = [cut for result in results.select(schema.Accumulation) for cut in result.cuts]
    short = header.settings.steps is None and header.plan.steps < STEPS
    findings = (
        schema.Verdict(verdict=verdict),
        None if status == "complete" else schema.Unfinished(),
        forward if compared else None,
        *_effects(found, "nonfinite_at_any_scale"),
        schema.Accumulated(bugs=tuple(cut for cut in cuts if cut.bug)) if cuts else None,
        schema.Remedy(loss=_loss(before, after)) if verdict in ("layers", "higher") else None,
        schema.Shortened(steps=header.plan.steps) if short else None,
        *_effects(found, "regressed", "overflowed_after", "internal_underflow", "limiting"),
    )
    summary = Summary(
        study="inspect",
        status=status,
        task=header.task.name,
        sample=header.task.sample,
        findings=tuple(finding for finding in findings if finding is not None),
        diagnosis=found,
        proposal=proposal,
        phases={
            phase: _training(phases[phase], end)
            for phase, end in ((BEFORE, before), (AFTER, after))
            if phases[phase]
        },
        layers=tuple(_layers(phases)),
    )
    return summary.worded(words)


def _verdict(
    phases: Phases, found: schema.Diagnosis, proposal: schema.Proposal | None
) -> schema.VerdictName:
    if proposal is None:
        return "unmeasured"
    last = phases[BEFORE][-1]
    # Of steps that are left out only what is not finite is counted.
    if all(held.overflow == 1 for held in shares_of(phases[BEFORE]).values()):
        return "unseen"
    if last.loss == 0:
        return "zero"
    if not found.underflowing:
        return "enough"
    if proposal.layer_scales:
        return "layers"
    higher = not found.limiting and proposal.loss_scale > 2.0 ** last.scales[""]
    return "higher" if higher else "spread"


def _forward(phases: Phases) -> schema.Forward | None:
    for parts in (phases[BEFORE], phases[AFTER]):
        causes = sum((Counter(part.forward) for part in parts), Counter[str]())
        if causes:
            return schema.Forward(causes=dict(causes), count=causes.total(), steps=parts[-1].steps)
    return None


def _effects(found: schema.Diagnosis, *names: schema.EffectName) -> Iterable[schema.Effect]:
    for name in names:
        if layers := getattr(found, name):
            yield schema.Effect(name=name, layers=layers)


def _loss(before: schema.Phase | None, after: schema.Phase | None) -> schema.LossName:
    if before is None or after is None:
        return "unknown"
    one, own = (math.inf if end.valid_loss is None else end.valid_loss for end in (before, after))
    return "lower" if own < one else "not lower"


def _training(parts: list[Part], end: schema.Phase | None) -> schema.Training:
    return schema.Training(
        steps=parts[-1].steps,
        skipped=sum(part.skipped for part in parts),
        loss=parts[-1].loss,
        loss_scale=2.0 ** parts[-1].scales[""],
        valid_loss=end.valid_loss if end else None,
        whole=len(parts) == PARTS,
    )


def _layers(phases: Phases) -> Iterable[schema.Layer]:
    shares = {phase: shares_of(parts) for phase, parts in phases.items()}
    for name in layers_of([part for parts in phases.values() for part in parts]):
        before, after = (
            schema.Seen(
                activations=shares[phase].get((name, "activations")),
                weights=shares[phase].get((name, "weights")),
                overflows=sum(part.overflows.get(name, 0) for part in phases[phase]),
            )
            for phase in (BEFORE, AFTER)
        )
        yield schema.Layer(name=name, before=before, after=after)
