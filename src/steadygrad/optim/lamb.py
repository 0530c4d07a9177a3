"""LAMB: Adam's directions with a trust ratio for each layer, for large batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import check_number
from steadygrad.formulas import lamb
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import check_switch, options_of
from steadygrad.optim.layerwise import LayerwiseOptimizer

__all__ = ["LAMB"]


class LAMB(LayerwiseOptimizer):
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
        weight_decay: :math:`\lambda`. The decay term is part of the direction, which is normalised:
            with ``adapt`` it changes the direction of a step but not its length.
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
            ``load_state_dict``, a cast of the model or of gradients, and another mode. An outdated
            graph updates the weights from tensors that are no longer the optimizer's state.

    Raises:
        InputError: If an option is out of range or a parameter is complex or sparse.

    References:
        | Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
        | (You et al., 2020)
        | https://arxiv.org/abs/1904.00962
    """

    _passes = lamb
    _ratio_options = ("adapt",)

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
        super().__init__(params, options_of(locals()))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if group["max_grad_norm"] is not None:
            check_number("max_grad_norm", group["max_grad_norm"], low=0, low_open=True)
        check_switch("adapt", group["adapt"], (True, False))

    def _joint_terms(
        self, batches: Sequence[ParamBatch], own: Sequence[Tensor]
    ) -> list[tuple[int | slice, Tensor]]:
        if all(group["max_grad_norm"] is None for group in self.param_groups):
            return []
        return [(0, sums[0].to(b.exact)) for b, sums in zip(batches, own, strict=True)]

    def _scales(
        self,
        batches: Sequence[ParamBatch],
        norms: Sequence[Tensor],
        rules: Sequence[lamb.Rule],
        joint: Tensor | None,
    ) -> list[lamb.Scales]:
        # Divided first: each of them may be finite and their sum not.
        count = len(self._params)
        parts = [
            (torch.where(b.taken, sums[0], 0.0).to(b.exact) / count).sum().to(norms[0].device)
            for b, sums in zip(batches, norms, strict=True)
        ]
        # No parts are left in a report without gradients.
        mean = torch.stack(parts).sum() if parts else torch.zeros(())
        root = mean.sqrt() * count**0.5 if joint is None else joint[0].sqrt()
        found = []
        for b, rule in zip(batches, rules, strict=True):
            bound = b.group["max_grad_norm"]
            scale = torch.full((), b.sign, dtype=b.exact, device=b.device)
            if bound is not None:
                scale = scale / (root.to(b.device) / bound).clamp(min=1.0)
            found.append(lamb.scales(scale, b.steps, b.taken, rule))
        return found

    def _unusual(
        self, batch: ParamBatch, norms: Tensor, by: lamb.Scales, sums: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Scaled by the norm of all gradients, as they reach the moments; these begin with zero.
        return norms[0].to(by.gradient) * by.gradient**2, norms[2] * by.unbias2
