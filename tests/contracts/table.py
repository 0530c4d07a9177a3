"""The optimizers that keep the contracts, in every mode. A new one is one entry here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from adan import Adan
from torch.optim import Optimizer

from steadygrad.optim import LAMB, LANS, ScaledAdam


@dataclass(frozen=True)
class Entry:
    """One way of making an optimizer: a class, and options of this variant."""

    make: Callable[..., Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    large: tuple[str, ...] = ("exp_avg", "exp_avg_sq")  # states with the parameter's shape
    none_moves: bool = False  # whether a parameter without a gradient may move
    joint: bool = False  # whether a parameter's step depends on the gradients of others
    betas: tuple[float, ...] = (0.8, 0.95)  # that are not its defaults
    others: tuple[dict[str, Any], ...] = ()  # options of its own, tried one set after the other
    wrong: tuple[dict[str, Any], ...] = ()  # options that are refused, by the name of the first
    mode: Mapping[str, Any] = field(default_factory=dict)  # unless a test says it
    # Moments are rounded at random: weights are not those of the equations in float64.
    coded: bool = False

    def __call__(self, params: Any, **more: Any) -> Any:
        mode = {} if {"foreach", "fused"} & set(more) else self.mode
        return self.make(params, **{**self.options, **mode, **more})


_WRONG = (
    {"lr": -1.0},
    {"lr": float("nan")},
    {"lr": "fast"},
    {"lr": torch.tensor(1)},
    {"lr": torch.tensor([0.1, 0.2])},
    {"lr": torch.tensor(0.1, device="meta")},
    {"foreach": True, "fused": True},
    {"foreach": "yes"},
    {"maximize": None},
    {"betas": (0.9, 1.5)},
    {"betas": (1.0, 0.0)},
    {"betas": (0.9,)},
    {"betas": (torch.tensor(0.9), 0.99)},
    {"eps": -1.0},
)
_WRONG_DECAYED = (*_WRONG, {"eps": 0.0}, {"weight_decay": -0.1})
_DECAYED = tuple({"weight_decay": w, "maximize": m} for w in (0.0, 0.1) for m in (False, True))
_BOUNDED = ({"lower_bound": 0.5}, {"upper_bound": 0.5})
_WRONG_BOUNDED = (*_WRONG_DECAYED, {"lower_bound": 2.0, "upper_bound": 1.0})

_SCALED_ADAM = Entry(ScaledAdam, large=("delta", "exp_avg_sq"), none_moves=True)
# Below the median: every other step is clipped.
_CLIPPED = {"clipping_scale": 0.9, "clipping_update_period": 4}

OPTIMIZERS = {
    "lans": Entry(
        LANS,
        {"lr": 1e-2},
        others=(*_DECAYED, {"clip_value": 0.1}, *_BOUNDED),
        wrong=(*_WRONG_BOUNDED, {"clip_value": 0.0}, {"state_dtype": "8 bits"}),
    ),
    "lans-bounded": Entry(
        LANS,
        {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "lower_bound": 0.1,
            "upper_bound": 2.0,
            "clip_value": 0.5,
        },
    ),
    "lamb": Entry(
        LAMB,
        {"lr": 1e-2},
        others=(*_DECAYED, {"max_grad_norm": 0.5}, {"adapt": False}, *_BOUNDED),
        wrong=(*_WRONG_BOUNDED, {"max_grad_norm": 0.0}, {"adapt": None}),
    ),
    # Every step is above the norm.
    "lamb-nvidia": Entry(
        LAMB,
        {"lr": 1e-2, "weight_decay": 0.1, "upper_bound": 2.0, "max_grad_norm": 1.0},
        joint=True,
    ),
    "scaled_adam": replace(
        _SCALED_ADAM,
        others=(
            {"scalar_lr_scale": 1.0, "scalar_max": 0.2},
            {"param_min_rms": 0.5, "param_max_rms": 0.6},
            {"size_update_period": 1},
            {"clipping_scale": 0.5, "clipping_update_period": 2, "maximize": True},
        ),
        wrong=(
            *_WRONG,
            {"recipe": "stateless"},
            {"clipping_scale": 0.0},
            {"size_update_period": 0},
            {"clipping_update_period": 2.5},
            {"param_max_rms": 0.0},
        ),
    ),
    "scaled_adam-clipped": replace(_SCALED_ADAM, options=_CLIPPED, joint=True),
    "scaled_adam-2022": replace(
        _SCALED_ADAM, options={"recipe": "stateless7", **_CLIPPED}, joint=True
    ),
    "lans-8bit": Entry(LANS, {"lr": 1e-2, "state_dtype": "8bit"}, coded=True),
    "lamb-8bit": Entry(
        LAMB,
        {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0, "state_dtype": "8bit"},
        joint=True,
        coded=True,
    ),
    "scaled_adam-8bit": replace(
        _SCALED_ADAM, options={"state_dtype": "8bit", **_CLIPPED}, joint=True, coded=True
    ),
    # Of a module outside of the library.
    "adan": Entry(
        Adan,
        {"lr": 1e-2, "weight_decay": 0.1},
        ("exp_avg", "exp_avg_sq", "exp_avg_diff", "previous_grad"),
        betas=(0.9, 0.8, 0.95),
        others=(*_DECAYED, {"no_prox": True, "weight_decay": 0.1}),
        wrong=(*_WRONG_DECAYED, {"betas": (0.9, 0.99)}, {"no_prox": None}),
    ),
}

# The third, one parameter at a time, equals the second to the bit: `test_modes` holds it to that.
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}}
TABLE = {
    f"{name}-{mode}": replace(entry, mode=options)
    for name, entry in OPTIMIZERS.items()
    for mode, options in MODES.items()
}
every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_optimizer_and_mode = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)
