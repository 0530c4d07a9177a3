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
from steadygrad.optim.checks import check_parameter, check_shape

__all__ = ["TypeKeepingOptimizer", "check_parts", "names_of"]


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
        given: Any = state_dict
        if not isinstance(given, Mapping):
            check_parts(given)
        # The last hook, so that others see tensors, and what they return is what is loaded.
        handle = self.register_load_state_dict_pre_hook(self._wrap)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._finish_load()

    def _finish_load(self) -> None:
        """Completes a state that was loaded."""

    def _check_loaded(self, given: Mapping[str, Any]) -> None:
        """Raises before anything is changed if a state cannot be this optimizer's."""
        check_parts(given)
        groups = given["param_groups"]
        own_sizes, sizes = ([len(g["params"]) for g in x] for x in (self.param_groups, groups))
        if own_sizes != sizes:
            what = "a different number of parameter groups" if len(sizes) != len(own_sizes) else ""
            raise InputError(
                f"Expected parameter groups of {own_sizes} parameters. Found {what or sizes}. "
                "Remedy: load the state of an optimizer with the same groups."
            )
        for own, saved in zip(self.param_groups, groups, strict=True):
            _check_order(own.get("param_names"), saved.get("param_names"))
            self._check_loaded_group(own, saved)
            for parameter, key in zip(own["params"], saved["params"], strict=True):
                self._check_loaded_state(parameter, saved, given["state"].get(key, {}))

    def _check_loaded_group(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raises InputError if a saved group cannot be loaded into a group of this optimizer."""

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
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Old programs count steps in plain numbers.
        try:
            value = torch.tensor(value, dtype=torch.float64, device="cpu")
        except OverflowError:
            raise InputError(
                "Expected states within float64's range. Found a larger number. Remedy: load a "
                "state dict that is not damaged."
            ) from None
    if isinstance(value, Tensor) and (
        (value.is_meta and not has_meta)
        or value.is_quantized
        or value.is_nested
        or value.layout is not torch.strided
    ):
        raise InputError(
            "Expected dense states with values. Found a meta, quantized, nested or sparse tensor. "
            "Remedy: load a state dict that is not damaged."
        )
    return _Kept(value) if isinstance(value, Tensor) else value


def names_of(group: Mapping[str, Any]) -> Sequence[str]:
    """Names of a group's parameters; ``params.3`` for the fourth where they have none."""
    return group.get("param_names") or [f"params.{i}" for i in range(len(group["params"]))]


def check_parts(given: Any, remedy: str = "") -> None:
    """Raises InputError unless this is a state dict in its outline: groups, and states by keys."""
    wrong = ""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= {*given}:
        wrong = f"{sorted(map(str, given))}" if isinstance(given, Mapping) else _kind(given)
    elif not _is_list_of(Mapping, groups := given["param_groups"]):
        wrong = f"`param_groups` of {_kind(groups)}, or with others than dictionaries"
    elif not all(_is_list_of((int, str), group.get("params")) for group in groups):
        wrong = "a group without a list of keys as its `params`"
    elif len(keys := [key for group in groups for key in group["params"]]) != len({*keys}):
        wrong = "a parameter twice"
    elif not isinstance(states := given["state"], Mapping):
        wrong = f"a `state` of {_kind(states)}"
    elif not all(isinstance(state, Mapping) for state in states.values()):
        wrong = "a parameter's state that is no dictionary"
    if wrong:
        raise InputError(
            f"Expected a state dict with state and param_groups. Found {wrong}. Remedy: "
            f"{remedy or 'load what state_dict() returned'}."
        )


def _is_list_of(kind: Any, value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, kind) for one in value)


def _kind(value: Any) -> str:
    return f"type {type(value).__name__}"


def _check_order(own: Any, found: Any) -> None:
    """Raises if the same names come in another order: torch goes by place alone."""
    if found is not None and not _is_list_of(str, found):
        raise InputError(
            "Expected `param_names` that are texts. Found others. Remedy: load a state dict that "
            "is not damaged."
        )
    if own is not None and found is not None and len(found) != len(own):
        raise InputError(
            f"Expected `param_names` of {len(own)} parameters. Found {len(found)}. Remedy: load a "
            "state dict that is not damaged."
        )
    if own is None or found is None or sorted(own) != sorted(found):
        return
    for place, (name, other) in enumerate(zip(own, found, strict=True)):
        if name != other:
            raise InputError(
                f"Expected the state of {name!r} at place {place} of a group. Found that of "
                f"{other!r}. Remedy: build the optimizer from the parameters in the order of the "
                "state dict, as torch pairs them by place."
            )
