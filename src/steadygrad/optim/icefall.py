"""icefall's ScaledAdam checkpoints, whose state lies in stacks on some parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError

__all__ = ["unstack"]

_STACKED = {"delta", "exp_avg_sq"}
_SIZES = {"param_rms", "scale_exp_avg_sq"}
_PERIODS = {"scale_grads": "size_update_period", "model_norms": "clipping_update_period"}
_CLIPPING = ("model_norms", "model_norm_threshold", "num_clipped")


def unstack(
    checkpoint: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Gives every parameter its part of the stacks.

    icefall stacks parameters of one type and shape and keeps their state at the first of them; a
    group's clipping lies at the first parameter of the first stack.

    Args:
        checkpoint: ``optimizer.state_dict()`` of icefall's ScaledAdam, of either recipe.
        groups: This optimizer's groups, with the same parameters in the same order.

    Returns:
        State of each parameter, in order.

    Raises:
        InputError: If the groups or the shapes differ, or a stack has no state.
    """
    if "param_groups" not in checkpoint:
        hint = "checkpoint['optimizer']" if "optimizer" in checkpoint else "optimizer.state_dict()"
        raise InputError(
            f"Expected an optimizer's state with `param_groups`. Found {sorted(checkpoint)}. "
            f"Remedy: hand in {hint}."
        )
    saved = checkpoint["param_groups"]
    sizes, own = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != own:
        raise InputError(
            f"Expected groups of {own} parameters. Found {sizes} in the checkpoint. Remedy: build "
            "the optimizer from the parameters that icefall's was built from, in the same order."
        )
    found = []
    for old, new in zip(saved, groups, strict=True):
        found += _unstack_group(checkpoint["state"], old["params"], new)
    return found


def _unstack_group(
    state: Mapping[int, Mapping[str, Any]], indices: Sequence[int], group: Mapping[str, Any]
) -> list[dict[str, Any]]:
    stacks: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, p in enumerate(group["params"]):
        stacks[(str(p.dtype), *p.shape)].append(place)
    found: list[dict[str, Any]] = [{} for _ in group["params"]]
    shared: dict[str, Any] = {}
    for members in stacks.values():
        stack = state.get(indices[members[0]], {})
        for row, place in enumerate(members):
            shape = tuple(group["params"][place].shape)
            found[place] = _row(stack, row, (len(members), *shape), indices[members[0]])
        shared |= {name: stack[name] for name in _CLIPPING if name in stack}
        for name, option in _PERIODS.items():
            if name in stack and len(stack[name]) != group[option]:
                raise InputError(
                    f"Expected a `{name}` of {group[option]} steps, this optimizer's `{option}`. "
                    f"Found {len(stack[name])}. Remedy: {option}={len(stack[name])}."
                )
    # Plain numbers, of Python's precision.
    shared = {
        name: value
        if isinstance(value, Tensor)
        else torch.tensor(value, dtype=torch.float64, device="cpu")
        for name, value in shared.items()
    }
    return [{**one, **shared} for one in found]


def _row(stack: Mapping[str, Any], row: int, shape: tuple[int, ...], index: int) -> dict[str, Any]:
    """One parameter's part of a stack."""
    delta = stack.get("delta")
    if not isinstance(delta, Tensor) or tuple(delta.shape) != shape:
        what = "no `delta`" if delta is None else f"`delta` of shape {tuple(delta.shape)}"
        raise InputError(
            f"Expected a stack of shape {shape} at parameter {index} of the checkpoint. Found "
            f"{what}. Remedy: a checkpoint of icefall's ScaledAdam for this very model, with its "
            "parameters in the order that the optimizer got them in."
        )
    own: dict[str, Any] = {
        "step": torch.tensor(float(stack["step"]), dtype=torch.float32, device="cpu")
    }
    for name, value in stack.items():
        if name in _STACKED:
            own[name] = value[row]
        elif name in _SIZES:
            own[name] = value[row].reshape(())
        elif name == "scale_grads":
            own[name] = value[:, row].reshape(-1)
    return own
