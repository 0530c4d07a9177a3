"""A step of either optimizer by compiled loops: the large passes; the rest is as elsewhere."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadygrad.formulas import clipping
from steadygrad.formulas.tensors import wide
from steadygrad.kernels.tables import LansNumber, LansSetting, Number, Setting
from steadygrad.optim.fused import CPU, Fused
from steadygrad.optim.lans_parts import LansPart
from steadygrad.optim.leaves import Leaves, Scaling
from steadygrad.optim.scaled_adam_parts import CLIPPING, GroupPart

__all__ = ["FusedLansPart", "FusedScaledAdamPart"]

LARGEST = float(np.finfo(np.float32).max)


def taken(ok: Tensor) -> bool:
    """Whether a step is taken. Read from the host's own memory: there is nothing to wait for."""
    return bool(ok.numpy())


def _on_host(number: float | Tensor) -> float:
    """A number, read as :func:`taken` is."""
    if not isinstance(number, Tensor):
        return number
    # Numpy has no bfloat16.
    return float(number.detach().to(torch.float64).numpy().reshape(()))


def _rounded(number: Any) -> float:
    """As float32 has it; its largest number for those beyond."""
    return float(np.float32(min(float(number), LARGEST)))


class FusedLansPart(LansPart):
    """A step of LANS.

    Args:
        leaves: The parameters.
        fused: The same, for compiled loops.
    """

    def __init__(self, leaves: Leaves, fused: Fused) -> None:
        super().__init__(leaves)
        self._fused, group = fused, leaves.group
        bound, low, high = group["clip_value"], group["lower_bound"], group["upper_bound"]
        # As kernels.tables.LansSetting names them.
        fused.found[: len(LansSetting)] = (
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            np.inf if bound is None else bound,
            -1.0 if group["maximize"] else 1.0,
            _on_host(group["lr"]),
            0.0 if low is None else low,
            np.inf if high is None else high,
        )

    def square_norms(self) -> Tensor:
        """This process's part of the gradients' squared norms, with shape ``(1, parameters)``."""
        self._fused.launch_small("lans_norms")
        return self._fused.local_sums(LansNumber.SLOPES, 1)

    def directions(self, square_norms: Tensor, ok: Tensor) -> Tensor:
        """Moves the moments; this process's part of the norms that the step's length needs."""
        fused = self._fused
        if taken(ok):
            fused.take_sums(LansNumber.SLOPES, square_norms[None])
            fused.launch_small("lans_begin")
            fused.launch("lans_directions")
            fused.launch_small("lans_ratios")
        return fused.local_sums(LansNumber.WEIGHTS, 3)

    def apply(self, sums: Tensor, ok: Tensor) -> None:
        """Moves the weights."""
        if not taken(ok):
            return
        fused = self._fused
        fused.take_sums(LansNumber.WEIGHTS, sums)
        fused.launch_small("lans_finish")
        fused.launch("lans_apply", fused.wrote)


class FusedScaledAdamPart(GroupPart):
    """A step of ScaledAdam.

    The inner products with weights cost a pass over these. They are needed before the update only
    where sizes are learned at this step, or where they must be added up over shards; elsewhere the
    update takes them along.

    Args:
        leaves: The parameters.
        fused: The same, for compiled loops.
        scaling: What a gradient scaler has left to do.
    """

    def __init__(self, leaves: Leaves, fused: Fused, scaling: Scaling) -> None:
        super().__init__(leaves, scaling)
        self._fused, rule, found = fused, self.rule, fused.found
        self._unscale = _on_host(self.unscale)
        bound = rule.scalar_max if self.is_scalar else np.inf
        # As kernels.tables.Setting names them.
        found[: Setting.SIZE_SCALE] = (
            _on_host(rule.lr),
            *rule.betas,
            rule.eps,
            rule.scalar_lr_scale,
            rule.min_rms,
            rule.max_rms,
            rule.period,
            rule.original,
            self.is_scalar,
            fused.sharded,
            *((bound, np.inf) if rule.original else (np.inf, bound)),
            self._unscale,
        )

    def read_columns(self) -> dict[str, Tensor]:
        """None: kernels see to the small states."""
        return {}

    def parameter_sums(self) -> Tensor:
        """This process's part of the sums; of little use yet where they may come later."""
        fused = self._fused
        fused.launch_small("scaled_adam_add")
        if fused.found[Setting.LATE]:
            fused.launch("scaled_adam_sums")
            fused.launch_small("scaled_adam_add")
        return fused.local_sums(Number.SLOPES, 3)

    def take(self, sums: Tensor) -> None:
        """Goes on with sums over all shards."""
        if self._fused.take_sums(Number.SLOPES, sums):
            self._fused.launch_small("scaled_adam_judge")

    def finite(self) -> Tensor:
        """Whether they are finite, their squares too, with shape ``()``."""
        return torch.tensor(not self._fused.found[Setting.BAD], device=CPU)

    def norm_terms(self) -> Tensor:
        """Squared norm of each parameter's scaled gradient, with shape ``(parameters)``."""
        return self._fused.numbers[:, Number.TERM].to(wide(self.leaves.weights[0].dtype))

    def known_norm(self) -> tuple[float, float] | None:
        """Squared norm and last step, unless processes must add up in one order."""
        # For float64 the original's rounding is repeated, which takes each of the terms.
        if self._fused.sharded or self._fused.types[1] is torch.float64:
            return None
        found = self._fused.found
        return float(found[Setting.SQUARE_NORM]), float(found[Setting.STEP])

    def last_step(self) -> Tensor:
        """Steps taken before this one, with shape ``()``."""
        return self._fused.settings[Setting.STEP]

    def move(self, clip: Tensor, ok: Tensor) -> None:
        """Moves state and weights."""
        if not taken(ok):
            return
        fused, size_scale = self._fused, self._unscale * _on_host(clip)
        self._fused.found[Setting.SIZE_SCALE] = size_scale
        # In 2022 the clipped gradient reached the sizes only.
        self._fused.found[Setting.SCALE] = self._unscale if self.rule.original else size_scale
        fused.launch_small("scaled_adam_learn")
        fused.launch("scaled_adam_update", fused.wrote)
        fused.launch_small("scaled_adam_enter")

    def clip(self, found: tuple[Tensor, Tensor] | None, ok: Tensor) -> Tensor:
        """Remembers the group's norm and returns the factor; one if there is no clipping.

        Between thresholds these are a few numbers, which the host is quicker with.
        """
        if found is None:
            return torch.ones((), dtype=torch.float32, device=CPU)
        norm, step = _on_host(found[0]), int(_on_host(found[1]))
        period = len(self.leaves.states[0]["model_norms"])
        if step % period == 0 or step in clipping.EARLY or not taken(ok):
            return super().clip(found, ok)
        norms, threshold, clipped = (self.leaves.states[0][name].numpy() for name in CLIPPING)
        norms[step % period] = norm
        if not np.isfinite(threshold):
            return torch.ones((), dtype=torch.float32, device=CPU)
        # As formulas.clipping says, in float32. Their product is exact in float64.
        inverse = np.float32(1) / (np.float32(norm) + np.float32(1e-20))
        factor = min(float(inverse) * _rounded(threshold), 1.0)
        clipped += factor < 1
        return torch.tensor(factor, dtype=torch.float32, device=CPU)
