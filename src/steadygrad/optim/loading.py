"""State dicts whose tensors keep their types.

torch's ``load_state_dict`` casts every state tensor to its parameter's type: a float32 master of
bfloat16 weights loses what it is there for.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

__all__ = ["TypeKeepingOptimizer"]


class _Kept:
    """A tensor that torch hands through as it is, neither cast nor moved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TypeKeepingOptimizer(Optimizer):
    """An optimizer that loads every tensor in its own type, and as a copy."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, every tensor in its own type and as a copy on its parameter's device.

        Args:
            state_dict: What ``state_dict()`` returned, on any device.

        Raises:
            ValueError: If it is of other groups or another optimizer; nothing is changed then.
        """
        # The last hook, so that others see tensors, and what they return is what is loaded.
        handle = self.register_load_state_dict_pre_hook(self._wrap)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        """Raises before anything is changed if a state cannot be this optimizer's."""

    def _place(
        self, parameter: Tensor, group: Mapping[str, Any], name: str, value: Tensor
    ) -> Tensor:
        """A loaded tensor as it is kept."""
        return value.detach().to(parameter.device, copy=True)

    @staticmethod
    def _wrap(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(optimizer, TypeKeepingOptimizer)
        optimizer._check_loaded(state_dict)
        return {
            **state_dict,
            "state": {
                index: {
                    name: _Kept(value) if isinstance(value, Tensor) else value
                    for name, value in values.items()
                }
                for index, values in state_dict["state"].items()
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for p in group["params"]:
                values = self.state.get(p, {})
                for name, value in values.items():
                    if isinstance(value, _Kept):
                        values[name] = self._place(p, group, name, value.tensor)
