"""A step of ScaledAdam on one batch: sums, clipping, sizes and the update."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.numerics import may_hold
from steadygrad.optim import clipping
from steadygrad.optim import scaled_adam_rule as rule_of
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.state import StateField

# Small states that parameters of more than one element have.
SIZES = {
    "param_rms": StateField(low=0.0, sized_only=True),
    "scale_exp_avg_sq": StateField(low=0.0, sized_only=True),
    "scale_grads": StateField(length="size_update_period", sized_only=True),
}
# Those of a group's clipping; the threshold is infinite before there is one.
CLIPPING = {
    "model_norms": StateField(
        length="clipping_update_period", dtype=torch.float32, low=0.0, shared=True
    ),
    "model_norm_threshold": StateField(
        dtype=torch.float64, low=0.0, high=torch.inf, initial=torch.inf, shared=True
    ),
    "num_clipped": StateField(dtype=torch.float32, low=0.0, shared=True),
}
# Steps that a group's clipping has seen: those of a parameter stand still where it is frozen.
CLOCK = "clipping_step"


class ScaledAdamStep:
    """A step of one batch of parameters, all of one element or none."""

    # Over all shards, with shape `(3, tensors)`, once they are known.
    sums: Tensor

    def __init__(self, batch: ParamBatch) -> None:
        self.batch, self.group, self.rule = batch, batch.group, _rule(batch)
        self.is_scalar = "param_rms" not in batch.columns
        self.step = batch.steps
        # The weights of a frozen parameter are not read: its step stays zero.
        needed = rule_of.needs_products(self.step, self.rule) & batch.in_step
        self.needed = torch.zeros_like(needed) if self.is_scalar else needed
        # Whether any size may be taken or learned in this step.
        self.is_sized = not self.is_scalar and may_hold(needed)

    def local_sums(self) -> Tensor:
        """This process's part of the sums."""
        # A sharded parameter's products must be summed over shards first; they join the collective
        # of every step.
        every_step = self.batch.sharded and not self.is_scalar
        needed = self.batch.in_step if every_step else self.needed
        sums: Tensor = rule_of.sums(self.batch, (needed,))
        return sums

    def finite(self, sums: Tensor) -> Tensor:
        """Whether sums can be used, with shape ``(tensors)``."""
        return rule_of.finite(sums, self.needed, self.batch.state_dtype, self.rule.period)

    def norm_terms(self, squares: Tensor) -> Tensor:
        """Squared norms of the scaled gradients from those of the gradients, both ``(tensors)``."""
        if self.is_scalar:
            # In 2022 the norm took no account of the smaller learning rate.
            scale = 1.0 if self.rule.original else self.rule.scalar_lr_scale
            return squares * scale**2
        return squares * self.batch.columns["param_rms"].to(squares) ** 2

    def apply(self, clip: Tensor | None) -> None:
        """Moves states and weights; ``clip`` is the group's factor, None where it has none."""
        batch, rule = self.batch, self.rule
        scale = torch.full((), batch.sign, dtype=batch.exact, device=batch.device)
        if clip is not None:
            scale = clip.to(batch.device, batch.exact) * batch.sign
        # In 2022 the clipped gradient reached the sizes only.
        in_update = torch.full_like(scale, batch.sign) if rule.original else scale
        known, factors = None, None
        if not self.is_scalar:
            known = rule_of.Sizes(*(batch.columns[name] for name in SIZES))
            move = torch.zeros_like(known.rms)
            if self.is_sized:
                known, move = self._size_step(known, scale)
            factors = known.rms, move
        by = rule_of.step_scales(self.step, factors, in_update, batch.taken, rule)
        products = rule_of.update(batch, by, rule.update_options(is_scalar=self.is_scalar))[0]
        batch.store("step", self.step + batch.taken)
        if known is not None:
            now = self.sums[1]
            if not batch.sharded:
                now = torch.where(self.needed, now, products)
            now = (now * scale).to(batch.state_dtype)
            ring = rule_of.remembered(known.gradients, now, self.step, batch.taken)
            batch.store("scale_grads", ring)
            if self.is_sized:
                batch.store("param_rms", known.rms)
                batch.store("scale_exp_avg_sq", known.mean_square)

    def _size_step(self, known: rule_of.Sizes, scale: Tensor) -> tuple[rule_of.Sizes, Tensor]:
        batch = self.batch
        gradient = (self.sums[1] * scale).to(batch.state_dtype)
        rms = (self.sums[2] / batch.numel).sqrt().to(batch.state_dtype)
        return rule_of.size_step(known, gradient, rms, self.step, batch.taken, self.rule)


def clip_factors(
    work: Sequence[ScaledAdamStep],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, Any],
    ok: Tensor,
    joint: Tensor | None,
) -> dict[int, Tensor]:
    """Clipping factors of groups, with shape ``()``, by the identity of the group.

    ``joint`` has each group's squared norm and the number of its parameters that are worked on,
    with shape ``(2 * groups)``, where all processes had to agree on them.
    """
    members: dict[int, list[ScaledAdamStep]] = defaultdict(list)
    for update in work:
        members[id(update.group)].append(update)
    factors: dict[int, Tensor] = {}
    for place, group in enumerate(groups):
        own = members[id(group)]
        if group["clipping_scale"] is None or not group["params"]:
            continue
        if joint is not None:
            # Also where this process works on none of them: the memory is the whole group's.
            square, count = joint[2 * place : 2 * place + 2]
            norm, seen = square.sqrt(), ok & (count > 0).to(ok.device)
        elif own:
            norm, seen = _norm(own), ok
        else:
            continue
        # The first parameter's copy is what counts; one on a device without work falls behind.
        copies = [states[group["params"][0]], *(u.batch.states[0] for u in own)]
        factors[id(group)] = _clip(group, copies, norm, seen)
    return factors


def _clip(
    group: Mapping[str, Any], copies: Sequence[Mapping[str, Tensor]], norm: Tensor, ok: Tensor
) -> Tensor:
    """Remembers a group's norm in all copies of its memory and returns the factor."""
    own = copies[0]
    device = own[CLOCK].device
    known, factor = clipping.clip(
        clipping.Clipping(*(own[name] for name in CLIPPING)),
        norm.to(own["model_norms"]),
        own[CLOCK],
        ok.to(device),
        scale=group["clipping_scale"],
        original=group["recipe"] == "stateless7",
    )
    values = dict(zip(CLIPPING, vars(known).values(), strict=True))
    values[CLOCK] = own[CLOCK] + ok.to(device)
    # One on each device.
    for state in {copy[CLOCK].device: copy for copy in reversed(copies)}.values():
        for name, value in values.items():
            state[name].copy_(value)
    return factor


def _norm(members: Sequence[ScaledAdamStep]) -> Tensor:
    """Norm of a group's scaled gradients, with shape ``()``."""
    device = members[0].batch.device
    terms = torch.cat([update.norm_terms(update.sums[0]).to(device) for update in members])
    params = [p for update in members for p in update.batch.params]
    if len(members) > 1:
        # In the group's order: that of the batches may differ from process to process.
        places = torch.cat([update.batch.index.to(device) for update in members])
        terms = terms[places.argsort()]
        on_host = [place for update in members for place in update.batch.places]
        params = [params[i] for i in sorted(range(len(params)), key=on_host.__getitem__)]
    # Asked for in float64 only, and slow to gather.
    shapes = [(str(p.dtype), *p.shape) for p in params] if terms.dtype is torch.float64 else []
    return clipping.total_norm(terms, shapes)


def _rule(batch: ParamBatch) -> rule_of.Rule:
    group = batch.group
    return rule_of.Rule(
        lr=batch.lr,
        betas=group["betas"],
        eps=group["eps"],
        scalar_lr_scale=group["scalar_lr_scale"],
        min_rms=group["param_min_rms"],
        max_rms=group["param_max_rms"],
        scalar_max=group["scalar_max"],
        period=group["size_update_period"],
        original=group["recipe"] == "stateless7",
    )
