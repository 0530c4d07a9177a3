"""Reports on a step: the parameters that stand out, as numbers with names.

A report on a group of any optimizer has

- ``group``: its name or index; ``skipped``: steps left out because a gradient was not finite;
- ``gradient_norm``: Euclidean norm of the group's gradients;
- ``not_finite``: names of parameters whose gradient is not finite now; ``too_large``: names of
  parameters whose gradient is finite but whose squared norm is not; the step is skipped as well.

Those of the library add ``unusual``: ``{name: ratio}`` of the parameters whose gradient is least
like its own history; 0 where there is no gradient. For ScaledAdam and LAMB its root mean square
over the root of the mean second moment: a gradient that has grown. With LAMB's ``max_grad_norm`` it
is that of the gradient as it was scaled down, because the moments are of such gradients. LANS does
not go by the size of gradients and remembers none: there it is the root mean square of the elements
of the normalised gradient, each over the root of its own second moment; 1 where the pattern is the
usual one.

LAMB adds ``trust_ratio``, the largest ratios by which directions are multiplied; LANS, which has
two directions, ``gradient_trust_ratio`` too. ScaledAdam adds ``dominance``: largest shares of the
squared norm that clipping goes by; ``rms``: the largest sizes; and, if it clips, ``quartiles`` of
the recent norms (least, quarter, median, three quarters, greatest), the ``threshold``, and
``clipped``, the share of steps clipped since the threshold was last taken.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.clipping import EARLY

__all__ = ["OWN_SUMS", "Report"]

# Rows of `Report.own_sums`.
OWN_SUMS = 2

_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Report:
    """Gathers a group's numbers.

    Args:
        index: The group's place.
        group: The group.
        batches: The group's parameters that are worked on.
        states: The optimizer's states.
        top: How many parameters to name in each list.
    """

    def __init__(
        self,
        index: int,
        group: Mapping[str, Any],
        batches: Sequence[ParamBatch],
        states: Mapping[Tensor, Any],
        top: int,
    ) -> None:
        params = group["params"]
        names = group.get("param_names") or [f"group {index}, {i}" for i in range(len(params))]
        self._names = {id(p): name for p, name in zip(params, names, strict=True)}
        self.group, self.batches, self._top = group, batches, top
        self._values: dict[str, dict[str, float]] = {}
        self._shared = states[params[0]] if params else {}
        self._head = {
            "group": group.get("name", index),
            "skipped": int(self._shared.get("skipped", 0)),
        }

    @staticmethod
    def own_sums(batch: ParamBatch, second_moments: Sequence[Tensor] = ()) -> Tensor:
        """This process's counts of elements that are not finite, and sums of second moments.

        Returns:
            Both of each gradient, with shape ``(2, parameters)``; without second moments one row.
        """
        zero = torch.zeros((), dtype=torch.int64, device=batch.device)
        counts = [zero if g is None else (~torch.isfinite(g)).sum() for g in batch.grads]
        rows = [torch.stack(counts)]
        if second_moments:
            rows.append(torch.stack([v.sum() for v in second_moments]))
        return torch.stack([row.to(batch.sum_dtype) for row in rows])

    def add(self, kind: str, batch: ParamBatch, values: Tensor) -> None:
        """Takes one number for each parameter."""
        columns = batch.params, batch.has_grad.tolist(), values.tolist()
        for p, has_grad, value in zip(*columns, strict=True):
            if has_grad:
                self._values.setdefault(kind, {})[self._names[id(p)]] = value

    def add_gradients(self, batch: ParamBatch, sums: Tensor) -> None:
        """Takes sums of squared gradients and :meth:`own_sums`, over all shards.

        Args:
            batch: The parameters.
            sums: With at least two rows, each with shape ``(parameters)``.
        """
        self.add("square", batch, sums[0])
        self.add("bad", batch, sums[1])

    def add_unusual(self, batch: ParamBatch, squares: Tensor, expected: Tensor) -> None:
        """Takes each gradient's squared size, and the one expected from its history."""
        squares, expected = squares.cpu().to(torch.float64), expected.cpu()
        # Without any gradient there is nothing unusual.
        self.add("unusual", batch, torch.where(squares == 0, 0.0, (squares / expected).sqrt()))

    def finish(self) -> dict[str, Any]:
        """The report."""
        squares = self._values.pop("square", {})
        norm = sum(squares.values()) ** 0.5
        counts = self._values.pop("bad", {})
        bad = [name for name, count in counts.items() if count]
        large = [n for n, value in squares.items() if not counts[n] and value - value != 0]
        lists = {kind: self._largest(values) for kind, values in self._values.items()}
        return {**self._head, "gradient_norm": norm, "not_finite": bad, "too_large": large, **lists}

    def finish_clipping(self) -> dict[str, Any]:
        """The report with ScaledAdam's clipping."""
        terms = self._values.pop("dominance", {})
        total = sum(terms.values())
        shares = {name: term / total if total else 0.0 for name, term in terms.items()}
        report = {**self.finish(), "dominance": self._largest(shares)}
        if self.group["clipping_scale"] is None or not self._shared:
            return report
        state, step = self._shared, int(self._shared["clipping_step"])
        period = len(state["model_norms"])
        early = () if self.group["recipe"] == "stateless7" else EARLY
        since = _since_threshold(step - 1, period, early)
        # The first step leaves no norm.
        norms = state["model_norms"].sort().values[-max(1, min(step - 1, period)) :]
        at = torch.tensor(_QUARTERS, device=norms.device)
        return {
            **report,
            "quartiles": torch.quantile(norms, at).tolist(),
            "threshold": float(state["model_norm_threshold"]),
            "clipped": float(state["num_clipped"]) / since,
        }

    def _largest(self, values: Mapping[str, float]) -> dict[str, float]:
        # Values that are no numbers come first.
        ordered = sorted(values.items(), key=lambda item: (item[1] == item[1], -item[1]))
        return dict(ordered[: self._top])


def _since_threshold(last: int, period: int, early: Sequence[int]) -> int:
    """Steps from the one that last took a threshold to the last one, both counted."""
    taken = [count for count in early if count <= last and count < period]
    return max(1, last - max(last // period * period, *taken, 0) + 1)
