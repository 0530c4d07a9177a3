"""What a step did, by name."""

import torch
from torch import Tensor

from steadygrad.balance.join import Join, Outcome
from steadygrad.balance.weights import cosine_name
from steadygrad.formulas.balance import shares

__all__ = ["metrics_of"]


def metrics_of(core: Join, outcome: Outcome) -> dict[str, Tensor]:
    """A step's numbers; the table is in :attr:`LossBalancer.metrics`."""
    norms = core.averages.kind.norms(outcome.sums, outcome.items, core.ranks.size)
    vectors = {
        "ratio": shares(outcome.averages, outcome.active),
        "share_before": shares(norms, outcome.active),
        # Some aggregators turn a gradient round.
        "share_after": shares((norms * outcome.scales).abs(), outcome.active),
        "target": outcome.targets,
        "norm": norms,
        "average": outcome.averages,
        "scale": outcome.scales,
        "nonfinite": core.nonfinite.clone(),
        "zero": core.zero.clone(),
    }
    if core.combiner.needs_matrix:
        del vectors["share_after"]
    found = {
        f"{kind}_{name}": value
        for kind, vector in vectors.items()
        for name, value in zip(core.names, vector, strict=True)
    }
    if core.ranks.differs is not None:
        found["disagreement"] = core.ranks.differs
    return {**found, **_angles(core, outcome)} if core.monitor else found


def _angles(core: Join, outcome: Outcome) -> dict[str, Tensor]:
    if outcome.products is None:
        return {}
    both = outcome.active[:, None] & outcome.active
    products = torch.where(both, outcome.products, 0.0)
    total = outcome.handed_on
    if total is None:
        total = (outcome.scales @ products @ outcome.scales).clamp_min(0).sqrt()
    lengths = outcome.products.diagonal().sqrt()
    cosines = outcome.products / (lengths[:, None] * lengths)
    pairs = {
        cosine_name(a, b): cosines[i, j]
        for i, a in enumerate(core.names)
        for j, b in enumerate(core.names)
        if i < j
    }
    return {"total": total, **pairs}
