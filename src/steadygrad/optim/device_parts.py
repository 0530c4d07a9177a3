"""A step of either optimizer on an accelerator: which kernels, and in what order."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.kernels import device
from steadygrad.kernels.device_tables import Group, Row
from steadygrad.optim.device_job import DeviceJob, OverShards
from steadygrad.optim.leaves import Scaling

__all__ = ["DeviceLans", "DeviceScaledAdam"]

# Norms that one program can sort, and sizes' gradients that it can hold for each tensor.
MOST_NORMS, MOST_SIZES = 1024, 64


class DeviceLans(DeviceJob):
    """A step of LANS: three launches, and a collective after each of the first two."""

    large = ("exp_avg", "exp_avg_sq")
    small: Mapping[str, Row] = {"step": Row.STEP}

    def fill_group(
        self, row: NDArray[np.int64], numbers: NDArray[np.float64], group: dict[str, Any]
    ) -> None:
        """Fills in a group's own options."""
        bounds = {"clip_value": torch.inf, "lower_bound": -torch.inf, "upper_bound": torch.inf}
        known = {k: none if group[k] is None else group[k] for k, none in bounds.items()}
        numbers[Group.DECAY] = group["weight_decay"]
        numbers[Group.CLIP] = known["clip_value"]
        numbers[Group.LOW] = known["lower_bound"]
        numbers[Group.HIGH] = known["upper_bound"]

    def passes(self, over_shards: OverShards, scaling: Scaling) -> None:
        """Starts the kernels of a step."""
        whole = over_shards is None
        self.run("square_sums", whole)
        if over_shards is not None:
            sums = over_shards([self.totals(0, 1)])
            self.table.totals[:1].copy_(sums[0])
            self.decide(scaling, sums)
        self.run("lans_directions", whole)
        if over_shards is not None:
            self.table.totals[1:].copy_(over_shards([self.totals(1, 3)])[0])
        self.run("lans_apply", whole)


class DeviceScaledAdam(DeviceJob):
    """A step of ScaledAdam: three launches, four where groups are clipped, and one collective."""

    large = ("exp_avg_sq", "delta")
    small: Mapping[str, Row] = {
        "step": Row.STEP,
        "param_rms": Row.RMS,
        "scale_exp_avg_sq": Row.MEAN_SQUARE,
        "scale_grads": Row.RING,
    }
    none_is_zero = True

    @classmethod
    def can_take(
        cls, groups: Sequence[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> str | None:
        """Why kernels cannot take all parameters; None if they can."""
        for group in groups:
            clipped = group["clipping_scale"] is not None
            if clipped and group["clipping_update_period"] > MOST_NORMS:
                return f"not for more than {MOST_NORMS} norms to take a threshold from"
            if group["size_update_period"] > MOST_SIZES:
                return f"not for more than {MOST_SIZES} steps from one size step to the next"
        return super().can_take(groups, states)

    def order(self, params: list[Tensor]) -> list[Tensor]:
        """By type and shape in float64, where sums are to be as the original's."""
        if not any(p.dtype is torch.float64 for p in params):
            return params
        return sorted(params, key=_shape_key)

    def fill_group(
        self, row: NDArray[np.int64], numbers: NDArray[np.float64], group: dict[str, Any]
    ) -> None:
        """Fills in a group's own options."""
        numbers[Group.SCALAR_SCALE] = group["scalar_lr_scale"]
        numbers[Group.MIN_RMS] = group["param_min_rms"]
        numbers[Group.MAX_RMS] = group["param_max_rms"]
        numbers[Group.SCALAR_MAX] = group["scalar_max"]
        row[Group.PERIOD] = group["size_update_period"]
        row[Group.ORIGINAL] = group["recipe"] == "stateless7"
        numbers[Group.CLIPPING] = group["clipping_scale"] or 0.0
        row[Group.HISTORY] = group["clipping_update_period"]
        row[Group.STEPWISE] = any(p.dtype is torch.float64 for p in group["params"])
        for place, name in (
            (Group.NORMS, "model_norms"),
            (Group.THRESHOLD, "model_norm_threshold"),
            (Group.CLIPPED, "num_clipped"),
        ):
            row[place] = self.shared(group)[name].data_ptr() if group["params"] else 0

    def fill_rows(self) -> None:
        """Fills in what there is to know of each tensor besides addresses."""
        rows, owners = self.table.rows, np.asarray(self._group_of)
        rows[:, Row.SCALAR] = [p.numel() == 1 for p in self.params]
        rows[:, Row.NUMEL] = np.array([p.numel() for p in self.params], np.float64).view(np.int64)
        rows[:, Row.DOUBLE] = [kind[2] is torch.float64 for kind in self._kinds]
        keys = [(i, _shape_key(p)) for i, p in zip(owners.tolist(), self.params, strict=True)]
        rows[:, Row.STACK_END] = [a != b for a, b in zip(keys, [*keys[1:], None], strict=True)]
        for i, row in enumerate(self.table.groups):
            row[Group.FIRST] = np.searchsorted(owners, i)
            row[Group.TENSORS] = (owners == i).sum()

    def variant(self) -> tuple[Any, ...]:
        """Whether groups are clipped, and how many numbers there are to sort and to hold."""
        clipped = any(group["clipping_scale"] is not None for group in self._groups)
        periods = [group["size_update_period"] for group in self._groups]
        history = [g["clipping_update_period"] for g in self._groups if g["clipping_scale"]]
        return clipped, _power(max(periods)), _power(max(history, default=1))

    def passes(self, over_shards: OverShards, scaling: Scaling) -> None:
        """Starts the kernels of a step."""
        table, whole = self.table, over_shards is None
        clipped, width, history = self.variant()
        self.run("scaled_adam_sums", whole)
        if clipped or over_shards is not None:
            sums = self.totals(0, 3)
        if over_shards is not None:
            sums = over_shards([sums])[0]
            table.totals[:3].copy_(sums)
            # The sizes' gradients are squared too, and must not overflow.
            inner = sums[1].to(torch.float32).square()
            self.decide(scaling, [sums[0], inner])
        device.launch(
            "clip_and_learn" if clipped else "learn_each",
            table.device,
            len(table.groups) if clipped else table.tensors,
            *table.parts(),
            table.sums,
            table.totals,
            table.factors,
            table.flags,
            table.slots,
            table.tensors,
            width=width,
            history=history,
            whole=whole,
        )
        self.run("scaled_adam_update", whole)


def _shape_key(parameter: Tensor) -> tuple[Any, ...]:
    return str(parameter.dtype), *parameter.shape


def _power(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << (count - 1).bit_length()
