"""A step of one group's parameters of one kind."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.formulas import clipping, scaled_adam
from steadygrad.optim.leaves import Leaves, Scaling
from steadygrad.sharding import is_sharded

__all__ = ["CLIPPING", "SIZES", "GroupPart", "norm_and_step", "part_of"]

CLIPPING = ("model_norms", "model_norm_threshold", "num_clipped")
SIZES = ("param_rms", "scale_exp_avg_sq", "scale_grads")


class GroupPart:
    """A step of some parameters, all of them one-element ones or none.

    Args:
        leaves: The parameters.
        scaling: What a gradient scaler has left to do.

    Attributes:
        sums: Their sums over all shards, with shape ``(3, parameters)``, once taken.
    """

    sums: Tensor

    def __init__(self, leaves: Leaves, scaling: Scaling) -> None:
        group = leaves.group
        self.leaves, self.rule = leaves, _rule(group)
        self.unscale = self.unscaled_by(scaling)
        self.key = id(group), leaves.device
        self.is_scalar = leaves.numels[0] == 1
        self.dtype = leaves.states[0]["delta"].dtype
        self.columns = self.read_columns()

    def unscaled_by(self, scaling: Scaling) -> Tensor:
        """Factor on the gradients before they are clipped, with shape ``()``."""
        return scaling.factor(self.leaves.device, self.leaves.group["maximize"])

    def read_columns(self) -> dict[str, Tensor]:
        """The small states, stacked."""
        names = ("step",) if self.is_scalar else ("step", *SIZES)
        return {name: self.leaves.column(name) for name in names}

    def parameter_sums(self) -> Tensor:
        """This process's part of the sums."""
        return scaled_adam.parameter_sums(self.leaves.weights, self.leaves.grads)

    def take(self, sums: Tensor) -> None:
        """Goes on with sums over all shards."""
        self.sums = sums

    def finite(self) -> Tensor:
        """Whether they are finite, their squares too, with shape ``()``."""
        # Sizes' gradients are squared, and must not overflow where the others do not; and the
        # state may have a smaller range than the weights.
        looked_at = torch.stack([self.sums[0], self.sums[1].square()]).to(self.dtype)
        return torch.isfinite(looked_at).all()

    def last_step(self) -> Tensor:
        """Steps taken before this one, with shape ``()``."""
        # A parameter that was frozen for a time is behind its group.
        return self.columns["step"].max()

    def known_norm(self) -> tuple[float, float] | None:
        """Their squared norm and the last step, where the host has them at hand."""
        return None

    def norm_terms(self) -> Tensor:
        """Squared norm of each parameter's scaled gradient, with shape ``(parameters)``."""
        squares = self.sums[0] * self.unscale**2
        if self.is_scalar:
            # In 2022 the norm took no account of the smaller learning rate.
            scale = 1.0 if self.rule.original else self.rule.scalar_lr_scale
            return squares * scale**2
        return squares * self.columns["param_rms"].to(squares) ** 2

    def clip(self, found: tuple[Tensor, Tensor] | None, ok: Tensor) -> Tensor:
        """Remembers the group's norm and returns the factor; one if there is no clipping."""
        device, state = self.leaves.device, self.leaves.states[0]
        if found is None:
            return torch.ones((), device=device)
        norm, step = (value.to(device) for value in found)
        known, factor = clipping.clip(
            clipping.Clipping(*(state[name] for name in CLIPPING)),
            norm,
            step,
            ok.to(device),
            scale=self.leaves.group["clipping_scale"],
            original=self.rule.original,
        )
        for name, value in zip(CLIPPING, vars(known).values(), strict=True):
            state[name].copy_(value)
        return factor

    def move(self, clip: Tensor, ok: Tensor) -> None:
        """Moves state and weights."""
        leaves, rule = self.leaves, self.rule
        known = None if self.is_scalar else self.learn_sizes(clip, ok)
        if known is not None:
            for name, values in zip(SIZES, vars(known[0]).values(), strict=True):
                leaves.put_column(name, values)
        scales = scaled_adam.step_scales(self.columns["step"], known, rule)
        gradient_scale = self.gradient_scale(clip)
        v, delta = leaves.locals("exp_avg_sq"), leaves.locals("delta")
        for bucket in leaves.buckets:
            block = scaled_adam.Block(
                p=[leaves.weights[i] for i in bucket],
                g=[leaves.grads[i] for i in bucket],
                v=[v[i] for i in bucket],
                delta=[delta[i] for i in bucket],
                gradient_scale=gradient_scale,
                ok=ok,
            )
            scaled_adam.update_(block, scales.part(bucket[0], bucket[-1] + 1), rule)
        steps = [state["step"] for state in leaves.states]
        # A list: with one tensor for all, torch reads its value on the host.
        torch._foreach_add_(steps, [ok.to(steps[0])] * len(steps))

    def mean_squares(self) -> Tensor:
        """Mean squares of the weights, with shape ``(parameters)``."""
        return torch.stack(torch._foreach_div(list(self.sums[2].unbind()), self.leaves.numels))

    def gradient_scale(self, clip: Tensor) -> Tensor:
        """Factor on the gradients, with shape ``()``."""
        # In 2022 the clipped gradient reached the sizes only.
        return self.unscale if self.rule.original else self.unscale * clip

    def learn_sizes(self, clip: Tensor, ok: Tensor) -> tuple[scaled_adam.Sizes, Tensor]:
        """What is known of the sizes now, and the size steps."""
        found, size = scaled_adam.size_step(
            scaled_adam.Sizes(*(self.columns[name] for name in SIZES)),
            (self.sums[1] * (self.unscale * clip)).to(self.dtype),
            self.mean_squares().sqrt().to(self.dtype),
            self.columns["step"],
            ok,
            self.rule,
        )
        return found, size


def part_of(leaves: Leaves, scaling: Scaling) -> GroupPart:
    """A step of these parameters, in the way they are for."""
    if leaves.fused is None:
        return GroupPart(leaves, scaling)
    from steadygrad.optim.fused_parts import FusedScaledAdamPart

    return FusedScaledAdamPart(leaves, leaves.fused, scaling)


def norm_and_step(members: list[GroupPart]) -> tuple[Tensor, Tensor] | None:
    """Norm of a group's scaled gradients, and the step it is at; None if it is not clipped."""
    if members[0].leaves.group["clipping_scale"] is None:
        return None
    device = members[0].leaves.device
    asked = [some.known_norm() for some in members]
    known = [found for found in asked if found is not None]
    if len(known) == len(members):
        norm = math.sqrt(sum(square for square, _ in known))
        last = max(step for _, step in known)
        return (
            torch.tensor(norm, dtype=torch.float32, device=device),
            torch.tensor(last, dtype=torch.float64, device=device),
        )
    own = [some.norm_terms().to(device) for some in members]
    terms = own[0] if len(own) == 1 else torch.cat(own)
    params = [p for some in members for p in some.leaves.params]
    if len(members) > 1 and device.type == "cpu" and any(map(is_sharded, params)):
        # Who is for compiled loops differs from process to process: the sum's order must not.
        places = {id(p): i for i, p in enumerate(members[0].leaves.group["params"])}
        order = sorted(range(len(params)), key=lambda i: places[id(params[i])])
        terms, params = terms[order], [params[i] for i in order]
    # Asked for in float64 only, and slow to gather.
    shapes = [(str(p.dtype), *p.shape) for p in params] if terms.dtype is torch.float64 else []
    steps = [some.last_step().to(device) for some in members]
    step = steps[0] if len(steps) == 1 else torch.stack(steps).max()
    return clipping.total_norm(terms, shapes), step


def _rule(group: Mapping[str, Any]) -> scaled_adam.Rule:
    return scaled_adam.Rule(
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        scalar_lr_scale=group["scalar_lr_scale"],
        min_rms=group["param_min_rms"],
        max_rms=group["param_max_rms"],
        scalar_max=group["scalar_max"],
        period=group["size_update_period"],
        original=group["recipe"] == "stateless7",
    )
