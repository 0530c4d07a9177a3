"""A damaged state dict is refused in one line, and nothing changes."""

import copy

import pytest
import torch

from steadygrad._checks import InputError
from tests.contracts.problems import assert_same, parameters, run, snapshot
from tests.contracts.table import OPTIMIZERS

every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)

SHAPES = {
    "empty": lambda t: t.new_zeros(0),
    "short": lambda t: t.reshape(-1)[: t.numel() // 2].clone(),
    "long": lambda t: torch.cat([t.reshape(-1)] * 2),
    "more axes": lambda t: t[None],
}
KINDS = {
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.to(torch.bool),
    "meta": lambda t: t.to("meta"),
    "text": lambda t: "0",
    "none": lambda t: None,
    "list": lambda t: t.tolist() if t.ndim else [0.0],
}
VALUES = {
    "nan": lambda t: torch.full_like(t, torch.nan),
    "one nan": lambda t: torch.cat([t.new_full((1,), torch.nan), t.reshape(-1)[1:]]).view(t.shape),
    "minus inf": lambda t: torch.full_like(t, -torch.inf),
}
# Of codes and their scales, which have no such values.
CODES = {
    "floats": lambda t: t.float(),
    "wide": lambda t: t.to(torch.int16),
    "no scale": lambda t: torch.full_like(t, 0),
    "past float32": lambda t: torch.full_like(t, 254),
}
NEGATIVE = {
    "step",
    "exp_avg_sq",
    "skipped",
    "param_rms",
    "scale_exp_avg_sq",
    "model_norms",
    "clipping_step",
}
OPTIONS = [
    {"lr": float("nan")},
    {"lr": -1.0},
    {"lr": "fast"},
    {"betas": (2, 2)},
    {"betas": 0.9},
    {"eps": -1.0},
    {"foreach": True, "fused": True},
    {"fused": 1},
    {"maximize": None},
]


def trained(entry, dtype=torch.bfloat16):
    params = parameters(dtype)
    optimizer = entry(params, fused=True)
    run(optimizer, params, range(3), none=False)
    return params, optimizer


def refused(optimizer, params, saved):
    before = snapshot(optimizer, params)
    options = copy.deepcopy([{**g, "params": 0} for g in optimizer.param_groups])
    with pytest.raises(InputError) as caught:
        optimizer.load_state_dict(saved)
    assert "\n" not in str(caught.value)
    assert "Remedy" in str(caught.value)
    assert_same(before, snapshot(optimizer, params))
    assert [{**g, "params": 0} for g in optimizer.param_groups] == options


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize("place", [0, 4], ids=["first", "later"])
def test_states_of_other_shapes_types_and_values(entry, place):
    params, optimizer = trained(entry)
    tried = 0
    for name, value in optimizer.state_dict()["state"][place].items():
        # Every number up to 255 is a code.
        values = (
            VALUES
            if value.is_floating_point()
            else CODES
            if "exponents" in name
            else {kind: CODES[kind] for kind in ("floats", "wide")}
        )
        for change in (*SHAPES.values(), *KINDS.values(), *values.values()):
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][place][name] = change(value)
            refused(optimizer, params, saved)
            tried += 1
        if name in NEGATIVE and value.is_floating_point():
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][place][name] = torch.full_like(value, -1.0)
            refused(optimizer, params, saved)
    assert tried >= 13 * 5
    run(optimizer, params, range(3, 5))
    assert optimizer.skipped == 0


@every_optimizer
def test_states_that_are_missing_or_exchanged(entry):
    params, optimizer = trained(entry)
    for name in optimizer.state_dict()["state"][4]:
        if name != "master_weight":  # it is made anew from the weight
            saved = copy.deepcopy(optimizer.state_dict())
            del saved["state"][4][name]
            refused(optimizer, params, saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0], saved["state"][4] = saved["state"][4], saved["state"][0]
    refused(optimizer, params, saved)
    for part in ({}, {"state": {}}, {"param_groups": []}, {"state": [], "param_groups": {}}):
        refused(optimizer, params, part)


@every_optimizer
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_out_of_range(entry, options):
    params, optimizer = trained(entry)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(options)
    refused(optimizer, params, saved)


@pytest.mark.parametrize("options", [{"recipe": "zzz"}, {"size_update_period": 0}], ids=str)
def test_options_of_scaled_adam_out_of_range(options):
    params, optimizer = trained(OPTIMIZERS["scaled_adam"])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(options)
    refused(optimizer, params, saved)
