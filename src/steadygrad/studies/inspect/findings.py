"""The findings of a study: a pure function of the header and the results."""

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import analysis, schema, words
from steadygrad.studies.inspect.analysis import Phases
from steadygrad.studies.inspect.schema import AFTER, BEFORE, SEARCH, Part, Summary


def summarize(header: schema.Header, results: Results, status: str) -> Summary:
    """Draws the conclusions; ``status`` is as in :class:`steadygrad.studies.schema.Summary`."""
    phases = analysis.by_phase(results)
    ends = {phase: results.get(schema.Phase, phase) for phase in (BEFORE, AFTER)}
    verdict: schema.VerdictName = "unmeasured"
    effects, proposal = list[schema.Effect](), None
    if phases[BEFORE] and phases[SEARCH]:
        found, proposal = analysis.diagnose(phases), analysis.propose(phases)
        effects = [schema.Effect(name=name, layers=at) for name, at in found.items() if at]
        verdict = _verdict(phases[BEFORE], found, proposal)
        # Where no gradient was finite there is nothing to propose.
        proposal = None if verdict == "unseen" else replace(proposal, code=words.code(proposal))
    first = [effect for effect in effects if effect.name == "nonfinite_at_any_scale"]
    findings = (
        schema.Verdict(verdict=verdict),
        _forward(phases),
        *first,
        schema.Remedy(loss=_loss(**ends)) if verdict in ("layers", "higher") else None,
        *(effect for effect in effects if effect not in first),
    )
    return Summary(
        study="inspect",
        status=status,
        task=header.task.name,
        sample=header.task.sample,
        findings=tuple(finding for finding in findings if finding is not None),
        proposal=proposal,
        phases={phase: _trained(end) for phase, end in ends.items() if end},
        layers=tuple(_layers(phases)),
    ).worded(words)


def _verdict(
    before: Sequence[Part],
    found: Mapping[schema.EffectName, Mapping[str, float]],
    proposal: schema.Proposal,
) -> schema.VerdictName:
    # Of steps that are left out only what is not finite is counted.
    if all(held.overflow == 1 for held in analysis.shares_of(before).values()):
        return "unseen"
    if before[-1].loss == 0:
        return "zero"
    if not found["underflowing"]:
        return "enough"
    if proposal.layer_scales:
        return "layers"
    higher = not found["limiting"] and proposal.loss_scale > 2.0 ** before[-1].scales[""]
    return "higher" if higher else "spread"


def _forward(phases: Phases) -> schema.Forward | None:
    """Of the first training with such a step."""
    for parts in (phases[BEFORE], phases[AFTER]):
        if causes := analysis.added_up(parts, "forward"):
            return schema.Forward(causes=dict(causes), count=causes.total(), steps=parts[-1].steps)
    return None


def _loss(before: schema.Phase | None, after: schema.Phase | None) -> schema.LossName:
    if before is None or after is None:
        return "unknown"
    one, own = (math.inf if end.valid_loss is None else end.valid_loss for end in (before, after))
    return "lower" if own < one else "not lower"


def _trained(end: schema.Phase) -> schema.Trained:
    last = end.parts[-1]
    return schema.Trained(
        steps=last.steps,
        skipped=sum(part.skipped for part in end.parts),
        loss=last.loss,
        loss_scale=2.0 ** last.scales[""],
        valid_loss=end.valid_loss,
    )


def _layers(phases: Phases) -> Iterable[schema.Layer]:
    shares = {phase: analysis.shares_of(phases[phase]) for phase in (BEFORE, AFTER)}
    for name in analysis.layers_of(*phases.values()):
        seen = {
            phase: schema.Seen(
                activations=held.get((name, "activations")),
                weights=held.get((name, "weights")),
                overflows=sum(part.overflows.get(name, 0) for part in phases[phase]),
            )
            for phase, held in shares.items()
        }
        yield schema.Layer(name=name, **seen)
