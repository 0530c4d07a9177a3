"""State dicts whose tensors keep their types.

torch's ``load_state_dict`` casts every state tensor to its parameter's type: a float32 master of
bfloat16 weights loses what it is there for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from steadygrad._checks import InputError
from steadygrad.optim.checks import LARGEST, check_parameter, check_shape


class _Kept:
    """A tensor that torch hands through as it is, neither cast nor moved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TypeKeepingOptimizer(Optimizer):
    """An optimizer that loads every tensor in its own type, and as a copy."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and the state of its parameters.

        Args:
            param_group: ``params``, and options that differ from the defaults.

        Raises:
            InputError: If an option is wrong or a parameter is complex or sparse.
        """
        if "named_params" in param_group and "params" not in param_group:
            # As icefall's get_parameter_groups_with_lrs makes them.
            param_group = {**param_group, "params": param_group["named_params"]}
            del param_group["named_params"]
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for parameter, name in zip(group["params"], names_of(group), strict=True):
                check_parameter(parameter, name)
            self._make_state(group)
        except BaseException:
            # Whatever it is, such as no memory for the states, or a warning that is an error.
            for parameter in self.param_groups.pop()["params"]:
                self.state.pop(parameter, None)
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Checks a group's options."""

    def _make_state(self, group: Mapping[str, Any]) -> None:
        """Makes the state of a group that was added."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, every tensor in its own type and as a copy on its parameter's device.

        Args:
            state_dict: The dictionary that ``state_dict()`` returned, on any device.

        Raises:
            ValueError: If it is of other groups or another optimizer; nothing is changed then.
        """
        # Hooks may make a state dict of what has another outline, and torch copies it for them.
        if not hasattr(state_dict, "copy"):
            check_outline(state_dict)
        # The last hook, so that others see tensors, and what they return is what is loaded.
        handle = self.register_load_state_dict_pre_hook(self._wrap)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._finish_load()

    def _finish_load(self) -> None:
        """Completes a state that was loaded."""

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Raises before anything is changed if a state cannot be this optimizer's."""
        check_outline(state_dict)
        # torch itself refuses other numbers of groups and parameters.
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            _check_order(group.get("param_names"), saved.get("param_names"))
            self._check_loaded_group(saved)
            for parameter, key in zip(group["params"], saved["params"], strict=False):
                self._check_loaded_state(parameter, saved, state_dict["state"].get(key, {}))

    def _check_loaded_group(self, saved: Mapping[str, Any]) -> None:
        """Raises InputError if this optimizer cannot have a group that was saved."""

    def _check_loaded_state(
        self, parameter: Tensor, saved: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        """Raises InputError if a parameter cannot have a state that was saved with a group."""
        for name, value in self.state.get(parameter, {}).items():
            if getattr(value, "shape", None) == parameter.shape:
                check_shape(name, state.get(name, value), tuple(parameter.shape), parameter)

    def _place(
        self, parameter: Tensor, group: Mapping[str, Any], name: str, value: Tensor
    ) -> Tensor:
        """A loaded tensor as it is kept."""
        return value.detach().to(parameter.device, copy=True)

    @staticmethod
    def _wrap(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(optimizer, TypeKeepingOptimizer)
        optimizer._check_loaded(state_dict)
        has_meta = any(p.is_meta for group in optimizer.param_groups for p in group["params"])
        return {
            **state_dict,
            # Options that are newer than the state dict, as in torch.
            "param_groups": [{**optimizer.defaults, **g} for g in state_dict["param_groups"]],
            "state": {
                index: {name: _kept(value, has_meta) for name, value in values.items()}
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


def _kept(value: Any, has_meta: bool) -> Any:
    is_bad = isinstance(value, Tensor) and (
        (value.is_meta and not has_meta) or value.is_quantized or value.layout is not torch.strided
    )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Old programs count steps in plain numbers.
        is_bad = abs(value) > LARGEST
        value = value if is_bad else torch.tensor(value, dtype=torch.float64, device="cpu")
    if is_bad:
        raise InputError(
            "Expected states that are numbers, or dense tensors with values. Found another. "
            "Remedy: load a state dict that is not damaged."
        )
    return _Kept(value) if isinstance(value, Tensor) else value


def names_of(group: Mapping[str, Any]) -> Sequence[str]:
    """Names of a group's parameters; ``params.3`` for the fourth where they have none."""
    return group.get("param_names") or [f"params.{i}" for i in range(len(group["params"]))]


def check_outline(state_dict: Any, remedy: str = "load what state_dict() returned") -> None:
    """Raises InputError unless this is a state dict in its outline: groups, and states by keys."""
    try:
        groups, states = state_dict["param_groups"], state_dict["state"]
        keys = [key for group in groups for key in group["params"]]
        states = [*states.values()]
        has_dicts = all(isinstance(each, Mapping) for each in [*groups, *states])
        fits = has_dicts and len({*keys}) == len(keys) and {*map(type, keys)} <= {int, str}
    except (TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise InputError(
            "Expected a `state_dict` with param_groups, which list their parameters by keys, and a "
            f"state for these keys. Found none in what was given. Remedy: {remedy}."
        )


def _check_order(names: Any, saved: Any) -> None:
    """Raises if the same names come in another order: torch goes by place alone."""
    if not names or saved is None:
        return
    if not isinstance(saved, list) or len(saved) != len(names) or {*map(type, saved)} != {str}:
        raise InputError(
            f"Expected `param_names` of {len(names)} parameters. Found {saved!r:.60}. Remedy: load "
            "a state dict that is not damaged."
        )
    if sorted(saved) != sorted(names):
        return
    for place, (name, other) in enumerate(zip(names, saved, strict=True)):
        if name != other:
            raise InputError(
                f"Expected the state of {name!r} at place {place} of a group. Found that of "
                f"{other!r}. Remedy: build the optimizer from the parameters in the order of the "
                "state dict, as torch pairs them by place."
            )
