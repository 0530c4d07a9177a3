"""The schedules these optimizers were published with, as ordinary torch schedulers."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from steadygrad._checks import InputError, check_count, check_number, check_type
from steadygrad.averages import check_state

_MOST = 2.0**53  # squares of quotients of what a saved state holds must be finite
_BOUNDS = dict.fromkeys(("lr_batches", "lr_epochs"), (2.0**-53, _MOST))


class _FactorLR(LRScheduler):
    """A schedule that multiplies each group's base learning rate by one factor, as LambdaLR."""

    def _factor(self) -> float:
        """The factor now."""
        raise NotImplementedError

    def get_lr(self) -> list[float | Tensor]:
        """Learning rates for the batch to come, one a group."""
        factor, groups = self._factor(), self.optimizer.param_groups
        return [base * factor for base, _ in zip(self.base_lrs, groups, strict=True)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; torch of another release may keep more, or less, for itself."""
        check_type("state_dict", state_dict, Mapping, "what state_dict() returned")  # type: ignore[type-abstract]
        like = self.state_dict()
        kept = {k: x for k, x in state_dict.items() if k in like}
        own = {k: x for k, x in like.items() if k in kept or not k.startswith("_")}
        # Tensors and numbers stand for one another.
        for name in {"base_lrs", "_last_lr"} & {*own}:
            own[name] = [0.0 for _ in own[name]]
        plain = {k: [*map(_plain, x)] if isinstance(x, list) else x for k, x in kept.items()}
        check_state("state_dict", plain, own, low=0, high=_MOST, bounds=_BOUNDS)
        super().load_state_dict(kept)

    def _write(self) -> None:
        """Sets learning rates without counting a batch."""
        self._last_lr = self.get_lr()
        for group, value in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


class WarmupHoldDecay(_FactorLR):
    r"""Linear warm-up, a constant stretch, and a linear decay to zero: the schedule of LANS.

    .. math:: \eta_t = \eta\,f(t), \qquad
              f(t) = \tfrac{t}{W},\; 1,\; \tfrac{T - t}{T - W - H},\; 0

    for :math:`t` in the warm-up, in the constant stretch, in the decay and after it. Call
    ``step()`` once an optimizer step. The first step is taken at a learning rate of 0 where there
    is a warm-up, as in gluon-nlp's program. Unlike there it stays 0 beyond ``total_steps``, and
    decays without a warm-up, too.

    Args:
        optimizer: The optimizer; each group's learning rate now is its top, :math:`\eta`. Tensor
            learning rates are written in place, without waiting for the device.
        total_steps: Optimizer steps :math:`T` of the whole run.
        warmup: Length :math:`W` of the warm-up: an int counts steps, a float below 1
            is a share of ``total_steps``. The default is that of gluon-nlp's script.
        hold: Length :math:`H` of the constant stretch, likewise.
        last_epoch: -1, or the number of the last step done, to continue without a state.

    As torch's LambdaLR it sets the rate: it follows others in a ``SequentialLR`` only.

    References:
        | Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes
        | (Zheng et al., 2020), https://arxiv.org/abs/2006.13484
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup: float = 0.05,
        hold: float = 0.25,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = check_count("total_steps", total_steps)
        self.warmup_steps = _length("warmup", warmup, total_steps)
        self.hold_steps = _length("hold", hold, total_steps)
        # Shares such as .7 and .3 may add up to a rounding error above the whole.
        if self.warmup_steps + self.hold_steps > total_steps * (1 + 1e-9):
            raise InputError(
                f"Parameters `warmup` and `hold` should together take at most {total_steps} steps. "
                f"Found {self.warmup_steps:g} + {self.hold_steps:g}. "
                "Remedy: shorten one; an int counts steps, a float is a share of them."
            )
        super().__init__(optimizer, last_epoch)

    def _factor(self) -> float:
        step, total, warmup = self.last_epoch, self.total_steps, self.warmup_steps
        if step >= total:
            return 0.0
        if step < warmup:
            return step / warmup
        if step < warmup + self.hold_steps:
            return 1.0
        return (total - step) / (total - warmup - self.hold_steps)


def _plain(rate: Any) -> Any:
    is_one = isinstance(rate, Tensor) and rate.numel() == 1 and rate.is_floating_point()
    return float(rate) if is_one else rate


def _length(name: str, value: float, total_steps: int) -> float:
    """A number of steps, from one or from a share of all."""
    if isinstance(value, int):
        return float(check_number(name, value, low=0, high=total_steps))
    # 1.0 may be meant as one step or as the whole run.
    remedy = f"an int for steps (1, or all {total_steps}), a float below 1 for a share of them"
    return check_number(name, value, low=0, high=1, high_open=True, remedy=remedy) * total_steps


class Eden(_FactorLR):
    r"""Icefall's schedule, made for ScaledAdam: falls with batches and with epochs.

    .. math:: \eta_{b,e} = \eta \Bigl(1 + \tfrac{b^2}{B^2}\Bigr)^{-1/4}
                           \Bigl(1 + \tfrac{e^2}{E^2}\Bigr)^{-1/4}
                           \min\Bigl(1, s + (1 - s) \tfrac{b}{b_w}\Bigr)

    Call ``step()`` once an optimizer step and ``step_epoch()`` once an epoch; a loop of icefall's
    calls ``step_batch(batch)`` instead, before the optimizer's step. Unlike in icefall the learning
    rate is warmed up from construction on, not from the first ``step()``, and the base learning
    rates are part of the state.

    Args:
        optimizer: As in :class:`WarmupHoldDecay`; a learning rate now is the base, :math:`\eta`.
        lr_batches: Scale :math:`B` in batches; icefall's recipes use 5000 to 7500.
        lr_epochs: Scale :math:`E` in epochs; icefall's recipes use 3.5 to 6. Any measure of data
            will do, such as hours, if ``step_epoch`` gets the same.
        warmup_batches: Batches :math:`b_w` of the linear warm-up; 0: none.
        warmup_start: Share of the learning rate that it begins at, :math:`s`.
        last_epoch: -1, or the number of the last batch done, to continue without a state.

    References:
        | Zipformer: A faster and better encoder for automatic speech recognition
        | (Yao et al., 2024), https://arxiv.org/abs/2310.11230
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_batches: float,
        lr_epochs: float,
        warmup_batches: float = 500,
        warmup_start: float = 0.5,
        *,
        last_epoch: int = -1,
    ) -> None:
        self.lr_batches = float(check_number("lr_batches", lr_batches, low=0, low_open=True))
        self.lr_epochs = float(check_number("lr_epochs", lr_epochs, low=0, low_open=True))
        self.warmup_batches = float(check_number("warmup_batches", warmup_batches, low=0))
        self.warmup_start = float(check_number("warmup_start", warmup_start, low=0, high=1))
        self.epoch = 0.0  # so far
        super().__init__(optimizer, last_epoch)

    def _factor(self) -> float:
        batch, start = self.last_epoch, self.warmup_start
        by_batch = math.pow(1 + (batch / self.lr_batches) ** 2, -0.25)
        by_epoch = math.pow(1 + (self.epoch / self.lr_epochs) ** 2, -0.25)
        if batch >= self.warmup_batches:
            return by_batch * by_epoch
        return by_batch * by_epoch * (start + (1 - start) * batch / self.warmup_batches)

    def step_batch(self, batch: float) -> None:
        """Sets the number of batches so far, over all epochs, before the optimizer's step."""
        self.last_epoch = int(check_number("batch", batch, low=0))
        self._write()

    def step_epoch(self, epoch: float | None = None) -> None:
        """Sets the epochs so far, fractions allowed, and counts no batch.

        ``epoch`` is 0 at the start of the first one. None: one more, at the end of an epoch.
        """
        self.epoch = self.epoch + 1 if epoch is None else float(check_number("epoch", epoch, low=0))
        self._write()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, of this schedule or of icefall's, which has two counters only."""
        if not isinstance(state_dict, Mapping) or "last_epoch" in state_dict:
            super().load_state_dict(state_dict)
            return
        counters = {name: state_dict.get(name) for name in ("epoch", "batch")}
        check_state("state_dict", counters, dict.fromkeys(counters, 0.0), low=0, high=_MOST)
        self.epoch = state_dict["epoch"]
        # Icefall counts before the optimizer's step, and saves after it: that batch is done.
        self.step_batch(state_dict["batch"] + 1)
