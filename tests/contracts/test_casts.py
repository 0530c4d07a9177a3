"""A model of mixed types that `model.float()` makes one of float32 in the midst of training."""

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import give_gradients
from tests.covering import covering
from tests.reference.lamb import Lamb
from tests.reference.lans import Lans
from tests.reference.scaled_adam import ScaledAdam as ReferenceScaledAdam

PAIRS = {
    "lans": (LANS, Lans, {"lr": 0.01}),
    "lamb": (LAMB, Lamb, {"lr": 0.01}),
    "scaled_adam": (ScaledAdam, ReferenceScaledAdam, {"lr": 0.03}),
    "scaled_adam-2022": (ScaledAdam, ReferenceScaledAdam, {"lr": 0.03, "recipe": "stateless7"}),
}
MODES = [{"fused": True}, {"foreach": True}, {"foreach": False}]
ORDERS = {
    "narrow first": (torch.bfloat16, torch.float32, torch.float64, torch.float16),
    "wide first": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
}


def mixed(types):
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(4, 3).to(dtype) for dtype in types])


def wide(tensor):
    return tensor.detach().double().numpy().copy()


def exact_weights(optimizer, params):
    return [wide(optimizer.state[p].get("master_weight", p)) for p in params]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        # Corrections of one less a power near one lose digits of float32 in the first steps.
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-5 * np.abs(b).max())


def step_both(optimizer, params, reference, weights, step):
    give_gradients(params, step, none=False)
    reference.step(weights, [wide(p.grad) for p in params])
    optimizer.step()
    assert_close(exact_weights(optimizer, params), weights)


@pytest.mark.few(2)
@covering(pair=PAIRS, mode=MODES, types=ORDERS, at=[1, 4])
def test_it_goes_on_as_the_equations_do(pair, mode, types, at):
    make, make_reference, options = pair
    model = mixed(types)
    params = [*model.parameters()]
    optimizer, reference = make(params, **options, **mode), make_reference(**options)
    weights = exact_weights(optimizer, params)
    for step in range(at):
        step_both(optimizer, params, reference, weights, step)
    model.float()
    # The digits of masters are those of the model no more.
    for w, p in zip(weights, params, strict=True):
        w[...] = wide(p)
    for step in range(at, at + 5):
        step_both(optimizer, params, reference, weights, step)
        assert all("master_weight" not in optimizer.state[p] for p in params)
    assert optimizer.skipped == 0
    assert all(optimizer.state[p]["step"] == at + 5 for p in params)


@pytest.mark.few(1)
@covering(pair=PAIRS, mode=MODES, types=ORDERS)
def test_between_backward_and_step_too(pair, mode, types):
    """The gradients are then cast along with the weights."""
    make, make_reference, options = pair
    model = mixed(types)
    params = [*model.parameters()]
    optimizer, reference = make(params, **options, **mode), make_reference(**options)
    weights = exact_weights(optimizer, params)
    for step in range(2):
        step_both(optimizer, params, reference, weights, step)
    give_gradients(params, 2, none=False)
    model.float()
    for w, p in zip(weights, params, strict=True):
        w[...] = wide(p)
        assert p.grad.dtype is torch.float32
    reference.step(weights, [wide(p.grad) for p in params])
    optimizer.step()
    assert_close(exact_weights(optimizer, params), weights)
    step_both(optimizer, params, reference, weights, 3)


@pytest.mark.few(4)
@covering(pair=PAIRS, mode=MODES, types=ORDERS, then=[torch.bfloat16, torch.float64])
def test_to_other_types_and_back(pair, mode, types, then):
    make, make_reference, options = pair
    model = mixed(types)
    params = [*model.parameters()]
    optimizer, reference = make(params, **options, **mode), make_reference(**options)
    weights = exact_weights(optimizer, params)
    for step, dtype in enumerate((None, then, None, torch.float32, None)):
        if dtype is not None:
            model.to(dtype)
            for i, p in enumerate(params):
                master = optimizer.state_dict()["state"][i].get("master_weight", p).detach()
                # A master that is no longer rounded to its weight is what the weight says.
                same = master.to(dtype) == p.detach()
                weights[i] = wide(torch.where(same, master, p.detach().to(master.dtype)))
        step_both(optimizer, params, reference, weights, step)


@pytest.mark.few(1)
@covering(pair=PAIRS, mode=MODES, then=[torch.float32, torch.bfloat16])
def test_gradients_may_stay_wider_than_their_weights(pair, mode, then):
    """As where `p.data` is cast and `p.grad` is not."""
    make, make_reference, options = pair
    params = [*mixed([torch.float64]).parameters()]
    optimizer, reference = make(params, **options, **mode), make_reference(**options)
    weights = exact_weights(optimizer, params)
    for step in range(2):
        step_both(optimizer, params, reference, weights, step)
    give_gradients(params, 2, none=False)
    gradients = [wide(p.grad) for p in params]
    for p in params:
        p.data = p.data.to(then)
        assert p.grad.dtype is torch.float64
    weights = [wide(p) for p in params]
    reference.step(weights, gradients)
    optimizer.step()
    assert_close(exact_weights(optimizer, params), weights)
    assert optimizer.skipped == 0
