"""ScaledAdam: Adam whose steps are proportional to each parameter's size, which is learned too."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import check_choice, check_count, check_number
from steadygrad.optim.base import ShardedOptimizer
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import options_of
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.icefall import unstack
from steadygrad.optim.scaled_adam_rule import sums, update
from steadygrad.optim.scaled_adam_step import (
    CLIPPING,
    CLOCK,
    SIZES,
    ScaledAdamStep,
    clip_factors,
)
from steadygrad.optim.state import SKIPPED, STEP, StateField

RECIPES = ("zipformer", "stateless7")


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
        master_weights, foreach, fused, maximize, capturable: As in :class:`LANS`.

    Raises:
        InputError: If an option is out of range or a parameter is complex or sparse.

    References:
        | Zipformer: A faster and better encoder for automatic speech recognition (Yao et al., 2023)
        | https://arxiv.org/abs/2310.11230
    """

    _passes = (sums, update)
    _none_is_zero = True
    _first_rows = 3
    _load_remedy = (
        "load what this optimizer's state_dict() returned; load_icefall_state_dict loads what "
        "icefall's did."
    )
    _fields: Mapping[str, StateField] = {
        "step": STEP,
        "exp_avg_sq": StateField(elementwise=True, low=0.0),
        "delta": StateField(elementwise=True),
        **SIZES,
        "skipped": SKIPPED,
        **CLIPPING,
        CLOCK: StateField(dtype=torch.float32, low=0.0, shared=True),
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
        master_weights: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals()))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_choice("recipe", group["recipe"], RECIPES)
        for name in ("eps", "scalar_lr_scale", "param_min_rms"):
            check_number(name, group[name], low=0)
        for name in ("param_max_rms", "scalar_max"):
            check_number(name, group[name], low=0, low_open=True)
        check_count("size_update_period", group["size_update_period"])
        check_count("clipping_update_period", group["clipping_update_period"])
        if group["clipping_scale"] is not None:
            check_number("clipping_scale", group["clipping_scale"], low=0, low_open=True)

    def _state_dtype(self, parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        """Float32; the recipe of 2022 keeps float64 for float64 parameters."""
        if group["recipe"] == "zipformer":
            return torch.float32
        return super()._state_dtype(parameter, group)

    def _kind(self, parameter: Tensor) -> bool:
        return parameter.numel() == 1

    @torch.no_grad()
    def load_icefall_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint of icefall's ScaledAdam.

        The learning rate and other options stay those of this optimizer: icefall's schedules set
        the rate anew at each step.

        Args:
            state_dict: ``optimizer`` entry of the checkpoint, loaded with ``weights_only=True``. It
                does not say which recipe wrote it: give this optimizer that of the script it is
                from.

        Raises:
            InputError: If it is of other parameters or periods; nothing is changed then.
        """
        own = self.state_dict()
        found = unstack(state_dict, self.param_groups, self._fields)
        states = {i: own["state"][i] | state for i, state in enumerate(found)}
        self.load_state_dict({**own, "state": states})
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
        own = [one.local_sums() for one in work]
        places = {id(group): place for place, group in enumerate(self.param_groups)}
        clips = any(group["clipping_scale"] is not None for group in self.param_groups)

        def terms() -> list[tuple[slice, Tensor]]:
            found = []
            for u, first_sums in zip(work if clips else (), own, strict=False):
                parts = u.norm_terms(first_sums[0].to(u.batch.exact))
                first = 2 * places[id(u.group)]
                rows = torch.stack([parts, u.batch.in_step.to(parts)])
                found.append((slice(first, first + 2), rows))
            return found

        totals, ok, joint = self._first_sums(batches, own, [u.finite for u in work], terms)
        for one, total in zip(work, totals, strict=True):
            one.sums = total
        factors = clip_factors(work, self.param_groups, self.state, ok, joint)
        for one in work:
            one.apply(factors.get(id(one.group)))
        return ok

    def _diagnose(
        self, owners: Sequence[tuple[Report, ParamBatch]], norms: Sequence[Tensor]
    ) -> None:
        for (report, batch), squares in zip(owners, norms, strict=True):
            step = ScaledAdamStep(batch)
            report.add("dominance", batch, step.norm_terms(squares[0]))
            if not step.is_scalar:
                report.add("rms", batch, batch.columns["param_rms"])
