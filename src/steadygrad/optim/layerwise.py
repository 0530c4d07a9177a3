"""LANS and LAMB: Adam's directions, each as long as its layer's weight, for very large batches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import InputError, check_number
from steadygrad.optim import layerwise_rule as rule_of
from steadygrad.optim.base import ShardedOptimizer
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import check_switch, options_of
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.passes import Pass, cast, inverse, root, tensor_of, where
from steadygrad.optim.state import ADAM_FIELDS, StateField, scales_of

# A batch with the factors and the options of the pass over its moments.
Work = tuple[ParamBatch, rule_of.Factors, rule_of.Options]


class LayerwiseOptimizer(ShardedOptimizer):
    """An optimizer with a trust ratio for each layer, and two sums over shards a step."""

    _fields: Mapping[str, StateField] = {**ADAM_FIELDS, **scales_of("exp_avg", "exp_avg_sq")}
    _passes: rule_of.LayerwisePasses
    _directions: Pass
    _ratios: tuple[str, ...] = ("trust_ratio",)  # to each direction's norm, by names in reports
    _normalizes = False  # whether each gradient is divided by its norm

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        # Moments of LANS are of normalised gradients, LAMB's are not, and their states look alike.
        if others := ({"clip_value", "max_grad_norm", "adapt"} & {*group}) - {*self.defaults}:
            raise InputError(
                f"Expected a group or a state dict of {type(self).__name__}. Found the option "
                f"`{min(others)}`, of another optimizer. Remedy: leave it out."
            )
        check_number("eps", group["eps"], low=0, low_open=True)
        check_number("weight_decay", group["weight_decay"], low=0)
        high = math.inf
        if group["upper_bound"] is not None:
            high = check_number("upper_bound", group["upper_bound"], low=0)
        check_number("lower_bound", group["lower_bound"] or 0.0, low=0, high=high)
        for name in ("clip_value", "max_grad_norm"):
            if group.get(name) is not None:
                check_number(name, group[name], low=0, low_open=True)
        check_switch("adapt", group.get("adapt", True), (True, False))

    def _gradient_scales(
        self, batches: Sequence[ParamBatch], norms: Sequence[Tensor], joint: Tensor | None
    ) -> list[Any]:
        """Factor on the gradients of each batch: a number, or with shape ``(tensors)`` or ``()``.

        From sums over all shards, and the joint one, if all processes had to agree on it.
        """
        if self._normalizes:
            # Zero for a gradient that is zero.
            factors = [where(s[0] > 0, inverse(root(s[0])), 0.0) for s in norms]
            return [b.sign * factor for b, factor in zip(batches, factors, strict=True)]
        bounds = [b.group["max_grad_norm"] for b in batches]
        if bounds.count(None) == len(bounds):
            return [b.sign for b in batches]
        # Divided first: each of them may be finite and their sum not.
        count, device = len(self._params), batches[0].device
        parts = [
            tensor_of((cast(where(b.taken, sums[0], 0.0), b.exact) / count).sum()).to(device)
            for b, sums in zip(batches, norms, strict=True)
        ]
        norm = torch.stack(parts).sum().sqrt() * count**0.5 if joint is None else joint[0].sqrt()
        return [
            b.sign if bound is None else b.sign / b.number((norm / bound).clip(1.0))
            for b, bound in zip(batches, bounds, strict=True)
        ]

    def _needed(self, device: torch.device) -> Sequence[Pass]:
        squares, moments, weights, both = self._passes
        in_waves = self._is_alone and both.place(device)
        return (squares, both) if in_waves else (squares, moments, weights)

    def _update(self, batches: Sequence[ParamBatch]) -> Tensor:
        sums = [self._passes.grad_sq_norms(batch) for batch in batches]
        pairs = [*zip(batches, sums, strict=True)]
        norms, ok, joint = self._first_sums(
            batches, sums, terms=lambda: [(0, tensor_of(cast(s[0], b.exact))) for b, s in pairs]
        )
        for batch in batches:
            batch.store("step", batch.columns["step"] + batch.taken)
        is_alone, both, left = self._is_alone, self._passes.move_in_waves, []
        for one in self._work(batches, norms, joint):
            if is_alone and one[0].tables and both.place(one[0].device):
                both(*one)
            else:
                left.append(one)
        totals = self._directions_of(left, self._passes.move_moments)
        for (batch, by, options), directions in zip(left, totals, strict=True):
            along = rule_of.coefficients(directions, by, options)
            self._passes.move_weights(batch, along, options)
        return ok

    def _directions_of(self, work: Sequence[Work], one: Pass) -> list[Tensor]:
        """Squared norms of weights and directions over all shards, by a pass over batches."""
        own = [one(*given) for given in work]
        return self._sums([batch for batch, _, _ in work], own, 1 + len(self._ratios))

    def _work(
        self, batches: Sequence[ParamBatch], norms: Sequence[Tensor], joint: Tensor | None
    ) -> list[Work]:
        work, scales = [], self._gradient_scales(batches, norms, joint)
        for batch, scale in zip(batches, scales, strict=True):
            group, (beta1, beta2) = batch.group, batch.group["betas"]
            options = rule_of.Options(
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                group.get("clip_value") or math.inf,
                batch.number(group["lr"]),
                group["lower_bound"] or 0.0,
                math.inf if group["upper_bound"] is None else group["upper_bound"],
                group.get("adapt", True),
            )
            by = rule_of.factors(scale, batch.steps, batch.taken, options)
            work.append((batch, by, options))
        return work

    def _diagnose(
        self, owners: Sequence[tuple[Report, ParamBatch]], norms: Sequence[Tensor]
    ) -> None:
        for (_, batch), sums in zip(owners, norms, strict=True):
            batch.taken = batch.has_grad & (sums[0] < torch.inf)
        work = self._work([batch for _, batch in owners], norms, None)
        totals = self._directions_of(work, self._directions)
        for (report, _), (batch, _, options), directions in zip(owners, work, totals, strict=True):
            weight, *lengths = directions.sqrt().unbind()
            weight = weight.clamp(options.low, options.high)
            for name, length in zip(self._ratios, lengths, strict=True):
                report.add(name, batch, rule_of.trust_ratio(weight, length))


class LANS(LayerwiseOptimizer):
    r"""Layer-wise adaptive Nesterov-like steps with block-normalised gradients.

    See :mod:`steadygrad.optim.layerwise_rule` for the rule, in which a block is a parameter. The
    length of a step is the weight's norm times the learning rate, whatever the gradient's scale:
    clipping by the global norm and loss scales change nothing.

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
        state_dtype: How moments are kept: ``"float32"``, or ``"8bit"``, a byte for each number: see
            :mod:`steadygrad.optim.codes`. Small parameters keep float32.
        master_weights: Whether fp16 and bf16 parameters have float32 masters; None: yes.
        foreach: Whether to work on several parameters in a call; None: where nothing is fused.
        fused: Whether to fuse a step's passes: compiled loops on CPUs, Triton kernels on CUDA
            devices; None: where there are any.
        maximize: Whether to go up instead of down.
        capturable: Whether steps may be recorded in a CUDA graph, as in torch.

    References:
        | Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes
        | (Zheng et al., 2020), https://arxiv.org/abs/2006.13484
    """

    _passes, _directions = rule_of.LANS_PASSES, rule_of.LANS_DIRECTIONS
    _ratios, _normalizes = ("trust_ratio", "gradient_trust_ratio"), True

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
        state_dtype: str = "float32",
        master_weights: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals()))


class LAMB(LayerwiseOptimizer):
    r"""Layer-wise adaptive moments for batch training.

    AdamW's direction, weight decay included, as long as the layer's weight: see
    :mod:`steadygrad.optim.layerwise_rule`. A layer is a parameter.

    A layer whose weight or direction is zero takes ratio 1. Collectives and gradients that are not
    finite or None: as in :class:`LANS`.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr, betas, eps, lower_bound, upper_bound: As in :class:`LANS`.
        weight_decay: :math:`\lambda`. The decay term is part of the direction, which is normalised:
            with ``adapt`` it changes the direction of a step but not its length.
        max_grad_norm: Norm over the gradients of all groups above which they are scaled down to
            it before anything else, as in NVLAMB, where it is 1; None: they are not.
        adapt: Whether there is a trust ratio; programs for BERT leave it out for biases and gains
            of norms, with a weight decay of 0.
        state_dtype, master_weights, foreach, fused, maximize, capturable: As in :class:`LANS`.

    References:
        | Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
        | (You et al., 2020), https://arxiv.org/abs/1904.00962
    """

    _passes, _directions = rule_of.LAMB_PASSES, rule_of.LAMB_DIRECTIONS

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
        state_dtype: str = "float32",
        master_weights: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals()))
