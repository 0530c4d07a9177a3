"""Saved state of a balancer: buffers with one number a loss, loaded by the losses' names."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.averages import DoubleBuffers
from steadygrad.balance.loss_context import BalancerOptions
from steadygrad.balance.norm_averages import NormAverages

__all__ = ["BalancerState"]


class BalancerState(DoubleBuffers):
    """Weights, counts and averages of all losses, as buffers.

    Attributes:
        names: The losses, in the order of all vectors.
        weights: The losses' weights, float64 with shape ``(K,)``.
        weights_by_name: Weights as numbers: reading the buffer would wait for the device.
        nonfinite: Micro-batches left out for a non-finite gradient, with shape ``(K,)``.
        zero: Micro-batches left out for a gradient of zero, with shape ``(K,)``.
        draws: Number of seeds given to an aggregator, with shape ``()``.
        partial: Whether a state of other losses may be loaded, as far as names agree.
    """

    weights: Tensor
    nonfinite: Tensor
    zero: Tensor
    draws: Tensor
    names_json: Tensor

    def __init__(self, names: Sequence[str], options: BalancerOptions) -> None:
        super().__init__()
        # torch does not tell a module whether loading is strict.
        self.names, self.options, self.partial = tuple(names), options, False
        count = len(self.names)
        self.weights_by_name = dict.fromkeys(self.names, 0.0)
        self.register_buffer("weights", torch.zeros(count, dtype=torch.float64))
        self.register_buffer("nonfinite", torch.zeros(count, dtype=torch.int64))
        self.register_buffer("zero", torch.zeros(count, dtype=torch.int64))
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        # A tensor, because every file format holds those, without pickle. Of floats, because
        # averaged copies of a model average buffers: rounding brings a float back.
        self.register_buffer("names_json", _encoded(self.names))
        self.averages = NormAverages(count, options)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Sets all weights."""
        self.weights_by_name = {name: weights[name] for name in self.names}
        for slot, weight in enumerate(self.weights_by_name.values()):
            # Filling waits for nothing, copying from the host would.
            self.weights[slot].fill_(weight)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Clears all state but the weights; fills buffers made by `to_empty`."""
        self.set_weights(self.weights_by_name)
        self.names_json.copy_(_encoded(self.names))
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
        """Loads each loss's numbers by its name, in whatever order they were saved."""
        encoded = state_dict.get(prefix + "names_json")
        if encoded is not None and not encoded.is_meta:
            if self.weights.is_meta and not local_metadata.get("assign_to_params_buffers", False):
                raise InputError(
                    "Expected a balancer with state to load into. Found it on `meta`, as it was "
                    "built. Remedy: `to_empty(device=...)` first, or "
                    "`load_state_dict(..., assign=True)`."
                )
            names = _decoded(encoded)
            if not self.partial and sorted(names) != sorted(self.names):
                raise InputError(
                    f"Expected the state of losses {sorted(self.names)}. Found that of "
                    f"{sorted(names)}. Remedy: a balancer with the names of old, or "
                    "balancer.load_state_dict(..., strict=False), called by itself: losses that "
                    "are new start afresh then."
                )
            self._reorder(state_dict, prefix, names)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if not self.weights.is_meta:
            self.weights_by_name = dict(zip(self.names, self.weights.tolist(), strict=True))

    def _reorder(self, state_dict: dict[str, Any], prefix: str, names: list[str]) -> None:
        """Puts saved vectors into the order of this state; of losses not saved, numbers stay."""
        for key, current in self.state_dict().items():
            saved = state_dict.get(prefix + key)
            if saved is None or saved.shape != (len(names),):
                continue
            fresh = torch.zeros_like(current, device="cpu") if current.is_meta else current
            if current.is_meta and key == "weights":
                fresh = saved.new_tensor(list(self.weights_by_name.values()))
            ordered = fresh.to(saved, copy=True)
            for slot, name in enumerate(self.names):
                if name in names:
                    ordered[slot] = saved[names.index(name)]
            state_dict[prefix + key] = ordered
        device = state_dict[prefix + "names_json"].device
        state_dict[prefix + "names_json"] = _encoded(self.names).to(device)


def _encoded(names: Sequence[str]) -> Tensor:
    return torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.float64)


def _decoded(encoded: Tensor) -> list[str]:
    try:
        names = json.loads(bytes(encoded.reshape(-1).double().round().long().tolist()))
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    except (ValueError, OverflowError):
        pass
    raise InputError(
        "Expected the losses' names in `names_json`. Found a tensor that does not decode to "
        "names. Remedy: load the state as `state_dict` returned it; code that changes all tensors "
        "of a state must skip `names_json`."
    )
