"""Options, weights, metrics and saved state of a balancer: all but the passing of gradients."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from steadygrad._checks import InputError, check_count, check_number, check_type
from steadygrad.balance.aggregators import Aggregator, Combiner, load_aggregator
from steadygrad.balance.core import BalancerCore
from steadygrad.balance.loss_context import (
    BalancerOptions,
    GradScale,
    check_metric_names,
    check_scale,
    check_weights,
)
from steadygrad.balance.results import StepResult
from steadygrad.distributed import RankSum

__all__ = ["BalancerBase"]

OTHER_NORM = "make a new balancer; averages of one norm do not apply to another"
NEW_ONE = "make a new balancer; `load_state_dict` hands it the averages"


def live_option(name: str, check: Callable[[str, Any], Any]) -> Any:
    """Makes a property of a field of the options, whose new values pass through ``check``."""

    def write(balancer: Any, value: Any) -> None:
        setattr(balancer.core.options, name, check(name, value))

    return property(lambda balancer: getattr(balancer.core.options, name), write)


def fixed_option(name: str, remedy: str, read: Callable[[Any], Any] | None = None) -> Any:
    """Makes a property that raises when it is set; it reads the options, or calls ``read``."""

    def refuse(balancer: Any, value: Any) -> None:
        raise InputError(
            f"Attribute `{name}` should be left as it was made. Found it set to {value!r}. "
            f"Remedy: {remedy}."
        )

    return property(read or (lambda b: getattr(b.core.options, name)), refuse)


def check_flag(name: str, value: Any) -> bool:
    """Refuses values other than True and False."""
    return check_type(name, value, bool, "True or False")


class BalancerBase(nn.Module):
    """The part of :class:`LossBalancer` that no gradient passes through.

    Attributes:
        core: The computation and all buffers.
    """

    core: BalancerCore

    balance_grads: bool = live_option("balance_grads", check_flag)
    total_norm: float = live_option("total_norm", partial(check_number, low=0, low_open=True))
    ema_decay: float = live_option("ema_decay", partial(check_number, low=0, high=1))
    eps: float = live_option("eps", partial(check_number, low=0))
    lag: bool = live_option("lag", check_flag)
    grad_scale: GradScale = live_option("grad_scale", check_scale)
    accumulation_steps: int = live_option("accumulation_steps", check_count)
    per_batch_item: bool = fixed_option("per_batch_item", OTHER_NORM)
    batch_independent: bool = fixed_option("batch_independent", OTHER_NORM)
    weights: Mapping[str, float] = fixed_option(
        "weights", "`set_weights({...})`", lambda b: MappingProxyType(b.core.weights_by_name)
    )
    combine: Aggregator | None = fixed_option("combine", NEW_ONE, lambda b: b.aggregator)
    process_group: Any = fixed_option("process_group", NEW_ONE, lambda b: b.core.ranks.members)
    # The name under which an aggregator's own state is saved.
    aggregator: Aggregator | None = fixed_option(
        "combine", NEW_ONE, lambda b: b.core.combiner.aggregator
    )

    def __init__(
        self,
        weights: Mapping[str, float],
        balance_grads: bool = True,
        total_norm: float = 1.0,
        ema_decay: float = 0.999,
        per_batch_item: bool = True,
        eps: float = 1e-12,
        *,
        batch_independent: bool = False,
        lag: bool = False,
        monitor: bool = False,
        combine: str | Aggregator | None = None,
        grad_scale: GradScale = None,
        accumulation_steps: int = 1,
        process_group: Any = "all",
    ) -> None:
        super().__init__()
        checked, aggregator = check_weights(weights), load_aggregator(combine)
        flags = {"per_batch_item": per_batch_item, "batch_independent": batch_independent}
        options = BalancerOptions(**{name: check_flag(name, flag) for name, flag in flags.items()})
        ranks = RankSum(process_group)
        self.core = BalancerCore(list(checked), options, Combiner(aggregator), ranks)
        self.core.set_weights(checked)
        if isinstance(aggregator, nn.Module):
            self._modules["aggregator"] = aggregator
        self.balance_grads, self.total_norm, self.eps = balance_grads, total_norm, eps
        self.ema_decay, self.lag, self.monitor = ema_decay, lag, monitor
        self.grad_scale, self.accumulation_steps = grad_scale, accumulation_steps
        self._last: StepResult | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Hands modules and parameters to properties, too: torch would register them instead."""
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def monitor(self) -> bool:
        """Whether angles between gradients are measured."""
        return self.core.options.monitor

    @monitor.setter
    def monitor(self, value: bool) -> None:
        if check_flag("monitor", value):
            check_metric_names(self.core.names)
        self.core.options.monitor = value

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of the losses named; the averages stay.

        Raises:
            InputError: If a name is unknown, a weight negative, or no positive one is left.
        """
        self.core.set_weights(check_weights(weights, self.weights))

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Numbers of the last step, as tensors with shape ``()``; empty before the first one.

        ====================== ================================================================
        ``ratio_NAME``         share of the averaged norms before balancing; audiocraft's metric
        ``share_before_NAME``  share of this step's norms before balancing
        ``share_after_NAME``   share of this step's norms after balancing, and after an aggregator's
                               weights; not with one of whole gradients, which has none
        ``target_NAME``        share asked for, among the losses that took part
        ``norm_NAME``          this step's norm
        ``average_NAME``       the average it was scaled by
        ``scale_NAME``         factor on the loss's gradient
        ``nonfinite_NAME``     micro-batches it was left out of for a gradient that was not finite
        ``zero_NAME``          micro-batches it was left out of for a gradient of zero
        ``total``              with ``monitor``: norm of the whole batch's balanced gradient
        ``cosine_NAME_NAME``   with ``monitor``: between two losses' gradients
        ``disagreement``       on several processes: whether their options ever differed
        ====================== ================================================================
        """
        return {} if self._last is None else self.core.metrics(self._last)

    @property
    def left_out(self) -> dict[str, dict[str, Tensor]]:
        """Number of micro-batches that each loss was left out of, for a gradient it had.

        ``{"nonfinite": {name: count}, "zero": {name: count}}``, of all processes together: one
        that is broken on two of them in one micro-batch counts once.
        """
        counts = {"nonfinite": self.core.nonfinite, "zero": self.core.zero}
        return {k: dict(zip(self.core.names, v.clone(), strict=True)) for k, v in counts.items()}

    def end_step(self) -> None:
        """Ends a step that has fewer micro-batches than usual, as at an epoch's end.

        Call it on every process.
        """
        self.core.averages.end_step(self.core.ranks.size)

    def reset(self) -> None:
        """Forgets all averages; weights and counts stay."""
        self.core.averages.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts anew with the current weights, as is the custom after `to_empty`."""
        self.core.reset_parameters()
        self._last = None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a saved state, by the losses' names. Its weights win over the constructor's.

        Args:
            state_dict: The result of ``state_dict``.
            strict: Whether the losses must be those of old. If not, losses that were not saved
                start afresh, with their weights, and the state of others is dropped.
            assign: As in torch.

        Raises:
            InputError: If the losses are others, which also holds where a whole model is loaded.
        """
        self.core.partial = not strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self.core.partial = False

    def _load_from_state_dict(self, *state: Any, **options: Any) -> None:
        super()._load_from_state_dict(*state, **options)
        # They are of a step before this state.
        self._last = None

    def extra_repr(self) -> str:
        """Shows the weights."""
        return f"{dict(self.weights)}"
