"""ScaledAdam: Adam whose steps are proportional to each parameter's size, which is learned too."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadygrad._checks import InputError, check_choice, check_count, check_number
from steadygrad.optim.base import ShardedOptimizer
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.icefall import unstack
from steadygrad.optim.leaves import Leaves, Scaling
from steadygrad.optim.scaled_adam_parts import CLIPPING, SIZES, GroupPart, norm_and_step, part_of

__all__ = ["ScaledAdam"]

RECIPES = ("zipformer", "stateless7")


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
        capturable: Whether steps may be recorded in a CUDA graph; nothing else depends on it.

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
    _none_is_zero = True
    _large = ("exp_avg_sq", "delta")
    _small = ("step", *SIZES)
    _kernels = (
        "scaled_adam_sums",
        "scaled_adam_add",
        "scaled_adam_judge",
        "scaled_adam_learn",
        "scaled_adam_update",
        "scaled_adam_enter",
    )
    _early_sums = True
    _device_job = "DeviceScaledAdam"

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

    def _kind(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return *super()._kind(parameter, group), parameter.numel() == 1

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

    def _check_state(self, group: Mapping[str, Any]) -> None:
        """Refuses periods that were changed since, before anything has moved."""
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
            "model_norm_threshold": torch.full((), torch.inf, dtype=torch.float64, device=device),
            "num_clipped": torch.zeros((), dtype=torch.float32, device=device),
        }

    def _update(
        self,
        leaves: list[Leaves],
        over_shards: Callable[[list[Tensor]], list[Tensor]],
        scaling: Scaling,
    ) -> Tensor:
        work = [part_of(some, scaling) for some in leaves]
        sums = over_shards([some.parameter_sums() for some in work])
        for some, rows in zip(work, sums, strict=True):
            some.take(rows)
        ok = scaling.ok([some.finite() for some in work])
        clips = self._clip(work, ok)
        for some in work:
            some.move(clips[some.key], ok.to(some.leaves.device))
        return ok

    @staticmethod
    def _clip(work: list[GroupPart], ok: Tensor) -> dict[Any, Tensor]:
        """Every group's clipping factor on each of its devices."""
        groups: dict[int, list[GroupPart]] = defaultdict(list)
        for some in work:
            groups[id(some.leaves.group)].append(some)
        factors = {}
        for members in groups.values():
            found = norm_and_step(members)
            for some in members:
                if some.key not in factors:
                    factors[some.key] = some.clip(found, ok)
        return factors

    def _diagnose(self, group: dict[str, Any], report: Report, grad_scale: float) -> dict[str, Any]:
        members = []
        for some in self._leaves(group, fused=False):
            part = GroupPart(some, Scaling(torch.tensor(1 / grad_scale, device="cpu"), None))
            own = part.parameter_sums()
            moments = torch.stack([v.sum() for v in some.locals("exp_avg_sq")])
            more = (row.to(own)[None] for row in (report.bad_elements(some), moments))
            (sums,) = self._sums_over_shards([some])([torch.cat([own, *more])])
            report.add_gradients(some, sums[[0, 3]])
            report.add_unusual(some, sums[0].to(torch.float64) / grad_scale**2, sums[4])
            part.sums = sums[:3]
            report.add("dominance", some, part.norm_terms())
            if not part.is_scalar:
                report.add("rms", some, some.column("param_rms"))
            members.append(part)
        if not members:
            return report.finish_clipping({}, 0)
        step = max(int(part.last_step()) for part in members)
        return report.finish_clipping(members[0].leaves.states[0], step)
