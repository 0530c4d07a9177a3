"""Options of a balancer: one record, and the properties by which they are read and set."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from steadygrad._checks import InputError, check_type
from steadygrad.balance.loss_context import GradScale
from steadygrad.formulas.balance import norms_from_sums

__all__ = ["BalancerOptions", "check_flag", "fixed_option", "live_option"]


@dataclass
class BalancerOptions:
    """Record of the options that :class:`LossBalancer` documents."""

    per_batch_item: bool
    batch_independent: bool
    balance_grads: bool = True
    total_norm: float = 1.0
    eps: float = 1e-12
    lag: bool = False
    monitor: bool = False
    grad_scale: GradScale = None
    accumulation_steps: int = 1

    def norms(self, sums: Tensor, items: Tensor, ranks: int) -> Tensor:
        """Computes the chosen norms from sums over items of ``ranks`` processes."""
        kind = {"per_item": self.per_batch_item, "batch_independent": self.batch_independent}
        return norms_from_sums(sums, items, ranks=ranks, **kind)

    def __deepcopy__(self, memo: dict[int, object]) -> "BalancerOptions":
        """Copies the record but shares the gradient scaler, as copies of a model do."""
        return copy.copy(self)


def live_option(name: str, check: Callable[[str, Any], Any]) -> Any:
    """Makes a property of a field of the options; ``check`` gets what it is set to."""

    def write(balancer: Any, value: Any) -> None:
        setattr(balancer.core.options, name, check(name, value))

    return property(lambda balancer: getattr(balancer.core.options, name), write)


def fixed_option(name: str, remedy: str, read: Callable[[Any], Any] | None = None) -> Any:
    """Makes a property of a field of the options, or of what ``read`` gives, that cannot be set."""

    def refuse(balancer: Any, value: Any) -> None:
        raise InputError(
            f"Attribute `{name}` should be left as it was made. Found it set to {value!r}. "
            f"Remedy: {remedy}."
        )

    return property(read or (lambda b: getattr(b.core.options, name)), refuse)


def check_flag(name: str, value: Any) -> bool:
    """Refuses what is not True or False."""
    return check_type(name, value, bool, "True or False")
