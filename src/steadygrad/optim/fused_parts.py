"""A step of either optimizer by compiled loops: the large passes; the rest is as elsewhere."""

import numpy as np
import torch
from torch import Tensor

from steadygrad.formulas import clipping, scaled_adam
from steadygrad.optim.fused import Fused
from steadygrad.optim.lans_parts import LansPart
from steadygrad.optim.leaves import Leaves, Scaling
from steadygrad.optim.scaled_adam_parts import CLIPPING, SIZES, GroupPart

__all__ = ["FusedLansPart", "FusedScaledAdamPart"]


# A squared norm whose inner product with weights, squared, may be past float32's range.
LARGE = 1e20


def taken(ok: Tensor) -> bool:
    """Whether a step is taken. Read from the host's own memory: there is nothing to wait for."""
    return bool(ok.numpy())


def rows(*columns: Tensor) -> Tensor:
    """Factors as a kernel takes them: contiguous float64 with a row for each tensor."""
    return torch.stack([column.to(torch.float64) for column in columns], dim=1)


class FusedLansPart(LansPart):
    """A step of LANS.

    Args:
        leaves: The parameters.
        fused: The same, for compiled loops.
    """

    def __init__(self, leaves: Leaves, fused: Fused) -> None:
        super().__init__(leaves)
        self._fused = fused
        bound, group = leaves.group["clip_value"], leaves.group
        self._settings = torch.tensor(
            [
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                torch.inf if bound is None else bound,
            ],
            dtype=torch.float64,
        )

    def square_norms(self) -> Tensor:
        """This process's part of the gradients' squared norms, with shape ``(1, parameters)``."""
        self._fused.launch("square_sums")
        return self._fused.sums()[:1]

    def directions(self, square_norms: Tensor, ok: Tensor) -> Tensor:
        """Moves the moments; this process's part of the norms that the step's length needs."""
        if not taken(ok):
            return square_norms.new_zeros(3, len(square_norms))
        steps = self._fused.read_columns()["step"] + 1
        self._fused.write_columns({"step": steps})
        first, second = self.corrections(steps)
        self._factors = self.inverse_norms(square_norms), 1 / second, first
        self._fused.launch(
            "lans_directions", rows(self._factors[0], 1 / first, 1 / second), self._settings
        )
        return self._fused.sums()

    def apply(self, sums: Tensor, ok: Tensor) -> None:
        """Moves the weights."""
        if not taken(ok):
            return
        by = self.coefficients(sums, ok)
        inverse, second, first = self._factors
        decay = 1 - self.group["weight_decay"] * (by.momentum + by.gradient)
        factors = rows(inverse, second, by.momentum / first, by.gradient, decay)
        self._fused.launch("lans_apply", factors, self._settings)
        self._fused.wrote()


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
        self._fused = fused
        super().__init__(leaves, scaling)
        place = self.step % self.rule.period
        turn = (place == self.rule.period - 1) | (self.step == 0)
        self._before = (turn | fused.sharded) & (not self.is_scalar)

    def read_columns(self) -> dict[str, Tensor]:
        """The small states, stacked."""
        found = self._fused.read_columns()
        return {name: c if name == "step" else c.to(self.dtype) for name, c in found.items()}

    def parameter_sums(self) -> Tensor:
        """This process's part of the sums; zeros for those that may come later."""
        self._fused.launch("scaled_adam_sums", self._before.to(torch.float64))
        sums = self._fused.sums()
        # What comes late must not overflow when it is squared: large ones are looked at now.
        large = (sums[0] > LARGE) & ~self._before & (not self.is_scalar)
        if not taken(large.any()):
            return sums
        self._before |= large
        self._fused.launch("scaled_adam_sums", self._before.to(torch.float64))
        return self._fused.sums()

    def mean_squares(self) -> Tensor:
        """Mean squares of the weights, with shape ``(parameters)``."""
        return self.sums[2] / torch.tensor(self.leaves.numels)

    def move(self, clip: Tensor, ok: Tensor) -> None:
        """Moves state and weights."""
        if not taken(ok):
            return
        known = None if self.is_scalar else self.learn_sizes(clip, ok)
        scales = scaled_adam.step_scales(self.step, known, self.rule)
        weight = torch.zeros_like(scales.gradient) if scales.weight is None else scales.weight
        factors = rows(scales.second_moment, scales.gradient, weight)
        self._fused.launch("scaled_adam_update", factors, self._settings(clip))
        self._fused.wrote()
        columns = {"step": self.step + 1}
        if known is not None:
            columns |= dict(zip(SIZES, vars(known[0]).values(), strict=True))
            late = (self._fused.sums()[1] * (self.unscale * clip)).to(self.dtype)
            self._put_late(columns["scale_grads"], late)
        self._fused.write_columns(columns)

    def learn_sizes(self, clip: Tensor, ok: Tensor) -> tuple[scaled_adam.Sizes, Tensor]:
        """What is known of the sizes now, and the size steps."""
        if bool(self._before.any().numpy()):
            return super().learn_sizes(clip, ok)
        # No size is due: nothing changes but the inner products, and these come late.
        known = scaled_adam.Sizes(*(self.columns[name] for name in SIZES))
        return known, torch.zeros_like(known.rms)

    def _put_late(self, ring: Tensor, late: Tensor) -> None:
        """Enters the inner products that the update has taken along."""
        rows = np.flatnonzero(~self._before.numpy())
        places = (self.step.numpy()[rows] % self.rule.period).astype(np.int64)
        ring.numpy()[rows, places] = late.numpy()[rows]

    def clip(self, found: tuple[Tensor, Tensor] | None, ok: Tensor) -> Tensor:
        """Remembers the group's norm and returns the factor; one if there is no clipping.

        Between thresholds these are a few numbers, which the host is quicker with.
        """
        if found is None:
            return torch.ones(())
        norm, step = found[0].numpy()[()], int(found[1].numpy())
        period = len(self.leaves.states[0]["model_norms"])
        if step % period == 0 or step in clipping.EARLY or not taken(ok):
            return super().clip(found, ok)
        norms, threshold, clipped = (self.leaves.states[0][name].numpy() for name in CLIPPING)
        norms[step % period] = norm
        if not np.isfinite(threshold):
            return torch.ones(())
        # As formulas.clipping says, in float32.
        factor = np.float32(1) / (np.float32(norm) + np.float32(1e-20)) * np.float32(threshold)
        clipped += factor < 1
        return torch.tensor(min(factor, np.float32(1)))

    def _settings(self, clip: Tensor) -> Tensor:
        rule = self.rule
        bound = rule.scalar_max if self.is_scalar else torch.inf
        bounds = (bound, torch.inf) if rule.original else (torch.inf, bound)
        fixed = torch.tensor([*rule.betas, rule.eps, 0.0, *bounds], dtype=torch.float64)
        fixed[3] = self.gradient_scale(clip)
        return fixed
