"""A balancer's arguments, as attributes that are live or refuse to be set."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from steadygrad._checks import check_count, check_number
from steadygrad.balance.combine import Aggregator, Combiner, load_aggregator
from steadygrad.balance.join import Join, Outcome
from steadygrad.balance.settings import Fixed, Live, Shared, flag
from steadygrad.balance.told import GradScale, check_scale
from steadygrad.balance.weights import check_weights
from steadygrad.balance.window import Kind, NormAverages
from steadygrad.sharding import RankSum

__all__ = ["Options"]

OTHER_NORM = "a new balancer, because averages of one norm are none of another"
NEW_ONE = "a new balancer, to which `load_state_dict` hands the averages"


class Options(nn.Module):
    """What :class:`LossBalancer` was told; its docstring names the arguments."""

    balance_grads = Live("core.balance", flag)
    total_norm = Live("core.total_norm", partial(check_number, low=0, low_open=True))
    ema_decay = Live("core.averages.steps.decay", partial(check_number, low=0, high=1))
    eps = Live("core.eps", partial(check_number, low=0))
    lag = Live("core.averages.lag", flag)
    monitor = Live("core.monitor", flag)
    grad_scale = Live("_grad_scale.value", lambda _, scale: check_scale(scale))
    accumulation_steps = Live("_accumulation_steps", check_count)
    weights = Fixed[Mapping[str, float]]("core.weights_by_name", "`set_weights({...})`")
    per_batch_item = Fixed[bool]("core.averages.kind.per_item", OTHER_NORM)
    batch_independent = Fixed[bool]("core.averages.kind.batch_independent", OTHER_NORM)
    combine = Fixed[Aggregator | None]("aggregator", NEW_ONE)
    process_group = Fixed[Any]("core.ranks.members", NEW_ONE)

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
        grad_scale: GradScale | None = None,
        accumulation_steps: int = 1,
        process_group: Any = "all",
    ) -> None:
        super().__init__()
        checked = check_weights(weights)
        kind = Kind(
            flag("per_batch_item", per_batch_item), flag("batch_independent", batch_independent)
        )
        self.aggregator = load_aggregator(combine)
        self.core = Join(
            list(checked),
            NormAverages(len(checked), kind),
            Combiner(self.aggregator),
            RankSum(process_group),
        )
        self.core.set_weights(list(checked.values()))
        # In a box, because a scaler that is a module would become a part of this one.
        self._grad_scale: Shared[GradScale | None] = Shared(None)
        self.balance_grads, self.total_norm, self.eps = balance_grads, total_norm, eps
        self.ema_decay, self.lag, self.monitor = ema_decay, lag, monitor
        self.grad_scale, self.accumulation_steps = grad_scale, accumulation_steps
        self._last: Outcome | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an option, or raises, also where the value is a module: torch would file that."""
        if name == "aggregator" and "core" in self._modules:
            name = "combine"  # what is asked for gradients is not looked up here
        option = getattr(type(self), name, None)
        if isinstance(option, Live):
            option.__set__(self, value)
        else:
            super().__setattr__(name, value)
