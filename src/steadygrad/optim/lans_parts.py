"""A step of LANS for one group's parameters of one kind."""

from typing import Any

import torch
from torch import Tensor

from steadygrad.formulas import lans
from steadygrad.formulas.tensors import square_sums, wide
from steadygrad.optim.leaves import Leaves

__all__ = ["LansPart", "part_of"]


class LansPart:
    """A step of some parameters, by multi-tensor calls.

    Args:
        leaves: The parameters.
    """

    def __init__(self, leaves: Leaves) -> None:
        self.leaves, self.group = leaves, leaves.group
        self.dtype = leaves.states[0]["exp_avg"].dtype
        self._blocks: list[lans.Block] = []

    @property
    def _shape(self) -> dict[str, Any]:
        return {name: self.group[name] for name in ("eps", "weight_decay", "clip_value")}

    def square_norms(self) -> Tensor:
        """This process's part of the gradients' squared norms, with shape ``(1, parameters)``."""
        return square_sums(self.leaves.grads, wide(self.leaves.weights[0].dtype))[None]

    def directions(self, square_norms: Tensor, ok: Tensor) -> Tensor:
        """Moves the moments; this process's part of the norms that the step's length needs.

        Args:
            square_norms: Of the gradients, over all shards, with shape ``(parameters)``.
            ok: Whether the step is taken, with shape ``()``.

        Returns:
            What :func:`steadygrad.formulas.lans.direction_sums` does.
        """
        steps = [state["step"] for state in self.leaves.states]
        # A list: with one tensor for all, torch reads its value on the host.
        torch._foreach_add_(steps, [ok.to(steps[0])] * len(steps))
        self.begin(square_norms, ok)
        betas, clip_value = self.group["betas"], self.group["clip_value"]
        for block in self._blocks:
            lans.update_moments_(block, betas=betas, clip_value=clip_value)
        return self.direction_sums()

    def begin(self, square_norms: Tensor, ok: Tensor) -> None:
        """Gathers what the passes work on, bucket by bucket."""
        some, ok = self.leaves, ok.to(self.leaves.device)
        corrections = [c.unbind() for c in self.corrections(some.column("step"))]
        inverses = self.inverse_norms(square_norms).unbind()
        pairs = list(zip(*corrections, strict=True))
        m, v = some.locals("exp_avg"), some.locals("exp_avg_sq")
        self._blocks = [
            lans.Block(
                x=[some.weights[i] for i in bucket],
                g=[some.grads[i] for i in bucket],
                m=[m[i] for i in bucket],
                v=[v[i] for i in bucket],
                inverse_norm=[inverses[i] for i in bucket],
                corrections=[pairs[i] for i in bucket],
                ok=ok,
            )
            for bucket in some.buckets
        ]

    def corrections(self, steps: Tensor) -> list[Tensor]:
        r""":math:`1 - \beta^t` for both, each with shape ``(parameters)``."""
        # A first step that is not taken leaves the count at zero; its corrections go unused.
        step = steps.clamp(min=1).to(torch.float64)
        return [(1 - beta**step).to(self.dtype) for beta in self.group["betas"]]

    def inverse_norms(self, square_norms: Tensor) -> Tensor:
        """What normalises each gradient, with shape ``(parameters)``."""
        sign = -1.0 if self.group["maximize"] else 1.0
        inverse = torch.where(square_norms > 0, sign * square_norms.rsqrt(), 0.0)
        return inverse.to(self.dtype)

    def direction_sums(self) -> Tensor:
        """The norms, with shape ``(3, parameters)``."""
        parts = [lans.direction_sums(block, **self._shape) for block in self._blocks]
        return torch.cat(parts, dim=1)

    def pattern_sums(self) -> Tensor:
        """Squared norms of normalised gradients over their second moments' roots, as one row."""
        found = []
        for block in self._blocks:
            u = block.normalized(None)
            torch._foreach_div_(u, block.denominators(self.group["eps"]))
            found.append(square_sums(u, self.dtype))
        return torch.cat(found)[None]

    def coefficients(self, sums: Tensor, ok: Tensor) -> lans.Coefficients:
        """What each direction is multiplied by."""
        return lans.coefficients(
            sums,
            ok.to(sums.device),
            lr=self.group["lr"],
            beta1=self.group["betas"][0],
            bounds=(self.group["lower_bound"], self.group["upper_bound"]),
        )

    def apply(self, sums: Tensor, ok: Tensor) -> None:
        """Moves the weights.

        Args:
            sums: From :meth:`directions`, over all shards.
            ok: Whether the step is taken, with shape ``()``.
        """
        by = self.coefficients(sums, ok)
        for block, bucket in zip(self._blocks, self.leaves.buckets, strict=True):
            lans.apply_(block, by.part(bucket[0], bucket[-1] + 1), **self._shape)


def part_of(leaves: Leaves) -> LansPart:
    """A step of these parameters, in the way they are for."""
    if leaves.fused is None:
        return LansPart(leaves)
    from steadygrad.optim.fused_parts import FusedLansPart

    return FusedLansPart(leaves, leaves.fused)
