"""LANS: block-normalised gradients and two trust ratios, for very large batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import check_number
from steadygrad.formulas import lans
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import options_of
from steadygrad.optim.layerwise import LayerwiseOptimizer

__all__ = ["LANS"]


class LANS(LayerwiseOptimizer):
    r"""Layer-wise adaptive Nesterov-like steps with block-normalised gradients.

    .. math::
        x \leftarrow x - \eta\, \phi(\|x\|) \left( \frac{\beta_1}{\|u_m\|}\, u_m
            + \frac{1 - \beta_1}{\|u_g\|}\, u_g \right)

    with :math:`u_m` Adam's direction and :math:`u_g` that of the gradient alone, both from
    gradients divided by their block's norm; see :mod:`steadygrad.formulas.lans`. A block is a
    parameter. The length of a step is the weight's norm times the learning rate, whatever the
    gradient's scale: clipping by the global norm and loss scales change nothing.

    Two packed collectives a step where parameters are sharded, none elsewhere. A block whose
    gradient is zero decays and its moments fade; one whose weight is zero takes ratio 1.
    A step with a non-finite gradient changes nothing and is counted in ``skipped``. A gradient of
    None leaves its parameter and state alone, as in torch.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: :math:`\eta`, a number or a tensor of one element.
        betas: :math:`\beta_1, \beta_2`, in [0, 1).
        eps: :math:`\epsilon`, positive. Normalised gradients have elements of about one over the
            root of the block's size: 1e-6 is a hundredth of that for a block of 1e8.
        weight_decay: :math:`\lambda`. The decay term is part of both directions, each of which is
            normalised: it changes the directions but not their lengths.
        lower_bound: Least value of :math:`\phi`; None: no bound.
        upper_bound: Greatest value of :math:`\phi`; None: no bound.
        clip_value: Bound on each element of a normalised gradient (MXNet's ``clip_gradient``).
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
        | Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes
        | (Zheng et al., 2020)
        | https://arxiv.org/abs/2006.13484
    """

    _passes = lans
    _ratios = ("trust_ratio", "gradient_trust_ratio")
    _report_rows = 4

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
        clip_value: float | None = None,
        master_weights: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals()))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if group["clip_value"] is not None:
            check_number("clip_value", group["clip_value"], low=0, low_open=True)

    def _rule(self, group: Mapping[str, Any]) -> lans.Rule:
        (beta1, beta2), bound = group["betas"], group["clip_value"]
        bound = torch.inf if bound is None else bound
        return lans.Rule(beta1, beta2, group["eps"], group["weight_decay"], bound)

    def _scales(
        self,
        batches: Sequence[ParamBatch],
        norms: Sequence[Tensor],
        rules: Sequence[lans.Rule],
        joint: Tensor | None,
    ) -> list[lans.Normalizers]:
        # Nothing depends on the gradient's scale.
        return [
            lans.normalizers(sums[0], b.steps, b.taken, rule, maximize=b.group["maximize"])
            for b, sums, rule in zip(batches, norms, rules, strict=True)
        ]

    def _report_sums(self, batch: ParamBatch, by: lans.Normalizers, rule: lans.Rule) -> Tensor:
        pattern = lans.pattern_sums(batch, by, rule)
        return torch.cat([super()._report_sums(batch, by, rule), pattern[None]])

    def _unusual(
        self, batch: ParamBatch, norms: Tensor, by: lans.Normalizers, sums: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Not of gradients that have grown, of which LANS takes no notice.
        return sums[-1], batch.numel
