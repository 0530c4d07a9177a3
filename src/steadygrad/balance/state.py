"""What is known of every loss, as buffers that find their losses by name."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.averages import DoubleBuffers
from steadygrad.balance.window import NormAverages

__all__ = ["State"]


class State(DoubleBuffers):
    """Weights, counts and averages; some of them on the host too, which waits for nothing then.

    Args:
        names: The losses, in the order of all vectors.

    Attributes:
        weights: The losses' weights, float64 with shape ``(K,)``.
        nonfinite: Micro-batches left out for a gradient that was not finite, with shape ``(K,)``.
        zero: Micro-batches left out for a gradient of zero, with shape ``(K,)``.
        draws: How often an aggregator was given a seed, with shape ``()``.
        averages: The norms' averages.
        partly: Whether to take a state of other losses, as far as they are the same.
    """

    weights: Tensor
    nonfinite: Tensor
    zero: Tensor
    draws: Tensor
    names_json: Tensor
    averages: NormAverages

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        # torch tells no module whether loading is strict.
        self.names, self.partly = tuple(names), False
        count = len(self.names)
        self.host_weights = (0.0,) * count
        self.register_buffer("weights", torch.zeros(count, dtype=torch.float64))
        self.register_buffer("nonfinite", torch.zeros(count, dtype=torch.int64))
        self.register_buffer("zero", torch.zeros(count, dtype=torch.int64))
        # Seeds of aggregators that draw numbers; the host counts along.
        self.host_draws = 0
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        # As a tensor, because then the whole state is tensors, which every format can hold. Of
        # floats, because copies of a model may average buffers: rounding brings a float back.
        self.register_buffer("names_json", _as_bytes(self.names))

    @property
    def weights_by_name(self) -> Mapping[str, float]:
        """Every loss's weight, to be read."""
        return MappingProxyType(dict(zip(self.names, self.host_weights, strict=True)))

    def set_weights(self, weights: Sequence[float]) -> None:
        """Takes new weights, in the order of the names."""
        self.host_weights = tuple(weights)
        for slot, weight in enumerate(weights):
            # Filling waits for nothing, copying from the host would.
            self.weights[slot].fill_(weight)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begins anew, with the weights as they are on the host: `to_empty` leaves no buffer."""
        self.set_weights(self.host_weights)
        self.names_json.copy_(_as_bytes(self.names))
        self.host_draws = 0
        for count in (self.nonfinite, self.zero, self.draws):
            count.zero_()
        self.averages.reset_parameters()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        """Takes each loss's numbers by its name, in whatever order they were saved."""
        saved = state_dict.get(prefix + "names_json")
        if saved is not None and not saved.is_meta:
            if self.weights.is_meta and not local_metadata.get("assign_to_params_buffers", False):
                raise InputError(
                    "Expected a balancer with state to load into. Found it on `meta`, as it was "
                    "built. Remedy: `to_empty(device=...)` first, or "
                    "`load_state_dict(..., assign=True)`."
                )
            names = _from_bytes(saved)
            if not self.partly and sorted(names) != sorted(self.names):
                raise InputError(
                    f"Expected the state of losses {sorted(self.names)}. Found that of "
                    f"{sorted(names)}. Remedy: a balancer with the names of old, or "
                    "balancer.load_state_dict(..., strict=False), called by itself: losses that "
                    "are new start afresh then."
                )
            self._take_by_name(state_dict, prefix, names)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if not self.weights.is_meta:
            self.host_weights = tuple(self.weights.tolist())
            self.host_draws = int(self.draws)

    def _take_by_name(self, state_dict: dict[str, Any], prefix: str, names: list[str]) -> None:
        """Puts a saved state into this one's order; what was not saved stays."""
        for key, own in self.state_dict().items():
            found = state_dict.get(prefix + key)
            if found is not None and found.shape == (len(names),):
                mine = torch.zeros(own.shape).to(found) if own.is_meta else own.to(found, copy=True)
                if own.is_meta and key == "weights":
                    mine = found.new_tensor(self.host_weights)
                for slot, name in enumerate(self.names):
                    if name in names:
                        mine[slot] = found[names.index(name)]
                state_dict[prefix + key] = mine
        device = state_dict[prefix + "names_json"].device
        state_dict[prefix + "names_json"] = _as_bytes(self.names).to(device)


def _as_bytes(names: Sequence[str]) -> Tensor:
    return torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.float64)


def _from_bytes(saved: Tensor) -> list[str]:
    try:
        names = json.loads(bytes(saved.double().round().long().tolist()))
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    except ValueError:
        pass
    raise InputError(
        "Expected the losses' names in `names_json`. Found something that spells none. Remedy: the "
        "state as `state_dict` gave it; what changes all of a state's numbers must leave this one."
    )
