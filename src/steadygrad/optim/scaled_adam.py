"""ScaledAdam: Adam whose steps are proportional to each parameter's size, which is learned too."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import check_choice, check_count, check_number
from steadygrad.numerics import may_hold
from steadygrad.optim import clipping
from steadygrad.optim import scaled_adam_rule as rule_of
from steadygrad.optim.base import ShardedOptimizer
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import options_of
from steadygrad.optim.codes import EXPONENTS
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.passes import cast, library_of, root, tensor_of, where
from steadygrad.optim.state import (
    COUNT,
    SHARED_COUNT,
    StateField,
    as_tensor,
    check_outline,
    damaged,
    scales_of,
)

# Steps that a group's clipping has seen: those of a parameter stand still where it is frozen.
CLOCK = "clipping_step"
# States of a group's clipping; the threshold is infinite before there is one.
_THRESHOLD = replace(SHARED_COUNT, dtype=torch.float64, high=torch.inf, initial=torch.inf)
CLIPPING = {
    "model_norms": replace(SHARED_COUNT, length="clipping_update_period"),
    "model_norm_threshold": _THRESHOLD,
    "num_clipped": SHARED_COUNT,
    CLOCK: SHARED_COUNT,
}


class ScaledAdam(ShardedOptimizer):
    r"""Adam with steps proportional to each parameter's root mean square, and learned sizes.

    See :mod:`steadygrad.optim.scaled_adam_rule` for the rule. Good learning rates are larger than
    Adam's, as they are relative changes: 0.03 to begin with, and falling.

    One packed collective a step where parameters are sharded, none elsewhere. A step with a
    non-finite gradient changes nothing and is counted in ``skipped``. A gradient of None counts as
    zero, as in the original: the momentum continues. A frozen parameter (``requires_grad`` is
    false, no gradient) is left alone; the original bounds and moves it.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: :math:`\eta`, a number or a tensor of one element.
        betas: :math:`\beta_1, \beta_2` of updates and of squared gradients, in [0, 1).
        eps: Added to the root of the second moment.
        scalar_lr_scale: Factor on the learning rate of sizes and of one-element parameters.
        param_min_rms: Least size that steps are proportional to.
        param_max_rms: Size that a parameter does not learn to exceed.
        scalar_max: Bound on one-element parameters.
        size_update_period: Steps from one size step to the next.
        clipping_scale: Threshold of a group's scaled gradient norm over its recent median; None:
            no clipping. See :mod:`steadygrad.optim.clipping`.
        clipping_update_period: Steps from one threshold to the next, and norms that it is from.
        recipe: ``"zipformer"``, the current rule, with its state in float32; or ``"stateless7"``,
            that of 2022, whose clipping acts on the sizes only.
        state_dtype, master_weights, foreach, fused, maximize, capturable: As in :class:`LANS`.

    References:
        | Zipformer: A faster and better encoder for automatic speech recognition (Yao et al., 2023)
        | https://arxiv.org/abs/2310.11230
    """

    _passes = (rule_of.sums, rule_of.update)
    none_is_zero = True
    _first_rows = 3
    _load_remedy = "load_icefall_state_dict for icefall's, load_state_dict for this one's"
    _fields: Mapping[str, StateField] = {
        "step": COUNT,
        "delta": StateField(elementwise=True),
        "exp_avg_sq": StateField(elementwise=True, low=0.0),
        **scales_of("delta", "exp_avg_sq"),
        "param_rms": StateField(low=0.0, sized_only=True),
        "scale_exp_avg_sq": StateField(low=0.0, sized_only=True),
        "scale_grads": StateField(length="size_update_period", sized_only=True),
        "skipped": SHARED_COUNT,
        **CLIPPING,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        scalar_lr_scale: float = 0.1,
        param_min_rms: float = 1e-5,
        param_max_rms: float = 3.0,
        scalar_max: float = 10.0,
        size_update_period: int = 4,
        clipping_scale: float | None = None,
        clipping_update_period: int = 100,
        recipe: str = "zipformer",
        state_dtype: str = "float32",
        master_weights: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals()))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_choice("recipe", group["recipe"], ("zipformer", "stateless7"))
        for name in ("eps", "scalar_lr_scale", "param_min_rms"):
            check_number(name, group[name], low=0)
        for name in ("param_max_rms", "scalar_max"):
            check_number(name, group[name], low=0, low_open=True)
        for name in ("size_update_period", "clipping_update_period"):
            check_count(name, group[name])
        if group["clipping_scale"] is not None:
            check_number("clipping_scale", group["clipping_scale"], low=0, low_open=True)

    def _state_dtype(self, parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        """Float32; the recipe of 2022 keeps float64 for float64 parameters."""
        is_original = rule_of.is_original(group)
        return super()._state_dtype(parameter, group) if is_original else torch.float32

    def _kind(self, parameter: Tensor) -> bool:
        return parameter.numel() == 1

    @torch.no_grad()
    def load_icefall_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from icefall's checkpoint with this optimizer's options, or changes nothing.

        Args:
            state_dict: ``optimizer`` entry of the checkpoint, loaded with ``weights_only=True``. It
                does not say which recipe wrote it: give this optimizer that of its script.
        """
        own = self.state_dict()
        for i, state in enumerate(unstack(state_dict, self.param_groups, self._fields)):
            # Moments are numbers now, without scales.
            kept = {k: v for k, v in own["state"][i].items() if not k.endswith(EXPONENTS)}
            own["state"][i] = kept | state
        self.load_state_dict(own)
        # icefall's clipping goes by the steps of a parameter.
        for group in self.param_groups:
            members = [self.state[p] for p in group["params"]]
            for state in members[:1]:
                newest = torch.stack([s["step"].to(state[CLOCK].device) for s in members]).max()
                # The first step leaves no norm; later ones without any were not clipped.
                known = state["model_norms"].any() | (state["model_norm_threshold"] < torch.inf)
                state[CLOCK].copy_(torch.where(known, newest, newest.clamp(max=1)))

    def _update(self, batches: Sequence[ParamBatch]) -> Tensor:
        work = [ScaledAdamStep(batch) for batch in batches]
        own = [rule_of.sums(one.batch, (one.asked,)) for one in work]

        def terms() -> list[tuple[slice, Tensor]]:
            found, places = [], {id(group): i for i, group in enumerate(self.param_groups)}
            for one, sums in zip(work, own, strict=True):
                parts = one.norm_terms(cast(sums[0], one.batch.exact))
                first = 2 * places[id(one.group)]
                rows = torch.stack([*map(tensor_of, (parts, cast(one.batch.in_step, parts.dtype)))])
                found.append((slice(first, first + 2), rows))
            return found

        totals, ok, joint = self._first_sums(batches, own, [u.finite for u in work], terms)
        for one, total in zip(work, totals, strict=True):
            one.sums = [*total]
        self._clip(work, ok, joint)
        for one in work:
            one.apply()
        return ok

    def _clip(self, work: Sequence["ScaledAdamStep"], ok: Tensor, joint: Tensor | None) -> None:
        """Gives steps the clipping factors of their groups, with shape ``()``.

        ``joint`` has each group's squared norm and the number of its parameters that are worked on,
        with shape ``(2 * groups)``, where all processes had to agree on them.
        """
        for place, group in enumerate(self.param_groups):
            members = [one for one in work if one.group is group]
            scale, original = group["clipping_scale"], rule_of.is_original(group)
            # Joint also where this process works on none of them: the memory is the whole group's.
            if scale is None or not (members if joint is None else group["params"]):
                continue
            if joint is None:
                norm, seen = _norm(members), ok
            else:
                square, count = joint[2 * place : 2 * place + 2]
                norm, seen = square.sqrt(), ok & (count > 0).to(ok.device)
            # The first parameter's copy is what counts; one on a device without work falls behind.
            copies = [self.state[group["params"][0]], *(one.batch.states[0] for one in members)]
            own = {name: copies[0][name] for name in CLIPPING}
            if isinstance(norm, Tensor):
                norm, seen = norm.to(own[CLOCK].device), tensor_of(seen).to(own[CLOCK].device)
            else:
                own = {name: value.numpy()[()] for name, value in own.items()}
                seen = members[0].batch.column(seen)
            *memory, step = own.values()
            known, factor = clipping.clip(
                clipping.Clipping(*memory), norm, step, seen, scale=scale, original=original
            )
            for one in members:
                one.clip = factor
            values = [*known, step + seen]
            # One on each device.
            for state in {copy[CLOCK].device: copy for copy in reversed(copies)}.values():
                for name, value in zip(own, values, strict=True):
                    if isinstance(value, Tensor):
                        state[name].copy_(value)
                    else:
                        state[name].numpy()[...] = value

    def _diagnose(
        self, owners: Sequence[tuple[Report, ParamBatch]], norms: Sequence[Tensor]
    ) -> None:
        for (report, batch), squares in zip(owners, norms, strict=True):
            step = ScaledAdamStep(batch)
            report.add("dominance", batch, step.norm_terms(squares[0]))
            if not step.is_scalar:
                report.add("rms", batch, batch.columns["param_rms"])


class ScaledAdamStep:
    """A step of one batch of parameters, all of one element or none."""

    sums: Sequence[Any]  # over all shards, each with shape `(tensors)`, once they are known
    clip: Any = None  # the group's factor on the gradients, if it has one

    def __init__(self, batch: ParamBatch) -> None:
        self.batch, self.group = batch, batch.group
        self.is_original = rule_of.is_original(self.group)
        self.is_scalar = "param_rms" not in batch.columns
        self.step, self.period = batch.steps, self.group["size_update_period"]
        # The first step takes the size that the weights have; a size step learns from products. The
        # weights of a frozen parameter are not read: its step stays zero.
        needed = (self.step == 0) | (self.step % self.period == self.period - 1)
        self.needed = needed & batch.in_step & (not self.is_scalar)
        # Products of shards join the collective of every step.
        self.asked = batch.in_step if batch.sharded and not self.is_scalar else self.needed
        # Whether any size may be taken or learned in this step.
        self.is_sized = not self.is_scalar and may_hold(self.needed)

    def finite(self, sums: Any) -> Any:
        """Whether sums can be used, with shape ``(tensors)``.

        Squares of gradients of sizes are added up over a period, and must not overflow where the
        others do not; and the state may have a type of smaller range than the weights.
        """
        # A sum of squares is below infinity unless it is infinite or NaN.
        squares, products, weights = tuple(sums)
        found = cast(squares, self.batch.state_dtype) < torch.inf
        if not self.is_sized:
            return found
        # Twice the sum: that of a period is rounded.
        squares = cast(products * products * (2 * self.period), self.batch.state_dtype)
        return found & (((squares < torch.inf) & (weights < torch.inf)) | ~self.needed)

    def norm_terms(self, squares: Any) -> Any:
        """Squared norms of the scaled gradients from those of the gradients, both ``(tensors)``."""
        if self.is_scalar:
            # In 2022 the norm took no account of the smaller learning rate.
            scale = 1.0 if self.is_original else self.group["scalar_lr_scale"]
            return squares * scale**2
        return squares * cast(self.batch.columns["param_rms"], squares.dtype) ** 2

    def apply(self) -> None:
        """Moves states and weights."""
        batch, group, sign = self.batch, self.group, self.batch.sign
        lr, scale = batch.number(group["lr"]), sign
        if self.clip is not None:
            scale = sign * batch.number(self.clip)
        # In 2022 the clipped gradient reached the sizes only, and bounds came before the update.
        clip = sign if self.is_original else scale
        bound = group["scalar_max"] if self.is_scalar else torch.inf
        before, after = (bound, torch.inf) if self.is_original else (torch.inf, bound)
        (beta1, beta2), eps = group["betas"], group["eps"]
        options = rule_of.UpdateOptions(beta1, beta2, eps, before, after)
        factors, update = None, rule_of.update
        if not self.is_scalar:
            rms, kept = batch.columns["param_rms"], batch.columns["scale_grads"]
            move = library_of(rms).zeros_like(rms)
            if self.is_sized or batch.sharded:
                ring = rule_of.remembered(kept, self.sums[1] * scale, self.step, batch.taken)
                # Loops take products along, whether they are needed or not.
                update = rule_of.update if batch.tables else rule_of.update_by_known
            if self.is_sized:
                rms = cast(root(self.sums[2] / batch.numel), batch.state_dtype)
                given = batch.columns, ring, rms, self.step, self.needed & batch.taken, lr, group
                rms, mean_square, move = rule_of.size_step(*given)
            factors = rms, move
        by = rule_of.step_scales(self.step, factors, clip, batch.taken, lr, group)
        found = update(batch, by, options)
        if not self.is_scalar:
            if found is not None and not batch.sharded:
                products = where(self.needed, self.sums[1], found[0])
                ring = rule_of.remembered(kept, products * scale, self.step, batch.taken)
            batch.store("scale_grads", ring)
            if self.is_sized:
                batch.store("param_rms", rms)
                batch.store("scale_exp_avg_sq", mean_square)
        batch.store("step", self.step + batch.taken)


def _norm(members: Sequence[ScaledAdamStep]) -> Any:
    """Norm of a group's scaled gradients, with shape ``()``."""
    batches, device = [one.batch for one in members], members[0].batch.device
    terms, *others = (one.norm_terms(one.sums[0]) for one in members)
    if others:
        # In the group's order: that of the batches may differ from process to process.
        parts = [tensor_of(some).to(device) for some in (terms, *others)]
        places = torch.cat([batch.index.to(device) for batch in batches])
        terms = torch.cat(parts)[places.argsort()]
    shapes = []
    if any(batch.weights[0].dtype is torch.float64 for batch in batches):
        params = {i: p for b in batches for i, p in zip(b.places, b.params, strict=True)}
        shapes = [(str(params[i].dtype), *params[i].shape) for i in sorted(params)]
    return clipping.total_norm(terms, shapes)


def unstack(
    checkpoint: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    fields: Mapping[str, StateField],
) -> list[dict[str, Any]]:
    """Each parameter's part of the stacks in a checkpoint of icefall's ScaledAdam.

    icefall keeps the state of a stack, parameters of one type and shape, at the first of them, and
    a group's clipping at the first one of all. ``groups`` have the same parameters in that order.
    """
    check_outline(checkpoint, "hand in the optimizer's state_dict(), checkpoint['optimizer']")
    saved = checkpoint["param_groups"]
    sizes, own = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != own:
        raise damaged("param_groups", f"of {own} parameters", sizes)
    found = []
    for old, new in zip(saved, groups, strict=True):
        found += _unstack_group(checkpoint["state"], old["params"], new, fields)
    return found


def _unstack_group(
    state: Mapping[int, Mapping[str, Any]],
    indices: Sequence[int],
    group: Mapping[str, Any],
    fields: Mapping[str, StateField],
) -> list[dict[str, Any]]:
    params, stacks = group["params"], defaultdict[Any, list[int]](list)
    for place, p in enumerate(params):
        stacks[p.dtype, p.shape].append(place)
    found, shared = [dict[str, Any]() for _ in params], dict[str, Any]()
    for members in stacks.values():
        first, like = indices[members[0]], params[members[0]]
        stack, shape = state.get(first, {}), (len(members), *like.shape)
        if (delta := getattr(stack.get("delta"), "shape", None)) != shape:
            raise damaged("delta", f"of shape {shape} at parameter {first}", delta and tuple(delta))
        for name in set(stack) & set(fields):
            field, value = fields[name], as_tensor(name, stack[name], like)
            axis = 1 if field.length else 0
            if field.shared:
                shared[name] = value
            elif name == "step":
                for place in members:
                    found[place][name] = value
            elif value.shape[axis : axis + 1] != shape[:1]:
                raise damaged(name, f"of {len(members)} parameters", tuple(value.shape))
            else:
                for place, part in zip(members, value.unbind(axis), strict=True):
                    small = part.flatten() if field.length else part.squeeze()
                    found[place][name] = part if field.elementwise else small
    return [{**one, **shared} for one in found]
