"""State that is allocated at construction, kept in its own type, and shared where a group has one.

Checkpoints are then the same before the first step as after it, on every process. torch's own
``load_state_dict`` casts states to their parameter's type: a float32 master of bfloat16 weights
would lose what it is there for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from steadygrad._checks import InputError, shown
from steadygrad.numerics import exact, wide
from steadygrad.optim import codes
from steadygrad.optim.checks import check_names, check_options, check_parameter
from steadygrad.shards import as_shard, local, shared_out

Options = Mapping[str, Any]

# Name of the float32 master of a 16-bit parameter, which holds the digits that the weight cannot.
MASTER = "master_weight"
LARGEST = torch.finfo(torch.float64).max


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
    scales: str = ""  # the state in eight bits whose blocks' scales it has

    def shape(self, parameter: Tensor, group: Options) -> tuple[int, ...]:
        """Shape of the state, for a parameter in a group with some options."""
        if self.elementwise:
            return tuple(parameter.shape)
        if self.scales:
            rows = len(parameter) if parameter.ndim else 1
            return rows, -(-codes.row_of(parameter) // codes.BLOCK)
        return (group[self.length],) if self.length else ()


COUNT = StateField(dtype=torch.float32, low=0.0)
SHARED_COUNT = replace(COUNT, shared=True)
# The averages of the gradient and of its square, beside both counts.
ADAM_FIELDS = {
    "step": COUNT,
    "exp_avg": StateField(elementwise=True),
    "exp_avg_sq": StateField(elementwise=True, low=0.0),
    "skipped": SHARED_COUNT,
}


def scales_of(*moments: str) -> dict[str, StateField]:
    """States for the scales of moments that may be kept in eight bits."""
    scale = StateField(dtype=torch.uint8, low=codes.LOW, high=codes.HIGH, initial=codes.LOW)
    return {name + codes.EXPONENTS: replace(scale, scales=name) for name in moments}


def ensure_master(parameter: Tensor, state: dict[str, Any], group: Options) -> None:
    """Makes or drops a master where the model was cast, or the option changed, since."""
    is_narrow = parameter.dtype in (torch.float16, torch.bfloat16)
    wanted = is_narrow and group["master_weights"] is not False
    if (MASTER in state) != wanted and state.pop(MASTER, None) is None:
        state[MASTER] = parameter.detach().to(torch.float32)


class TypeKeepingOptimizer(Optimizer):
    """An optimizer that loads every tensor in its own type, and as a copy."""

    def _check_group(self, group: Options) -> None:
        """Raises InputError unless a group's options can be used; a subclass adds its own."""

    def _fill_state(self) -> None:
        """Makes the states that parameters lack."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and the state of its parameters, or neither."""
        if "named_params" in param_group and "params" not in param_group:
            # As icefall's get_parameter_groups_with_lrs makes them.
            param_group = {**param_group, "params": param_group["named_params"]}
            del param_group["named_params"]
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_names(group, self.defaults)
            self._check_group(group)
            for parameter, name in zip(group["params"], names_of(group), strict=True):
                check_parameter(parameter, name)
            self._fill_state()
        except BaseException:
            # Such as no memory for the states, or a warning that is an error.
            for parameter in self.param_groups.pop()["params"]:
                self.state.pop(parameter, None)
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads all of a state or none, each tensor in its own type and copied to its device."""
        # Hooks may make a state dict of what has another outline, and torch copies it for them.
        if not hasattr(state_dict, "copy"):
            check_outline(state_dict)
        self._fill_state()
        states: dict[Tensor, dict[str, Tensor]] = {}

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            check_outline(given)
            rest = {**given["state"]}
            # Options that are newer than the state dict, as in torch.
            groups = [{**self.defaults, **group} for group in given["param_groups"]]
            _check_order(self.param_groups, groups)
            # torch itself refuses other numbers of groups and parameters.
            for own, group in zip(self.param_groups, groups, strict=False):
                if "state_dtype" in own:
                    # How states are kept is this optimizer's own affair.
                    group["state_dtype"] = own["state_dtype"]
                self._check_group(group)
                for p, key in zip(own["params"], group["params"], strict=False):
                    state = rest.pop(key, {}).items()
                    states[p] = {name: as_tensor(name, value, p) for name, value in state}
                    self._check_state(p, group, states[p])
            return {**given, "param_groups": groups, "state": rest}

        def put(_: Optimizer) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    for name, value in states[p].items():
                        self.state[p][name] = self._place(p, group, name, value)

        # The last hook before and the first after, so that others see tensors, and what they return
        # is what is loaded.
        with (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ):
            super().load_state_dict(state_dict)
        self._fill_state()

    def _check_state(self, parameter: Tensor, group: Options, state: dict[str, Any]) -> None:
        """Raises InputError if a parameter cannot have a state that was saved with a group."""

    def _place(self, parameter: Tensor, group: Options, name: str, value: Tensor) -> Tensor:
        return value.detach().to(parameter.device, copy=True)


class StatefulOptimizer(TypeKeepingOptimizer):
    """An optimizer with eager state for each parameter, and masters for 16-bit ones.

    A subclass lists its states, those with the parameter's shape in the order of its passes.
    """

    _fields: Mapping[str, StateField]
    _load_remedy = "load what this optimizer's state_dict() returned"
    _betas = 2  # decays in the option `betas`

    def _check_group(self, group: Options) -> None:
        check_options(group, self._betas)

    def _state_dtype(self, parameter: Tensor, group: Options) -> torch.dtype:
        """Type of a parameter's averages: float32, or float64 for float64 parameters."""
        return wide(parameter.dtype)

    def _field(self, name: str) -> StateField:
        return self._fields.get(name) or StateField(elementwise=name == MASTER)

    def _dtype_of(self, name: str, p: Tensor, group: Options, is_coded: bool) -> torch.dtype:
        """Type of a state in memory, which is a code's if it is a moment in eight bits."""
        if is_coded and name + codes.EXPONENTS in self._fields:
            return torch.uint8
        dtype = self._field(name).dtype or self._state_dtype(p, group)
        return exact(p.device) if dtype is torch.float64 else dtype

    def _new_state(self, parameter: Tensor, group: Options) -> dict[str, Tensor]:
        """A parameter's state before its first step, masters aside."""
        found, is_coded = {}, codes.is_coded(parameter, group)
        for name, field in self._fields.items():
            dtype = self._dtype_of(name, parameter, group, is_coded)
            if field.elementwise:
                found[name] = torch.zeros_like(parameter, dtype=dtype)
            elif is_coded if field.scales else parameter.numel() != 1 or not field.sized_only:
                shape = field.shape(local(parameter), group)
                own = torch.full(shape, field.initial, dtype=dtype, device=parameter.device)
                whole = field.shape(parameter, group)
                found[name] = as_shard(own, parameter, whole) if field.scales else own
        return found

    def _bring_into_form(self, parameter: Tensor, group: Options, state: dict[str, Tensor]) -> None:
        """Makes codes of moments or numbers of codes, as the options and the parameter ask for."""
        is_wanted = codes.is_coded(parameter, group)
        for name, field in self._fields.items():
            if not field.scales or (name in state) is is_wanted:
                continue
            moment, row = state[field.scales], codes.row_of(parameter)
            code = codes.SECOND if self._fields[field.scales].low == 0.0 else codes.FIRST
            if is_wanted:
                moment = shared_out(moment.to(parameter.device, torch.float32), parameter)
                zero = torch.zeros(1, dtype=torch.int64, device=parameter.device)
                seed = codes.seeds_at(zero, zero, zero + codes.first_element(parameter)).squeeze(1)
                found, exponents = codes.encode(local(moment), seed, row, code)
                shape = field.shape(parameter, group)
                state[name] = as_shard(exponents.view(-1, shape[1]), parameter, shape)
            else:
                found = codes.decode(local(moment), local(state.pop(name)), row, code)
            # In memory of its own, laid out as before: loops take no other.
            part = torch.empty_like(local(moment), dtype=found.dtype).copy_(found)
            state[field.scales] = as_shard(part, moment, moment.shape)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill_state(self) -> None:
        """Makes missing states: at construction, for a wrapper's parameters, after a cast."""
        names = [name for name, field in self._fields.items() if field.shared]
        for group in self.param_groups:
            shared: dict[torch.device, dict[str, Any]] = {}
            # Those with a state first: what is shared on a device is what the first one has.
            for p in sorted(group["params"], key=lambda p: not self.state[p]):
                state = self.state[p]
                if not state:
                    exact(p.device)  # Found out now, because a compiler would trace the attempt.
                    state.update(self._new_state(p, group))
                ensure_master(p, state, group)
                self._bring_into_form(p, group, state)
                for name, value in state.items():
                    # ZeroRedundancyOptimizer puts what it loads on the host.
                    if value.device != p.device and not value.ndim:
                        state[name] = value.to(p.device)
                state.update(shared.setdefault(p.device, {name: state[name] for name in names}))
        known = {p for group in self.param_groups for p in group["params"]}
        for p in {*self.state} - known:
            del self.state[p]

    def _check_groups(self) -> None:
        """Checks the options, which anybody may have changed since the last step."""
        rings = {name: field.length for name, field in self._fields.items() if field.length}
        for group in self.param_groups:
            self._check_group(group)
            for name, option in rings.items():
                states = (self.state[p] for p in group["params"])
                length = next((len(s[name]) for s in states if name in s), group[option])
                if length != group[option]:
                    raise InputError(
                        f"Option `{option}` should be {length}, as at construction. Found "
                        f"{group[option]}. Remedy: a new optimizer."
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

    def _place(self, parameter: Tensor, group: Options, name: str, value: Tensor) -> Tensor:
        field, is_coded = self._field(name), codes.is_coded(parameter, group)
        dtype = self._dtype_of(name, parameter, group, is_coded)
        value = value.detach().to(parameter.device, dtype, copy=True)
        return shared_out(value, parameter) if field.elementwise or field.scales else value

    def _check_state(self, parameter: Tensor, group: Options, state: dict[str, Any]) -> None:
        scales = {name for name, field in self._fields.items() if field.scales}
        expected = {*self.state[parameter]} - {MASTER, *scales}
        if missing := expected - {*state}:
            raise InputError(
                f"Expected a `state_dict` of {type(self).__name__}, with {sorted(missing)}. Found "
                f"{sorted(state)}. Remedy: {self._load_remedy}."
            )
        for name in (expected | {MASTER, *scales}) & {*state}:
            field, value = self._field(name), state[name]
            if value.shape != (shape := field.shape(parameter, group)):
                raise damaged(name, f"with shape {shape}", tuple(value.shape))
            dtype = self._dtype_of(name, parameter, group, name + codes.EXPONENTS in state)
            # Codes without scales, or scales of numbers, would be taken for what they are not.
            if (dtype is torch.uint8) is not (value.dtype is torch.uint8):
                raise damaged(name, f"of {dtype} (scales are of codes alone)", value.dtype)
            # In the type that it is kept in, where a larger number is infinite.
            own = local(value).detach().to(dtype)
            if own.numel() and not own.is_meta:
                least, largest = (float(x) for x in torch.aminmax(own))
                # A comparison with NaN is false.
                if not field.low <= least <= largest <= field.high:
                    wanted = f"of numbers from {field.low:g} to {field.high:g}"
                    raise damaged(name, wanted, f"values from {least:g} to {largest:g}")
            mesh = getattr(value, "device_mesh", None)
            like = parameter if field.elementwise or field.scales else None
            if mesh not in (None, getattr(like, "device_mesh", None)):
                wanted = "that is whole, by full_tensor(), or on the mesh of its parameter"
                raise damaged(name, wanted, f"a DTensor on {mesh}")
        self._bring_into_form(parameter, group, state)


def names_of(group: Options) -> Sequence[str]:
    """Names of a group's parameters; ``params.3`` for the fourth where they have none."""
    return group.get("param_names") or [f"params.{i}" for i in range(len(group["params"]))]


def check_outline(state_dict: Any, remedy: str = "load what state_dict() returned") -> None:
    """Raises InputError unless this is a state dict in its outline: groups, and states by keys."""
    try:
        groups, states = state_dict["param_groups"], [*state_dict["state"].values()]
        keys = [key for group in groups for key in group["params"]]
        fits = len({*keys}) == len(keys) and {*map(type, keys)} <= {int, str}
        for group in groups:
            names = group.get("param_names") or [""] * len(group["params"])
            fits &= isinstance(names, list) and [*map(type, names)] == [str] * len(group["params"])
        fits &= all(isinstance(each, Mapping) for each in [*groups, *states])
    except (TypeError, KeyError, AttributeError, IndexError, RuntimeError):
        fits = False  # the last two errors are tensors'
    if not fits:
        raise InputError(
            "Expected a `state_dict` with param_groups, which list their parameters by keys, with "
            "`param_names` for all or none, and a state for these keys. Found none in what was "
            f"given. Remedy: {remedy}."
        )


def _check_order(groups: Sequence[Options], saved: Sequence[Options]) -> None:
    """Raises if the same names come in another order: torch goes by place alone."""
    given = ([group.get("param_names") or () for group in some] for some in (groups, saved))
    names, others = ([*chain(*some)] for some in given)
    for name, other in zip(names, others, strict=False):
        if name != other and sorted(names) == sorted(others):
            raise InputError(
                f"Expected the state of {name!r} in its place. Found that of {other!r}. "
                "Remedy: build the optimizer from the parameters in the order of the state dict."
            )


def as_tensor(name: str, value: Any, parameter: Tensor) -> Tensor:
    """A saved state, which must be a number, or a dense tensor with values."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST:
        # Old programs count steps in plain numbers.
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        is_number = value.dtype is not torch.bool and not value.is_complex()
        if is_dense and is_number and (parameter.is_meta or not value.is_meta):
            return value
    raise damaged(name, "that is a number, or a dense tensor with values", shown(value))


def damaged(name: str, expected: str, found: Any) -> InputError:
    """The error of a state that no optimizer can have saved."""
    return InputError(
        f"Expected a `{name}` {expected}. Found {found}. Remedy: load a state dict that is not "
        "damaged, of an optimizer with the same periods and parameters, in the same order."
    )
