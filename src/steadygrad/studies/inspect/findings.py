"""The findings of a study: a pure function of the header and the results."""

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import analysis, schema, words
from steadygrad.studies.inspect.analysis import Phases
from steadygrad.studies.inspect.schema import AFTER, BEFORE, PARTS, SEARCH, Part, Summary


def summarize(header: schema.Header, results: Results, status: str) -> Summary:
    """Draws the conclusions; ``status`` is as in :class:`steadygrad.studies.schema.Summary`."""
    phases = analysis.by_phase(results)
    ends = {phase: results.get(schema.Phase, phase) for phase in (BEFORE, AFTER)}
    verdict: schema.VerdictName = "unmeasured"
    found, proposal = schema.Diagnosis(), None
    if len(phases[BEFORE]) == len(phases[SEARCH]) == PARTS:
        found, proposal = analysis.diagnose(phases), analysis.propose(phases)
        verdict = _verdict(phases[BEFORE], found, proposal)
        # Where no gradient was finite there is nothing to propose.
        proposal = None if verdict == "unseen" else replace(proposal, code=words.code(proposal))
    findings = (
        schema.Verdict(verdict=verdict),
        _forward(phases),
        *_effects(found, "nonfinite_at_any_scale"),
        schema.Remedy(loss=_loss(**ends)) if verdict in ("layers", "higher") else None,
        *_effects(found, "regressed", "internal_underflow", "limiting"),
    )
    return Summary(
        study="inspect",
        status=status,
        task=header.task.name,
        sample=header.task.sample,
        findings=tuple(finding for finding in findings if finding is not None),
        diagnosis=found,
        proposal=proposal,
        phases={name: _training(phases[name], ends[name]) for name in ends if phases[name]},
        layers=tuple(_layers(phases, analysis.layers_of(results.select(Part)))),
    ).worded(words)


def _verdict(
    before: Sequence[Part], found: schema.Diagnosis, proposal: schema.Proposal
) -> schema.VerdictName:
    # Of steps that are left out only what is not finite is counted.
    if all(held.overflow == 1 for held in analysis.shares_of(before).values()):
        return "unseen"
    if before[-1].loss == 0:
        return "zero"
    if not found.underflowing:
        return "enough"
    if proposal.layer_scales:
        return "layers"
    higher = not found.limiting and proposal.loss_scale > 2.0 ** before[-1].scales[""]
    return "higher" if higher else "spread"


def _forward(phases: Phases) -> schema.Forward | None:
    """Of the first training with such a step."""
    for parts in (phases[BEFORE], phases[AFTER]):
        if causes := analysis.added_up(parts, "forward"):
            steps = parts[-1].steps
            return schema.Forward(causes=dict(causes), count=causes.total(), steps=steps)
    return None


def _effects(found: schema.Diagnosis, *names: schema.EffectName) -> list[schema.Effect]:
    effects = [schema.Effect(name=name, layers=getattr(found, name)) for name in names]
    return [effect for effect in effects if effect.layers]


def _loss(before: schema.Phase | None, after: schema.Phase | None) -> schema.LossName:
    if before is None or after is None:
        return "unknown"
    one, own = (math.inf if end.valid_loss is None else end.valid_loss for end in (before, after))
    return "lower" if own < one else "not lower"


def _training(parts: Sequence[Part], end: schema.Phase | None) -> schema.Training:
    return schema.Training(
        steps=parts[-1].steps,
        skipped=sum(part.skipped for part in parts),
        loss=parts[-1].loss,
        loss_scale=2.0 ** parts[-1].scales[""],
        valid_loss=end.valid_loss if end else None,
        whole=len(parts) == PARTS,
    )


def _layers(phases: Phases, names: Iterable[str]) -> Iterable[schema.Layer]:
    shares = {phase: analysis.shares_of(phases[phase]) for phase in (BEFORE, AFTER)}
    for name in names:
        seen = {
            phase: schema.Seen(
                activations=held.get((name, "activations")),
                weights=held.get((name, "weights")),
                overflows=sum(part.overflows.get(name, 0) for part in phases[phase]),
            )
            for phase, held in shares.items()
        }
        yield schema.Layer(name=name, **seen)
