"""Parameters that are exchanged after the scaler was built; ids of the old ones are used again."""

import gc

import pytest
import torch
from torch import nn

from steadygrad.scale import LayerwiseGradScaler
from tests.covering import covering
from tests.unit.scale.training import assert_equal, take_step, unscaled_gradients

LAYERS = 12


def exchange_each(model):
    for layer in model:
        for name in ("weight", "bias"):
            setattr(layer, name, nn.Parameter(getattr(layer, name).detach().clone()))


def exchange_by_conversion(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
        model.float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def exchange_by_loading(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def gradients(exchange, order):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    scales = {str(i): 2.0 ** (i % 5 + 1) for i in range(LAYERS)}
    scaler = LayerwiseGradScaler(model, scales, process_group=None)
    exchange(model)
    gc.collect()
    optimizer = torch.optim.SGD(sorted(model.parameters(), key=order), lr=1.0)
    scaler.scale(model(torch.ones(4, 8)).square().sum()).backward()
    scaler.unscale_(optimizer)
    return {name: p.grad for name, p in model.named_parameters()}


ORDERS = {
    "as registered": lambda parameter: 0,
    "by address": id,
    "by address, reversed": lambda parameter: -id(parameter),
    "by last weight": lambda parameter: -parameter.flatten()[-1].item(),
}


EXCHANGES = {
    "each": exchange_each,
    "by conversion": exchange_by_conversion,
    "by loading": exchange_by_loading,
}


@pytest.mark.slow
@covering(exchange=EXCHANGES, order=ORDERS)
def test_each_is_unscaled_by_its_own_layers_scale(exchange, order):
    plain = gradients(lambda model: None, ORDERS["as registered"])
    assert_equal(gradients(exchange, order), plain)


def test_a_parameter_that_moves_to_another_layer_is_unscaled_by_that_ones_scale():
    """Its object is known and stays alive; an optimizer of other parameters comes first."""

    def moved(scales):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

        def loss(model):
            first, last = model[0].weight, model[2].weight
            model[0].weight, model[2].weight = last, first
            return model(torch.ones(4, 8)).square().sum()

        return unscaled_gradients(model, scales, loss, process_group=None)

    assert_equal(moved({"0": 4.0, "2": 8.0}), moved({}))


def test_parameters_of_another_model_carry_the_losss_scale_alone():
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1)
    scaler = LayerwiseGradScaler(model, {"0": 8.0}, init_scale=4.0)
    optimizer = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.0)
    x = torch.ones(2, 4)
    plain = torch.autograd.grad(other(model[0].forward(x)).sum(), [*other.parameters()])
    for _ in range(2):
        take_step(optimizer, scaler, other(model(x)).sum())
        for parameter, expected in zip(other.parameters(), plain, strict=True):
            assert torch.equal(parameter.grad, expected)
