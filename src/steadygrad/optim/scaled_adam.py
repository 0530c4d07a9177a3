"""ScaledAdam: Adam whose steps are proportional to each parameter's size, which is learned too."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import InputError, check_choice, check_count, check_number
from steadygrad.formulas import clipping, scaled_adam
from steadygrad.formulas.tensors import exact
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.checks import LARGEST
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.icefall import unstack
from steadygrad.optim.optimizer import AmpState, ShardedOptimizer

__all__ = ["ScaledAdam"]

RECIPES = ("zipformer", "stateless7")
# Small states that parameters of more than one element have, and those of a group's clipping.
SIZES = ("param_rms", "scale_exp_avg_sq", "scale_grads")
CLIPPING = ("model_norms", "model_norm_threshold", "num_clipped")


class ScaledAdam(ShardedOptimizer):
    r"""Adam with steps proportional to each parameter's root mean square, and learned sizes.

    See :mod:`steadygrad.formulas.scaled_adam` for the rule. Good learning rates are larger than
    Adam's, as they are relative changes: 0.03 to begin with, and falling.

    One packed collective a step where parameters are sharded, none elsewhere. A step with a
    non-finite gradient changes nothing and is counted in ``skipped``. A gradient of None counts as
    zero, as in the original: the momentum goes on. A frozen parameter (``requires_grad`` is false,
    no gradient) is left alone, which the original bounds and moves on.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: :math:`\eta`, a number or a 0-d tensor.
        betas: :math:`\beta_1, \beta_2` of updates and of squared gradients, in [0, 1).
        eps: Added to the root of the second moment.
        scalar_lr_scale: Factor on the learning rate of sizes and of one-element parameters.
        param_min_rms: Least size that steps are proportional to.
        param_max_rms: Size that a parameter does not learn to exceed.
        scalar_max: Bound on one-element parameters.
        size_update_period: Steps from one size step to the next.
        clipping_scale: Threshold of a group's scaled gradient norm over its recent median; None:
            no clipping. See :mod:`steadygrad.formulas.clipping`.
        clipping_update_period: Steps from one threshold to the next, and norms that it is from.
        recipe: ``"zipformer"``, the current rule, with its state in float32; or ``"stateless7"``,
            that of 2022, whose clipping acts on the sizes only.
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
        | Zipformer: A faster and better encoder for automatic speech recognition (Yao et al., 2023)
        | https://arxiv.org/abs/2310.11230
    """

    _shared = ("skipped", *CLIPPING)
    _types: Mapping[str, torch.dtype] = {
        **ShardedOptimizer._types,
        "model_norms": torch.float32,
        "model_norm_threshold": torch.float64,
        "num_clipped": torch.float32,
    }
    _ranges: Mapping[str, tuple[float, float]] = {
        **ShardedOptimizer._ranges,
        **dict.fromkeys(("param_rms", "scale_exp_avg_sq", "model_norms"), (0.0, LARGEST)),
        "num_clipped": (0.0, LARGEST),
        # Infinite before there is one.
        "model_norm_threshold": (0.0, torch.inf),
    }
    _none_is_zero = True
    _passes = scaled_adam
    _large = ("exp_avg_sq", "delta")
    _small = ("step", *SIZES)

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
        check_choice("recipe", recipe, RECIPES)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "scalar_lr_scale": scalar_lr_scale,
            "param_min_rms": param_min_rms,
            "param_max_rms": param_max_rms,
            "scalar_max": scalar_max,
            "size_update_period": size_update_period,
            "clipping_scale": clipping_scale,
            "clipping_update_period": clipping_update_period,
            "recipe": recipe,
            "master_weights": master_weights,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

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

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        dtype, device = self._state_dtype(parameter, group), parameter.device
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "delta": torch.zeros_like(parameter, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
        }
        if parameter.numel() != 1:
            period = group["size_update_period"]
            state["param_rms"] = torch.zeros((), dtype=dtype, device=device)
            state["scale_exp_avg_sq"] = torch.zeros((), dtype=dtype, device=device)
            state["scale_grads"] = torch.zeros(period, dtype=dtype, device=device)
        return state

    def _shape_of(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
        lengths = {"scale_grads": "size_update_period", "model_norms": "clipping_update_period"}
        if name in lengths:
            return (group[lengths[name]],)
        return super()._shape_of(name, parameter, group)

    def _check_states(self) -> None:
        """Refuses periods that were changed since, before anything has moved."""
        for group in self.param_groups:
            self._check_periods(group)

    def _check_periods(self, group: Mapping[str, Any]) -> None:
        sized = next((p for p in group["params"] if p.numel() != 1), None)
        lengths = {"clipping_update_period": ("model_norms", next(iter(group["params"]), None))}
        lengths["size_update_period"] = ("scale_grads", sized)
        for option, (name, parameter) in lengths.items():
            if parameter is None:
                continue
            length = len(self.state[parameter][name])
            if length != group[option]:
                raise InputError(
                    f"Option `{option}` should be what it was at construction. Found "
                    f"{group[option]} with a state for {length}. Remedy: a new optimizer."
                )

    @torch.no_grad()
    def load_icefall_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint of icefall's ScaledAdam.

        The learning rate and other options stay those of this optimizer: icefall's schedules set
        the rate anew at each step.

        Args:
            state_dict: Its ``optimizer`` entry, loaded with ``weights_only=True``. It does not say
                which recipe wrote it: give this optimizer that of the script it is from.

        Raises:
            InputError: If it is of other parameters or periods; nothing is changed then.
        """
        own = self.state_dict()
        found = unstack(state_dict, self.param_groups)
        states = {i: own["state"][i] | state for i, state in enumerate(found)}
        # The types of icefall's counters change from version to version.
        typed = {
            i: {name: value.to(own["state"][i][name].dtype) for name, value in state.items()}
            for i, state in states.items()
        }
        self.load_state_dict({**own, "state": typed})

    def _new_shared(self, device: torch.device, group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super()._new_shared(device, group),
            "model_norms": torch.zeros(
                group["clipping_update_period"], dtype=torch.float32, device=device
            ),
            "model_norm_threshold": torch.full((), torch.inf, dtype=exact(device), device=device),
            "num_clipped": torch.zeros((), dtype=torch.float32, device=device),
        }

    def _update(self, batches: Sequence[ParamBatch], amp: AmpState) -> Tensor:
        work = [_Update(batch, amp) for batch in batches]
        own = [update.local_sums() for update in work]
        sums, taken, ok = self._first_sums(batches, own, [u.finite for u in work], amp)
        for update, total, takes in zip(work, sums, taken, strict=True):
            update.sums, update.taken = total, takes
        clips = self._clip(work, ok)
        for update in work:
            update.apply(clips[update.key])
        return ok

    @staticmethod
    def _clip(work: Sequence["_Update"], ok: Tensor) -> dict[Any, Tensor]:
        """Clipping factor of each group on each of its devices, with shape ``()``."""
        groups: dict[int, list[_Update]] = defaultdict(list)
        for update in work:
            groups[id(update.group)].append(update)
        factors: dict[Any, Tensor] = {}
        for members in groups.values():
            if members[0].group["clipping_scale"] is None:
                factors |= {u.key: torch.ones((), device=u.batch.device) for u in members}
                continue
            norm, step = _norm_and_step(members)
            for update in members:
                if update.key not in factors:
                    factors[update.key] = update.clip(norm, step, ok)
        return factors

    def _diagnose(
        self,
        group: dict[str, Any],
        batches: Sequence[ParamBatch],
        report: Report,
        grad_scale: float,
    ) -> dict[str, Any]:
        amp = AmpState(torch.tensor(grad_scale, dtype=torch.float64, device="cpu"))
        work = [_Update(batch, amp) for batch in batches]
        own = []
        for batch in batches:
            more = report.bad_elements(batch), torch.stack([v.sum() for v in batch.moments[0]])
            sums = scaled_adam.sums(batch, None)
            own.append(torch.cat([sums, *(row.to(sums)[None] for row in more)]))
        for batch, update, sums in zip(batches, work, self._sums(batches, own), strict=True):
            update.sums = sums[:3]
            report.add_gradients(batch, sums[[0, 3]])
            report.add_unusual(batch, sums[0].cpu().to(torch.float64) / grad_scale**2, sums[4])
            report.add("dominance", batch, update.norm_terms())
            if not update.is_scalar:
                report.add("rms", batch, batch.columns["param_rms"])
        if not batches:
            return report.finish_clipping({}, 0)
        step = max(int(batch.columns["step"].max()) for batch in batches)
        return report.finish_clipping(batches[0].states[0], step)


class _Update:
    """A step of one batch of parameters, all of one element or none.

    Args:
        batch: The parameters.
        amp: What a gradient scaler has left.

    Attributes:
        sums: Sums over all shards, with shape ``(3, tensors)``, once they are known.
        taken: Whether each parameter takes the step, with shape ``(tensors)``, once it is known.
    """

    sums: Tensor
    taken: Tensor

    def __init__(self, batch: ParamBatch, amp: AmpState) -> None:
        self.batch, self.group, self.rule = batch, batch.group, _rule(batch)
        self.key = id(batch.group), batch.device
        self.is_scalar = "param_rms" not in batch.columns
        self.step = batch.columns["step"].to(batch.exact, copy=True)
        self.unscale = amp.unscale(batch)
        # Nobody looks at the weights of a frozen parameter, whose step stays zero.
        needed = scaled_adam.needs_products(self.step, self.rule) & batch.working
        self.needed = torch.zeros_like(needed) if self.is_scalar else needed

    def local_sums(self) -> Tensor:
        """This process's part of the sums."""
        # Products of shards are of use only once they are added up: with the others, each step.
        every_step = self.batch.sharded and not self.is_scalar
        needed = self.batch.working if every_step else self.needed
        sums: Tensor = self.batch.passes.sums(self.batch, needed)
        return sums

    def finite(self, sums: Tensor) -> Tensor:
        """Whether sums can be used, with shape ``(tensors)``."""
        return scaled_adam.finite(sums, self.needed, self.batch.state_dtype)

    def norm_terms(self) -> Tensor:
        """Squared norm of each parameter's scaled gradient, with shape ``(tensors)``."""
        squares = self.sums[0] * self.unscale**2
        if self.is_scalar:
            # In 2022 the norm took no account of the smaller learning rate.
            scale = 1.0 if self.rule.original else self.rule.scalar_lr_scale
            return squares * scale**2
        return squares * self.batch.columns["param_rms"].to(squares) ** 2

    def clip(self, norm: Tensor, step: Tensor, ok: Tensor) -> Tensor:
        """Remembers the group's norm on this device and returns the factor."""
        state, device = self.batch.states[0], self.batch.device
        known, factor = clipping.clip(
            clipping.Clipping(*(state[name] for name in CLIPPING)),
            norm.to(device),
            step.to(device),
            ok.to(device),
            scale=self.group["clipping_scale"],
            original=self.rule.original,
        )
        for name, value in zip(CLIPPING, vars(known).values(), strict=True):
            state[name].copy_(value)
        return factor

    def apply(self, clip: Tensor) -> None:
        """Moves states and weights.

        Args:
            clip: Clipping factor of the group, with shape ``()``.
        """
        batch, rule, unscale = self.batch, self.rule, self.unscale * clip
        known = None if self.is_scalar else self._size_step(unscale)
        # In 2022 the clipped gradient reached the sizes only.
        in_update = self.unscale if rule.original else unscale
        by = scaled_adam.step_scales(self.step, known, in_update, self.taken, rule)
        products = batch.passes.update(batch, by, rule)
        batch.store("step", self.step + self.taken)
        if known is not None:
            now = self.sums[1]
            if not batch.sharded:
                now = torch.where(self.needed, now, products)
            ring = scaled_adam.remembered(
                known[0].gradients,
                (now * unscale).to(batch.state_dtype),
                self.step,
                self.taken,
            )
            values = (known[0].rms, known[0].mean_square, ring)
            for name, column in zip(SIZES, values, strict=True):
                batch.store(name, column)

    def _size_step(self, unscale: Tensor) -> tuple[scaled_adam.Sizes, Tensor]:
        batch = self.batch
        sizes = scaled_adam.Sizes(*(batch.columns[name] for name in SIZES))
        gradient = (self.sums[1] * unscale).to(batch.state_dtype)
        rms = (self.sums[2] / batch.numel).sqrt().to(batch.state_dtype)
        return scaled_adam.size_step(sizes, gradient, rms, self.step, self.taken, self.rule)


def _norm_and_step(members: Sequence[_Update]) -> tuple[Tensor, Tensor]:
    """Norm of a group's scaled gradients and the steps it has taken, both with shape ``()``."""
    device = members[0].batch.device
    terms = torch.cat([update.norm_terms().to(device) for update in members])
    params = [p for update in members for p in update.batch.params]
    if len(members) > 1:
        # In the group's order: that of the batches may differ from process to process.
        places = torch.cat([update.batch.index.to(device) for update in members])
        terms = terms[places.argsort()]
        on_host = [place for update in members for place in update.batch.places]
        params = [params[i] for i in sorted(range(len(params)), key=on_host.__getitem__)]
    # Asked for in float64 only, and slow to gather.
    shapes = [(str(p.dtype), *p.shape) for p in params] if terms.dtype is torch.float64 else []
    # A parameter that was frozen for a time is behind its group.
    step = torch.stack([update.step.max().to(device) for update in members]).max()
    return clipping.total_norm(terms, shapes), step


def _rule(batch: ParamBatch) -> scaled_adam.Rule:
    group = batch.group
    return scaled_adam.Rule(
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
