"""A step of either optimizer by compiled loops: the large passes; the rest is as elsewhere."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.formulas import clipping
from steadygrad.kernels.tables import Number
from steadygrad.optim.fused import CPU, Fused
from steadygrad.optim.lans_parts import LansPart
from steadygrad.optim.leaves import Leaves, Scaling
from steadygrad.optim.scaled_adam_parts import CLIPPING, SIZES, GroupPart

__all__ = ["FusedLansPart", "FusedScaledAdamPart"]


# Squared inner products of gradients and weights that are past float32's range, with a margin: the
# gradients' squared norm, whatever the weights are, and its product with the weights' last known.
LARGE, LARGE_PRODUCT = 1e20, 1e30


def taken(ok: Tensor) -> bool:
    """Whether a step is taken. Read from the host's own memory: there is nothing to wait for."""
    return bool(ok.numpy())


def _on_host(number: float | Tensor) -> float:
    """A number, read as :func:`taken` is."""
    return float(number.detach().numpy().reshape(())) if isinstance(number, Tensor) else number


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
            device=CPU,
        )

    def square_norms(self) -> Tensor:
        """This process's part of the gradients' squared norms, with shape ``(1, parameters)``."""
        # Of the step's first pass, which is over.
        return self._fused.sums()[:1]

    def directions(self, square_norms: Tensor, ok: Tensor) -> Tensor:
        """Moves the moments; this process's part of the norms that the step's length needs."""
        if not taken(ok):
            return square_norms.new_zeros(3, len(square_norms))
        steps = torch.from_numpy(self._fused.read_small()) + 1
        self._fused.launch_small("scatter", steps)
        first, second = self.corrections(steps[0])
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
        self._fused.launch("lans_apply", factors, self._settings, self._fused.wrote)


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
        # As the first pass was told one step ago.
        self._before = fused.ahead.numpy() != 0
        step = self.step.numpy()
        self._due = self._is_due(step)
        fused.ahead = torch.from_numpy(self._is_due(step + 1).astype(np.float64))

    def _is_due(self, step: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whose inner products are needed before the update, at a count of steps."""
        if self.is_scalar:
            return np.zeros(len(step), bool)
        period = self.rule.period
        turn = step % period == period - 1
        return turn | (step == 0) | self._fused.sharded

    def read_columns(self) -> dict[str, Tensor]:
        """The small states that are looked at here; kernels see to the others."""
        found = torch.from_numpy(self._fused.read_small())
        return dict(zip(("step", SIZES[0]), found, strict=False))

    def parameter_sums(self) -> Tensor:
        """This process's part of the sums; zeros for those that may come later."""
        sums = self._fused.sums()
        # What comes late must not overflow when it is squared: large ones are looked at now.
        missing = (self._due | self._may_overflow(sums[0].numpy())) & ~self._before
        if not missing.any():
            return sums
        self._before |= missing
        factors = torch.from_numpy(self._before.astype(np.float64))
        self._fused.launch("scaled_adam_sums", factors)
        return self._fused.sums()

    def _may_overflow(self, squares: NDArray[np.floating]) -> NDArray[np.bool_]:
        if self.is_scalar:
            return np.zeros(len(squares), bool)
        weights = self.columns[SIZES[0]].numpy() ** 2 * self.leaves.numels
        # Not zero, which times infinity is no number.
        return (squares > LARGE) | (squares * np.maximum(weights, 1e-300) > LARGE_PRODUCT)

    def move(self, clip: Tensor, ok: Tensor) -> None:
        """Moves state and weights."""
        if not taken(ok):
            return
        numbers = torch.zeros(len(self.step), len(Number), dtype=torch.float64, device=CPU)
        table = numbers.numpy()
        table[:, Number.INNER], table[:, Number.SQUARE] = self.sums[1:].numpy()
        table[:, Number.ELEMENTS] = self.leaves.numels
        settings = self._learning(_on_host(self.unscale * clip))
        self._fused.launch_small("scaled_adam_learn", numbers, settings)
        self._fused.launch("scaled_adam_update", numbers, self._settings(clip), self._fused.wrote)
        if not self._before.all():
            late = self._fused.inner_products()
            table[:, Number.INNER] = np.where(self._before, table[:, Number.INNER], late)
        self._fused.launch_small("scaled_adam_enter", numbers, settings)

    def _learning(self, scale: float) -> Tensor:
        """Settings of the kernels that learn sizes; ``kernels.tables.Learn`` names the places."""
        rule, lr = self.rule, _on_host(self.rule.lr)
        beta2, scalar_scale = rule.betas[1], rule.scalar_lr_scale
        sizes = (rule.min_rms, rule.max_rms, rule.period)
        flags = (rule.original, self.is_scalar)
        return torch.tensor(
            [lr, beta2, rule.eps, scalar_scale, *sizes, *flags, scale],
            dtype=torch.float64,
            device=CPU,
        )

    def clip(self, found: tuple[Tensor, Tensor] | None, ok: Tensor) -> Tensor:
        """Remembers the group's norm and returns the factor; one if there is no clipping.

        Between thresholds these are a few numbers, which the host is quicker with.
        """
        if found is None:
            return torch.ones((), device=CPU)
        norm, step = found[0].numpy()[()], int(found[1].numpy())
        period = len(self.leaves.states[0]["model_norms"])
        if step % period == 0 or step in clipping.EARLY or not taken(ok):
            return super().clip(found, ok)
        norms, threshold, clipped = (self.leaves.states[0][name].numpy() for name in CLIPPING)
        norms[step % period] = norm
        if not np.isfinite(threshold):
            return torch.ones((), device=CPU)
        # As formulas.clipping says, in float32; what is past its range becomes one.
        with np.errstate(over="ignore"):
            factor = np.float32(1) / (np.float32(norm) + np.float32(1e-20)) * np.float32(threshold)
        clipped += factor < 1
        return torch.tensor(min(float(factor), 1.0), dtype=torch.float32, device=CPU)

    def _settings(self, clip: Tensor) -> Tensor:
        rule = self.rule
        bound = rule.scalar_max if self.is_scalar else torch.inf
        bounds = (bound, torch.inf) if rule.original else (torch.inf, bound)
        fixed = torch.tensor([*rule.betas, rule.eps, 0.0, *bounds], dtype=torch.float64, device=CPU)
        fixed[3] = self.gradient_scale(clip)
        return fixed
