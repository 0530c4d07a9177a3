"""State dicts whose tensors keep their types.

torch's ``load_state_dict`` casts every state tensor to its parameter's type: a float32 master of
bfloat16 weights loses what it is there for.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from steadygrad._checks import InputError

__all__ = ["TypeKeepingOptimizer", "paired_states"]


_PARTS = {"state": Mapping, "param_groups": Sequence}


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

    # States with an element for each of the parameter's; None: those that now have its shape.
    _elementwise: frozenset[str] | None = None

    def _check_loaded(self, given: Mapping[str, Any]) -> None:
        """Raises before anything is changed if a state cannot be this optimizer's."""
        if not all(isinstance(given.get(name), kind) for name, kind in _PARTS.items()):
            raise InputError(
                f"Expected a state dict with {' and '.join(_PARTS)}. Found "
                f"{sorted(map(str, given))}. Remedy: load what state_dict() returned."
            )
        for own, other in zip(self.param_groups, given["param_groups"], strict=False):
            _check_order(own.get("param_names"), other.get("param_names"))
        for parameter, state in paired_states(self.param_groups, given):
            for name in self._elementwise_of(parameter) & set(state):
                if getattr(state[name], "shape", None) != parameter.shape:
                    raise InputError(
                        f"Expected a `{name}` with the parameter's shape {tuple(parameter.shape)}. "
                        f"Found {tuple(getattr(state[name], 'shape', ()))}. Remedy: load the state "
                        "of a model with the same parameters in the same order."
                    )

    def _elementwise_of(self, parameter: Tensor) -> Set[str]:
        if self._elementwise is not None:
            return self._elementwise
        own = self.state.get(parameter, {})
        return {n for n, value in own.items() if getattr(value, "shape", None) == parameter.shape}

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
            # Options that are newer than the state dict, as in torch.
            "param_groups": [{**optimizer.defaults, **g} for g in state_dict["param_groups"]],
            "state": {
                index: {name: _kept(value) for name, value in values.items()}
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


def _kept(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Old programs count steps in plain numbers.
        value = torch.tensor(value, dtype=torch.float64, device="cpu")
    return _Kept(value) if isinstance(value, Tensor) else value


def paired_states(
    groups: Sequence[Mapping[str, Any]], given: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """Each parameter of ``groups`` with its state in a state dict, empty if it has none."""
    parameters = [p for group in groups for p in group["params"]]
    # Keys are numbers, or names where torch.distributed.checkpoint loads.
    keys = [key for group in given["param_groups"] for key in group["params"]]
    # Where the lengths differ, torch's own message says so next.
    for parameter, key in zip(parameters, keys, strict=False):
        yield parameter, given["state"].get(key, {})


def _check_order(own: Sequence[str] | None, found: Sequence[str] | None) -> None:
    """Raises if the same names come in another order: torch goes by place alone."""
    if own is None or found is None or sorted(own) != sorted(found):
        return
    for place, (name, other) in enumerate(zip(own, found, strict=True)):
        if name != other:
            raise InputError(
                f"Expected the state of {name!r} at place {place} of a group. Found that of "
                f"{other!r}. Remedy: build the optimizer from the parameters in the order of the "
                "state dict, as torch pairs them by place."
            )
