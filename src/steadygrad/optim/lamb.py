"""LAMB: Adam's directions with a trust ratio for each layer, for large batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import check_number
from steadygrad.formulas import lamb
from steadygrad.formulas.tensors import exact
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import check_bounds, check_switch
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.optimizer import AmpState, ShardedOptimizer, finite_norms
from steadygrad.optim.state import adam_state

__all__ = ["LAMB"]


class LAMB(ShardedOptimizer):
    r"""Layer-wise adaptive moments for batch training.

    .. math:: x \leftarrow x - \eta\, \frac{\phi(\|x\|)}{\|u\|}\, u

    with :math:`u` AdamW's direction, weight decay included; see :mod:`steadygrad.formulas.lamb`. A
    layer is a parameter.

    Two packed collectives a step where parameters are sharded, none elsewhere. A layer whose
    weight or direction is zero takes ratio 1. A step with a non-finite gradient changes nothing and
    is counted in ``skipped``. A gradient of None leaves its parameter and state alone, as in torch.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: :math:`\eta`, a number or a tensor of one element.
        betas: :math:`\beta_1, \beta_2`, in [0, 1).
        eps: :math:`\epsilon`, positive.
        weight_decay: :math:`\lambda`, inside the direction, so that it acts through its norm.
        lower_bound: Least value of :math:`\phi`; None: no bound.
        upper_bound: Greatest value of :math:`\phi`; None: no bound.
        max_grad_norm: Norm over the gradients of all groups above which they are scaled down to
            it before anything else, as in NVLAMB, where it is 1; None: they are not.
        adapt: Whether there is a trust ratio; programs for BERT leave it out for biases and gains
            of norms, with a weight decay of 0.
        master_weights: Whether fp16 and bf16 parameters have float32 masters; None: yes.
        foreach: Whether to work on several parameters in a call; None: where nothing is fused.
        fused: Whether to use fused kernels: compiled loops on CPUs, Triton's on CUDA devices; None:
            on CPUs with the extra ``cpu``.
        maximize: Whether to go up instead of down.
        capturable: Whether steps may be recorded in a CUDA graph; nothing else depends on it. A
            graph keeps to the tensors that it recorded: record it anew after ``add_param_group``,
            ``load_state_dict``, a cast of the model or of gradients, and another mode. An old one
            moves the weights by states that no longer are the optimizer's.

    Raises:
        InputError: If an option is out of range or a parameter is complex or sparse.

    References:
        | Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
        | (You et al., 2020)
        | https://arxiv.org/abs/1904.00962
    """

    _passes = lamb
    _large = ("exp_avg", "exp_avg_sq")
    _small = ("step",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        max_grad_norm: float | None = None,
        adapt: bool = True,
        master_weights: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "lower_bound": lower_bound,
            "upper_bound": upper_bound,
            "max_grad_norm": max_grad_norm,
            "adapt": adapt,
            "master_weights": master_weights,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_number("eps", group["eps"], low=0, low_open=True)
        check_number("weight_decay", group["weight_decay"], low=0)
        check_bounds(group)
        if group["max_grad_norm"] is not None:
            check_number("max_grad_norm", group["max_grad_norm"], low=0, low_open=True)
        check_switch("adapt", group["adapt"], (True, False))

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        return adam_state(parameter, self._state_dtype(parameter, group))

    def _update(self, batches: Sequence[ParamBatch], amp: AmpState) -> Tensor:
        own = [b.passes.grad_sq_norms(b) for b in batches]
        norms, taken, ok = self._first_sums(batches, own, [finite_norms] * len(batches), amp)
        total = _total(norms)
        steps = []
        for batch, takes in zip(batches, taken, strict=True):
            step = batch.columns["step"].to(batch.exact) + takes
            batch.store("step", step)
            rule, scale = _rule(batch.group), _gradient_scale(batch, amp, total)
            steps.append((batch, lamb.scales(scale, step, takes, rule), rule))
        sums = self._sums(batches, [b.passes.update_moments(b, x, rule) for b, x, rule in steps])
        for (batch, by, rule), both in zip(steps, sums, strict=True):
            batch.passes.apply(batch, _coefficients(batch, by, rule, both), rule)
        return ok

    def _diagnose(
        self,
        group: dict[str, Any],
        batches: Sequence[ParamBatch],
        report: Report,
        grad_scale: float,
    ) -> dict[str, Any]:
        rule = _rule(group)
        own = [
            torch.cat(
                [
                    lamb.grad_sq_norms(b),
                    report.bad_elements(b).to(b.sum_dtype)[None],
                    torch.stack([v.sum() for v in b.moments[1]]).to(b.sum_dtype)[None],
                ]
            )
            for b in batches
        ]
        by = []
        for batch, sums in zip(batches, self._sums(batches, own), strict=True):
            report.add_gradients(batch, sums[:2])
            report.add_unusual(batch, sums[0].cpu().to(torch.float64) / grad_scale**2, sums[2])
            one = torch.ones((), dtype=sums.dtype, device=batch.device)
            by.append(lamb.scales(one, batch.columns["step"].to(batch.exact), batch.active, rule))
        own = [lamb.direction_sums(b, x, rule) for b, x in zip(batches, by, strict=True)]
        for batch, sums in zip(batches, self._sums(batches, own), strict=True):
            x, u = sums.sqrt().unbind()
            bounds = group["lower_bound"], group["upper_bound"]
            x = x if bounds == (None, None) else x.clamp(*bounds)
            report.add("trust_ratio", batch, lamb.trust_ratio(x, u))
        return report.finish()


def _rule(group: Mapping[str, Any]) -> lamb.Rule:
    beta1, beta2 = group["betas"]
    return lamb.Rule(beta1, beta2, group["eps"], group["weight_decay"])


def _total(norms: Sequence[Tensor]) -> Tensor:
    """Squared norm over all gradients, with shape ``()``."""
    first = norms[0].device
    parts = [sums[0].to(exact(sums.device)).sum().to(first) for sums in norms]
    return torch.stack(parts).sum()


def _gradient_scale(batch: ParamBatch, amp: AmpState, total: Tensor) -> Tensor:
    """Factor on a batch's gradients: what the scaler left, direction and global norm."""
    unscale = amp.unscale(batch)
    bound = batch.group["max_grad_norm"]
    if bound is None:
        return unscale
    norm = total.to(batch.device).sqrt() * unscale.abs()
    factor: Tensor = unscale / (norm / bound).clamp(min=1.0)
    return factor


def _coefficients(
    batch: ParamBatch, by: lamb.Scales, rule: lamb.Rule, sums: Tensor
) -> lamb.Coefficients:
    group = batch.group
    bounds = group["lower_bound"], group["upper_bound"]
    return lamb.coefficients(sums, by, rule, lr=batch.lr, bounds=bounds, adapt=group["adapt"])
