"""State that is allocated at construction, kept in its own type, and shared where a group has one.

Checkpoints are then the same before the first step as after it, on every process.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.formulas.tensors import exact, wide
from steadygrad.optim.checks import (
    FOREIGN,
    LARGEST,
    check_options,
    check_parameter,
    check_state_tensor,
)
from steadygrad.optim.loading import TypeKeepingOptimizer, paired_states
from steadygrad.optim.masters import MASTER, ensure_master, wants_master
from steadygrad.sharding import shared_out

__all__ = ["StatefulOptimizer", "adam_state"]


class StatefulOptimizer(TypeKeepingOptimizer):
    """An optimizer with eager state for each parameter, and masters for 16-bit ones.

    A subclass says what a new state is.
    """

    # All other states are small and not sharded.
    _elementwise = frozenset({"exp_avg", "exp_avg_sq", "delta", MASTER})
    # Types of small states; the others have that of the averages.
    _types: Mapping[str, torch.dtype] = {"step": torch.float32, "skipped": torch.float32}
    # Least and largest values of states; the others may be any finite number.
    _ranges: Mapping[str, tuple[float, float]] = dict.fromkeys(
        ("step", "skipped", "exp_avg_sq"), (0.0, LARGEST)
    )
    # States that exist once a group and device, and are seen from every parameter of it.
    _shared: tuple[str, ...] = ("skipped",)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Checks a group's options; a subclass adds its own."""
        check_options(group, self.defaults)

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state before its first step, other than masters and shared tensors."""
        raise NotImplementedError

    def _new_shared(self, device: torch.device, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's shared state before the first step."""
        return {"skipped": torch.zeros((), dtype=torch.float32, device=device)}

    def _state_dtype(self, parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        """Type of a parameter's state: float32, or float64 for float64 parameters."""
        return wide(parameter.dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and its state.

        Args:
            param_group: ``params``, and options that differ from the defaults.

        Raises:
            InputError: If an option is wrong or a parameter is not of a real floating type.
        """
        if "named_params" in param_group and "params" not in param_group:
            # As icefall's get_parameter_groups_with_lrs makes them.
            param_group = {**param_group, "params": param_group["named_params"]}
            del param_group["named_params"]
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for parameter in group["params"]:
                check_parameter(parameter)
        except InputError:
            self.param_groups.pop()
            raise
        self._fill_state()

    @torch.no_grad()
    def _fill_state(self) -> None:
        """State of parameters that have none, as at construction or where a wrapper put others."""
        for group in self.param_groups:
            missing = [p for p in group["params"] if not self.state.get(p)]
            if not missing:
                continue
            shared = self._shared_of(group)
            for p in missing:
                exact(p.device)  # Found out now, because a compiler would trace the attempt.
                self.state[p].update(self._new_state(p, group))
                if wants_master(p, group):
                    self.state[p][MASTER] = p.detach().to(torch.float32)
                if p.device not in shared:
                    shared[p.device] = self._new_shared(p.device, group)
                self.state[p].update(shared[p.device])
        known = {p for group in self.param_groups for p in group["params"]}
        if len(self.state) > len(known):
            for p in [p for p in self.state if p not in known]:
                del self.state[p]

    @torch.no_grad()
    def _ensure_masters(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                ensure_master(p, self.state[p], group)

    def _shared_of(self, group: Mapping[str, Any]) -> dict[torch.device, dict[str, Any]]:
        """A group's shared state by device, from the first parameter that has it."""
        found: dict[torch.device, dict[str, Any]] = {}
        for p in group["params"]:
            state = self.state.get(p, {})
            if p.device not in found and all(name in state for name in self._shared):
                found[p.device] = {name: state[name] for name in self._shared}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state and the groups' options, as torch's."""
        # A wrapper may have put other parameters into the groups since, or cast the model.
        self._fill_state()
        self._ensure_masters()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, every tensor in the type it is kept in.

        Args:
            state_dict: What ``state_dict()`` returned, on any device.

        Raises:
            ValueError: If it is of other groups or another optimizer; nothing is changed then.
        """
        super().load_state_dict(state_dict)
        self._fill_state()
        self._ensure_masters()
        self._tie_shared()

    def _place(
        self, parameter: Tensor, group: Mapping[str, Any], name: str, value: Tensor
    ) -> Tensor:
        # To the type it is kept in, should it have been saved in another.
        dtype = self._types.get(name) or self._state_dtype(parameter, group)
        if dtype is torch.float64:
            dtype = exact(parameter.device)
        if name not in self._elementwise:
            return value.detach().to(parameter.device, dtype, copy=True)
        return shared_out(value.detach().to(parameter.device, dtype, copy=True), parameter)

    def _check_loaded(self, given: Mapping[str, Any]) -> None:
        super()._check_loaded(given)
        self._fill_state()
        for own, saved in zip(self.param_groups, given["param_groups"], strict=False):
            if foreign := FOREIGN & {*saved} - {*self.defaults}:
                raise self._not_its_own("groups", self.defaults, foreign)
            self._check_group({**self.defaults, **saved})
            for parameter, state in paired_states([own], {**given, "param_groups": [saved]}):
                expected = set(self.state[parameter]) - {MASTER}
                if not expected <= set(state):
                    raise self._not_its_own("a state", expected, state)
                for name in expected | ({MASTER} & set(state)):
                    shape = self._shape_of(name, parameter, {**self.defaults, **saved})
                    bounds = self._ranges.get(name)
                    check_state_tensor(name, state[name], shape, bounds, parameter)

    def _shape_of(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape of a state of a parameter in a group with some options."""
        return tuple(parameter.shape) if name in self._elementwise else ()

    def _not_its_own(self, what: str, expected: Iterable[str], found: Iterable[str]) -> InputError:
        return InputError(
            f"Expected {what} of {type(self).__name__} with {sorted(expected)}. Found "
            f"{sorted(found)}. Remedy: load what this optimizer's state_dict() returned."
        )

    def _tie_shared(self) -> None:
        """Lets every parameter of a group see the same shared tensors again."""
        for group in self.param_groups:
            shared = self._shared_of(group)
            for p in group["params"]:
                self.state[p].update(shared[p.device])


def adam_state(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A new step count and new averages of the gradient and of its square."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
    }
