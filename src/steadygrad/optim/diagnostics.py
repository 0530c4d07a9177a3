"""Reports on a step: the parameters that stand out, as numbers with names.

A report on a group of any optimizer has

- ``group``: its name or index; ``skipped``: steps left out because a gradient was not finite;
- ``gradient_norm``: Euclidean norm of the group's gradients;
- ``not_finite``: names of parameters whose gradient is not finite now; ``too_large``: names of
  parameters whose gradient is finite but whose squared norm is not; the step is skipped as well.

LAMB adds ``trust_ratio``, the largest ratios by which directions are multiplied; LANS, which has
two directions, ``gradient_trust_ratio`` too. ScaledAdam adds ``dominance``: largest shares of the
squared norm that clipping goes by; ``rms``: the largest sizes; and, if it clips, ``quartiles`` of
the recent norms (least, quarter, median, three quarters, greatest), the ``threshold``, and
``clipped``, the share of steps clipped since the threshold was last taken.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.clipping import EARLY
from steadygrad.optim.passes import grad_sq_norms


def reports(optimizer: Any, top: int, grad_scale: float) -> list[dict[str, Any]]:
    """A report on each group of an optimizer, from the gradients that are there."""
    optimizer._find_params()
    given = optimizer._gradients(torch.tensor(grad_scale, dtype=torch.float64, device="cpu"))
    found, owners = [], []
    for i, (group, places) in enumerate(optimizer._grouped()):
        found.append(Report(i, group, optimizer.state, top))
        batches = optimizer._build_group(group, places, given.grads, is_report=True)
        for batch in batches:
            batch.refresh(given)
        owners += [(found[-1], batch) for batch in given.worked_on(batches)]
    batches = [batch for _, batch in owners]
    own = [torch.cat([grad_sq_norms(b), bad_elements(b)]) for b in batches]
    norms = optimizer._sums(batches, own, 2)
    for (report, batch), (squares, bad) in zip(owners, norms, strict=True):
        report.add("square", batch, squares)
        report.add("bad", batch, bad)
    optimizer._diagnose(owners, norms)
    return [report.finish() for report in found]


def bad_elements(batch: ParamBatch) -> Tensor:
    """Counts of non-finite elements in each local gradient, with shape ``(1, tensors)``."""
    zero = torch.zeros((), dtype=torch.int64, device=batch.device)
    counts = [zero if g is None else (~torch.isfinite(g)).sum() for g in batch.grads]
    return torch.stack(counts).to(batch.sum_dtype)[None]


class Report:
    """Numbers of the group at a place, with the names of ``top`` parameters in each list."""

    def __init__(
        self, index: int, group: Mapping[str, Any], states: Mapping[Tensor, Any], top: int
    ) -> None:
        params = group["params"]
        names = group.get("param_names") or [f"group {index}, {i}" for i in range(len(params))]
        self._names = {id(p): name for p, name in zip(params, names, strict=True)}
        self._group, self._index, self._top = group, index, top
        self._values: dict[str, dict[str, float]] = {}
        self._shared = states[params[0]] if params else {}

    def add(self, kind: str, batch: ParamBatch, values: Tensor) -> None:
        """Takes one number for each parameter."""
        columns = batch.params, batch.has_grad.tolist(), values.tolist()
        for p, has_grad, value in zip(*columns, strict=True):
            if has_grad:
                self._values.setdefault(kind, {})[self._names[id(p)]] = value

    def finish(self) -> dict[str, Any]:
        """The report."""
        squares, counts = self._values.pop("square", {}), self._values.pop("bad", {})
        if "clipping_scale" in self._group:
            terms = self._values.setdefault("dominance", {})
            total = sum(terms.values())
            terms.update({name: term / total if total else 0.0 for name, term in terms.items()})
        return {
            "group": self._group.get("name", self._index),
            "skipped": int(self._shared.get("skipped", 0)),
            "gradient_norm": sum(squares.values()) ** 0.5,
            "not_finite": [name for name, count in counts.items() if count],
            "too_large": [n for n, v in squares.items() if not counts[n] and v - v != 0],
            **{
                # Values that are no numbers come first.
                kind: dict(sorted(values.items(), key=lambda x: (x[1] == x[1], -x[1]))[: self._top])
                for kind, values in self._values.items()
            },
            **self._clipping(),
        }

    def _clipping(self) -> dict[str, Any]:
        state, group = self._shared, self._group
        if group.get("clipping_scale") is None or not state:
            return {}
        last, period = int(state["clipping_step"]) - 1, len(state["model_norms"])
        # The first step leaves no norm.
        norms = state["model_norms"].sort().values[-max(1, min(last, period)) :]
        quarters = torch.tensor((0.0, 0.25, 0.5, 0.75, 1.0), device=norms.device)
        early = () if group["recipe"] == "stateless7" else EARLY
        taken = [last // period * period, *(n for n in early if n <= last and n < period), 0]
        return {
            "quartiles": torch.quantile(norms, quarters).tolist(),
            "threshold": float(state["model_norm_threshold"]),
            # Of the steps from the one that last took a threshold to the last one.
            "clipped": float(state["num_clipped"]) / max(1, last - max(taken) + 1),
        }
