"""State that is allocated at construction, kept in its own type, and shared where a group has one.

Checkpoints are then the same before the first step as after it, on every process.
"""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.numerics import exact, wide
from steadygrad.optim.checks import (
    LARGEST,
    check_names,
    check_options,
    check_state_tensor,
)
from steadygrad.optim.loading import TypeKeepingOptimizer
from steadygrad.shards import is_on_mesh_of, is_sharded, shared_out

# Name of the float32 master of a 16-bit parameter, which holds the digits that the weight cannot.
MASTER = "master_weight"


@dataclass(frozen=True)
class StateField:
    """Form in which a state is kept: one number, unless it is said to be larger."""

    elementwise: bool = False  # an element for each of the parameter's
    length: str = ""  # the option that is its length, if it has one
    dtype: torch.dtype | None = None  # None: that of the averages
    low: float = -LARGEST  # least and largest value that can be loaded
    high: float = LARGEST
    initial: float = 0.0
    shared: bool = False  # exists once a group and device, seen from every parameter of it
    sized_only: bool = False  # only parameters of more than one element have it

    def shape(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape of the state, for a parameter in a group with some options."""
        if self.elementwise:
            return tuple(parameter.shape)
        return (group[self.length],) if self.length else ()


STEP = StateField(dtype=torch.float32, low=0.0)
SKIPPED = StateField(dtype=torch.float32, low=0.0, shared=True)
# The averages of the gradient and of its square, beside both counts.
ADAM_FIELDS = {
    "step": STEP,
    "exp_avg": StateField(elementwise=True),
    "exp_avg_sq": StateField(elementwise=True, low=0.0),
    "skipped": SKIPPED,
}


def ensure_master(
    parameter: Tensor, state: MutableMapping[str, Any], group: Mapping[str, Any]
) -> None:
    """Makes or drops a master where the model was cast, or the option changed, since."""
    is_narrow = parameter.dtype in (torch.float16, torch.bfloat16)
    wanted = is_narrow and group["master_weights"] is not False
    if (MASTER in state) != wanted and state.pop(MASTER, None) is None:
        state[MASTER] = parameter.detach().to(torch.float32)


class StatefulOptimizer(TypeKeepingOptimizer):
    """An optimizer with eager state for each parameter, and masters for 16-bit ones.

    A subclass lists its states, those with the parameter's shape in the order of its passes.
    """

    _fields: Mapping[str, StateField]
    # Remedy for a state dict of another optimizer.
    _load_remedy = "load what this optimizer's state_dict() returned."
    # Number of decays in the option `betas`.
    _betas = 2

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Checks a group's options; a subclass adds its own."""
        check_options(group, self._betas)

    def _state_dtype(self, parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        """Type of a parameter's averages: float32, or float64 for float64 parameters."""
        return wide(parameter.dtype)

    def _field(self, name: str) -> StateField:
        return self._fields.get(name) or StateField(elementwise=name == MASTER)

    def _dtype_of(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
        dtype = self._field(name).dtype or self._state_dtype(parameter, group)
        return exact(parameter.device) if dtype is torch.float64 else dtype

    def _new_state(
        self, parameter: Tensor, group: Mapping[str, Any], *, shared: bool
    ) -> dict[str, Tensor]:
        """A parameter's own state before its first step, masters aside, or its group's."""
        found = {}
        for name, field in self._fields.items():
            if field.shared is shared and not (field.sized_only and parameter.numel() == 1):
                dtype = self._dtype_of(name, parameter, group)
                if field.elementwise:
                    found[name] = torch.zeros_like(parameter, dtype=dtype)
                else:
                    shape = field.shape(parameter, group)
                    value, device = field.initial, parameter.device
                    found[name] = torch.full(shape, value, dtype=dtype, device=device)
        return found

    def _make_state(self, group: Mapping[str, Any]) -> None:
        check_names(group, self.defaults)
        self._fill_state()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill_state(self) -> None:
        """State of parameters that have none, as at construction or where a wrapper put others.

        And masters where the model was cast since.
        """
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    exact(p.device)  # Found out now, because a compiler would trace the attempt.
                    state.update(self._new_state(p, group, shared=False))
                ensure_master(p, state, group)
                for name, value in state.items():
                    # ZeroRedundancyOptimizer puts what it loads on the host.
                    if value.device != p.device and not value.ndim:
                        state[name] = value.to(p.device)
        self._tie_shared()
        known = {p for group in self.param_groups for p in group["params"]}
        if len(self.state) > len(known):
            for p in [p for p in self.state if p not in known]:
                del self.state[p]

    def _tie_shared(self) -> None:
        """Lets every parameter of a group and device see the same shared tensors."""
        names = [name for name, field in self._fields.items() if field.shared]
        for group in self.param_groups:
            found: dict[torch.device, dict[str, Any]] = {}
            for p in group["params"]:
                state = self.state[p]
                if not found.get(p.device):
                    found[p.device] = {name: state[name] for name in names if name in state}
            for p in group["params"]:
                own = found[p.device]
                if len(own) < len(names):
                    own.update({**self._new_state(p, group, shared=True), **own})
                self.state[p].update(own)

    def _check_groups(self) -> None:
        """Checks the options, which anybody may have changed since the last step."""
        lengths = [(name, f.length) for name, f in self._fields.items() if f.length]
        for group in self.param_groups:
            self._check_group(group)
            for name, option in lengths:
                states = (self.state[p] for p in group["params"])
                state = next((state for state in states if name in state), None)
                if state is not None and len(state[name]) != group[option]:
                    raise InputError(
                        f"Option `{option}` should be what it was at construction. Found "
                        f"{group[option]} with a state for {len(state[name])}. Remedy: a new "
                        "optimizer."
                    )

    def state_dict(self) -> dict[str, Any]:
        """The state and the groups' options, as torch's."""
        # A wrapper may have put other parameters into the groups since, or cast the model.
        self._fill_state()
        found = super().state_dict()
        for group in found["param_groups"]:
            # A schedule of numpy's, which `weights_only=True` would not load.
            group.update({k: v.item() for k, v in group.items() if isinstance(v, np.generic)})
        return found

    def _finish_load(self) -> None:
        self._fill_state()

    def _place(
        self, parameter: Tensor, group: Mapping[str, Any], name: str, value: Tensor
    ) -> Tensor:
        # To the type it is kept in, should it have been saved in another.
        dtype = self._dtype_of(name, parameter, group)
        value = value.detach().to(parameter.device, dtype, copy=True)
        return shared_out(value, parameter) if self._field(name).elementwise else value

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> None:
        self._fill_state()
        super()._check_loaded(state_dict)

    def _check_loaded_group(self, saved: Mapping[str, Any]) -> None:
        check_names(saved, self.defaults)
        self._check_group({**self.defaults, **saved})

    def _check_loaded_state(
        self, parameter: Tensor, saved: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        expected = set(self.state[parameter]) - {MASTER}
        if missing := expected - set(state):
            raise InputError(
                f"Expected a `state_dict` of {type(self).__name__}, with {sorted(missing)}. Found "
                f"{sorted(state)}. Remedy: {self._load_remedy}"
            )
        for name in (expected | {MASTER}) & set(state):
            field, value, group = self._field(name), state[name], {**self.defaults, **saved}
            # In the type that it is kept in, a larger number would be infinite.
            most = torch.finfo(self._dtype_of(name, parameter, group)).max
            bounds = max(field.low, -most), field.high if math.isinf(field.high) else most
            check_state_tensor(name, value, field.shape(parameter, group), bounds, parameter)
            if is_sharded(value) and not (field.elementwise and is_on_mesh_of(value, parameter)):
                raise InputError(
                    f"Expected a state `{name}` that is whole, or on the mesh of its parameter. "
                    f"Found a DTensor on {value.device_mesh}. Remedy: value.full_tensor(), or "
                    "torch.distributed.checkpoint, which lays states out anew."
                )
