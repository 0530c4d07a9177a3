"""The optimizers that keep the contracts, in every mode. A new one is one entry here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from adan import Adan
from torch.optim import Optimizer

from steadygrad.optim import LAMB, LANS, ScaledAdam


@dataclass(frozen=True)
class Entry:
    """One way of making an optimizer.

    Attributes:
        make: The class.
        options: Options of this variant.
        large: Names of the states that have the parameter's shape, masters aside.
        none_moves: Whether a parameter without a gradient may move.
        joint: Whether a parameter's step depends on the gradients of others.
        betas: Decays that are not its defaults.
        others: Further options of its own, each set to be tried on a small problem.
        wrong: Options that must be refused, each with a piece of the message.
        mode: How steps are computed, unless a test says it.
        coded: Whether moments are kept in eight bits, rounded at random: its weights are not those
            of the equations in float64.
    """

    make: Callable[..., Optimizer]
    large: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    none_moves: bool = False
    joint: bool = False
    betas: tuple[float, ...] = (0.8, 0.95)
    others: tuple[dict[str, Any], ...] = ()
    wrong: tuple[tuple[dict[str, Any], str], ...] = ()
    mode: Mapping[str, Any] = field(default_factory=dict)
    coded: bool = False

    def __call__(self, params: Any, **more: Any) -> Any:
        mode = {} if {"foreach", "fused"} & set(more) else self.mode
        return self.make(params, **{**self.options, **mode, **more})


_SHARED_WRONG = (
    ({"lr": -1.0}, "`lr`"),
    ({"lr": float("nan")}, "`lr`"),
    ({"foreach": True, "fused": True}, "`foreach` and `fused`"),
    ({"betas": (0.9, 1.5)}, "`betas`"),
    ({"betas": (0.9,)}, "`betas`"),
)

_DECAYED = tuple({"weight_decay": w, "maximize": m} for w in (0.0, 0.1) for m in (False, True))

OPTIMIZERS = {
    "lans": Entry(
        LANS,
        ("exp_avg", "exp_avg_sq"),
        {"lr": 1e-2},
        others=(*_DECAYED, {"clip_value": 0.1}, {"lower_bound": 0.5}, {"upper_bound": 0.5}),
        wrong=(
            *_SHARED_WRONG,
            ({"eps": 0.0}, "`eps`"),
            ({"weight_decay": -0.1}, "`weight_decay`"),
            ({"clip_value": 0.0}, "`clip_value`"),
            ({"lower_bound": 2.0, "upper_bound": 1.0}, "`lower_bound`"),
        ),
    ),
    "lans-bounded": Entry(
        LANS,
        ("exp_avg", "exp_avg_sq"),
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
        ("exp_avg", "exp_avg_sq"),
        {"lr": 1e-2},
        others=(*_DECAYED, {"max_grad_norm": 0.5}, {"adapt": False}, {"upper_bound": 0.5}),
        wrong=(
            *_SHARED_WRONG,
            ({"eps": 0.0}, "`eps`"),
            ({"weight_decay": -0.1}, "`weight_decay`"),
            ({"max_grad_norm": 0.0}, "`max_grad_norm`"),
            ({"adapt": None}, "`adapt`"),
            ({"lower_bound": 2.0, "upper_bound": 1.0}, "`lower_bound`"),
        ),
    ),
    # Every step is above the norm.
    "lamb-nvidia": Entry(
        LAMB,
        ("exp_avg", "exp_avg_sq"),
        {"lr": 1e-2, "weight_decay": 0.1, "upper_bound": 2.0, "max_grad_norm": 1.0},
        joint=True,
    ),
    "scaled_adam": Entry(
        ScaledAdam,
        ("delta", "exp_avg_sq"),
        others=(
            {"scalar_lr_scale": 1.0, "scalar_max": 0.2},
            {"param_min_rms": 0.5, "param_max_rms": 0.6},
            {"size_update_period": 1},
            {"clipping_scale": 0.5, "clipping_update_period": 2, "maximize": True},
        ),
        none_moves=True,
        wrong=(
            *_SHARED_WRONG,
            ({"eps": -1.0}, "`eps`"),
            ({"recipe": "stateless"}, "`recipe`.*stateless7"),
            ({"clipping_scale": 0.0}, "`clipping_scale`"),
            ({"size_update_period": 0}, "`size_update_period`"),
            ({"clipping_update_period": 2.5}, "`clipping_update_period`"),
            ({"param_max_rms": 0.0}, "`param_max_rms`"),
        ),
    ),
    # Below the median: every other step is clipped.
    "scaled_adam-clipped": Entry(
        ScaledAdam,
        ("delta", "exp_avg_sq"),
        {"clipping_scale": 0.9, "clipping_update_period": 4},
        none_moves=True,
        joint=True,
    ),
    "scaled_adam-2022": Entry(
        ScaledAdam,
        ("delta", "exp_avg_sq"),
        {"recipe": "stateless7", "clipping_scale": 0.9, "clipping_update_period": 4},
        none_moves=True,
        joint=True,
    ),
    "lans-8bit": Entry(
        LANS,
        ("exp_avg", "exp_avg_sq"),
        {"lr": 1e-2, "state_dtype": "8bit"},
        wrong=(({"state_dtype": "8 bits"}, "`state_dtype`.*8bit"),),
        coded=True,
    ),
    "lamb-8bit": Entry(
        LAMB,
        ("exp_avg", "exp_avg_sq"),
        {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0, "state_dtype": "8bit"},
        joint=True,
        coded=True,
    ),
    "scaled_adam-8bit": Entry(
        ScaledAdam,
        ("delta", "exp_avg_sq"),
        {"clipping_scale": 0.9, "clipping_update_period": 4, "state_dtype": "8bit"},
        none_moves=True,
        joint=True,
        coded=True,
    ),
    # Of a module outside of the library.
    "adan": Entry(
        Adan,
        ("exp_avg", "exp_avg_sq", "exp_avg_diff", "previous_grad"),
        {"lr": 1e-2, "weight_decay": 0.1},
        betas=(0.9, 0.8, 0.95),
        others=(*_DECAYED, {"no_prox": True, "weight_decay": 0.1}),
        wrong=(
            *_SHARED_WRONG,
            ({"betas": (0.9, 0.99)}, "`betas`"),
            ({"eps": 0.0}, "`eps`"),
            ({"weight_decay": -0.1}, "`weight_decay`"),
            ({"no_prox": None}, "`no_prox`"),
        ),
    ),
}

# The third, one parameter at a time, equals the second to the bit: `test_steps` holds it to that.
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}}
TABLE = {
    f"{name}-{mode}": replace(entry, mode=options)
    for name, entry in OPTIMIZERS.items()
    for mode, options in MODES.items()
}
