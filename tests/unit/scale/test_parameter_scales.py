"""The scale that each parameter's gradient carries, for tools that look at gradients."""

import math

import torch

from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.training import Poison, loss_on, make


def scales_by_definition(model, own, name):
    """The product of the scales of all chosen modules around a parameter."""
    return math.prod(scale for layer, scale in own.items() if f"{name}.".startswith(f"{layer}."))


def test_the_scale_of_every_parameter():
    model, optimizer = make()
    own = {"a": 2.0**10, "b": 2.0**7, "b.1": 2.0**3}
    scaler = LayerwiseGradScaler(model, own, init_scale=2.0**4, growth_interval=1)
    other = torch.nn.Linear(2, 2)
    named = dict(model.named_parameters())
    carried = scaler.parameter_scales([*named.values(), other.weight])
    expected = [16.0 * scales_by_definition(model, own, name) for name in named]
    assert carried().tolist() == [*expected, 16.0]
    scaler.scale(loss_on(model, 0)).backward()
    assert carried().tolist() == [*expected, 16.0]
    scaler.unscale_(optimizer)
    assert carried().tolist() == [1.0] * len(named) + [16.0]
    scaler.step(optimizer)
    scaler.update()
    grown = {name: 2 * scale for name, scale in own.items()}
    expected = [32.0 * scales_by_definition(model, grown, name) for name in named]
    assert carried().tolist() == [*expected, 32.0]
    scaler.remove()
    assert scaler.parameter_scales(list(named.values()))().tolist() == [1.0] * len(named)


def test_the_scale_of_every_parameter_is_nan_after_an_overflow():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, {"b": 2.0**7})
    carried = scaler.parameter_scales(list(model.parameters()))
    Poison(model.b[0])
    scaler.scale(loss_on(model, 0)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.a.parameters())
    assert torch.isnan(carried()).all()
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(carried()).all()
