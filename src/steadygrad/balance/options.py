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
    grad_scale: GradScale | None = None
    accumulation_steps: int = 1

    def norms(self, sums: Tensor, items: Tensor, ranks: int) -> Tensor:
        """Computes norms from sums over items, as the two options of the norm say."""
        return norms_from_sums(
            sums,
            items,
            per_item=self.per_batch_item,
            batch_independent=self.batch_independent,
            ranks=ranks,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> "BalancerOptions":
        """Copies the record but shares the gradient scaler, as copies of a model do."""
        return copy.copy(self)


def live_option(name: str, check: Callable[[str, Any], Any]) -> Any:
    """Makes a property of an option that may be set between steps.

    Args:
        name: Field of :class:`BalancerOptions`.
        check: Given the name and a value, returns the value or raises.
    """

    def read(balancer: Any) -> Any:
        return getattr(balancer.core.options, name)

    def write(balancer: Any, value: Any) -> None:
        setattr(balancer.core.options, name, check(name, value))

    return property(read, write)


def fixed_option(name: str, read: Callable[[Any], Any], remedy: str) -> Any:
    """Makes a property of an option that raises when it is set.

    Args:
        name: Name of the option.
        read: Reads it from a balancer.
        remedy: What to do instead of setting it.
    """

    def refuse(balancer: Any, value: Any) -> None:
        raise InputError(
            f"Attribute `{name}` should be left as it was made. Found it set to {value!r}. "
            f"Remedy: {remedy}."
        )

    return property(read, refuse)


def check_flag(name: str, value: Any) -> bool:
    """Returns ``value`` if it is True or False.

    Raises:
        InputError: If it is something else.
    """
    return check_type(name, value, bool, "True or False")
