"""The life cycle: steps, overflows and who is named for them, accumulation, measuring, resume."""

import math

import pytest
import torch

from steadygrad.optim import LANS
from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler
from tests.unit.scale.training import (
    SCALES,
    Poison,
    assert_equal,
    loss_on,
    make,
    plain_step,
    train_step,
    weights_of,
)

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}, torch.inf),
    "adam": (torch.optim.Adam, {}, -torch.inf),
    "fused adam": (torch.optim.Adam, {"fused": True}, torch.nan),
    "lans": (LANS, {"foreach": True}, torch.inf),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_without_scaling_and_without_the_batch_that_overflowed(name):
    kind, options, value = OPTIMIZERS[name]
    model, scaled = make(optimizer=kind, **options)
    twin, plain = make(optimizer=kind, **options)
    scaler = LayerwiseGradScaler(model, SCALES, growth_interval=2)
    poison = Poison(model.b[0], value)
    for step in range(5):
        poison.active = step == 1
        before = weights_of(model)
        train_step(model, scaled, scaler, step)
        if step == 1:
            assert_equal(weights_of(model), before)
            assert scaler.culprits() == ["b"]
        else:
            plain_step(twin, plain, step)
            assert scaler.culprits() == []
    assert_equal(weights_of(model), weights_of(twin))
    # Two growths, of b after it had backed off one alone.
    expected = {"": 1.0, "a": 4 * SCALES["a"], "b": SCALES["b"], "b.1": 4 * SCALES["b.1"]}
    assert scaler.get_scales() == expected
    assert scaler.skipped == 1


@pytest.mark.parametrize("place", ["a", "b.0", "b.1", "head"])
def test_an_overflow_is_counted_where_it_arose_and_nowhere_else(place):
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    Poison(model.get_submodule(place))
    train_step(model, optimizer, scaler, 0)
    # A hook that comes after the scaler's lies outside of the boundary, in what is around it.
    name = {"a": "", "b.0": "b", "b.1": "b", "head": ""}[place]
    assert scaler.culprits() == [name]
    counts = dict.fromkeys(["", *SCALES], 0)
    assert scaler.get_overflows() == counts | {name: 1}
    expected = {"": 1.0, **SCALES}
    if name:
        expected[name] *= 0.5
    assert scaler.get_scales() == expected


@pytest.mark.parametrize("spoilt", [None, 1])
def test_accumulates_with_frozen_scales_and_skips_for_one_micro_batch(spoilt):
    (model, scaled), (twin, plain) = make(), make()
    scaler, poison = LayerwiseGradScaler(model, SCALES, growth_interval=1), Poison(model.b[0])
    for step in range(2):
        scaled.zero_grad()
        plain.zero_grad()
        for micro in range(4):
            poison.active = (step, micro) == (1, spoilt)
            scaler.scale(loss_on(model, 4 * step + micro) / 4).backward()
            (loss_on(twin, 4 * step + micro) / 4).backward()
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        scaler.step(scaled)
        if (step, spoilt) != (1, 1):
            plain.step()
        scaler.update()
    assert_equal(weights_of(model), weights_of(twin))
    assert scaler.culprits() == ([] if spoilt is None else ["b"])


def test_two_optimizers_skip_each_for_itself_as_torch_does_it():
    model, _ = make()
    first = torch.optim.SGD(model.a.parameters(), lr=0.1)
    second = torch.optim.SGD([*model.b.parameters(), *model.head.parameters()], lr=0.1)
    scaler = LayerwiseGradScaler(model, SCALES)
    scaler.scale(loss_on(model, 0)).backward()
    model.head.weight.grad[0, 0] = torch.inf
    before = weights_of(model)
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    after = weights_of(model)
    assert not torch.equal(after["a.weight"], before["a.weight"])
    assert torch.equal(after["b.0.weight"], before["b.0.weight"])
    assert scaler.skipped == 1


def test_bounds_and_fixed_layers():
    model, optimizer = make()
    scales = {"a": 8.0, "b": 4.0, "b.1": LayerScale(2.0, fixed=True), "head": 4.0}
    rule = {"backoff_factor": 0.25, "growth_interval": 1, "min_scale": 0.5, "max_scale": 32.0}
    scaler = LayerwiseGradScaler(model, scales, **rule)
    poison = Poison(model.b[0])
    for step in range(4):
        poison.active = step < 2
        train_step(model, optimizer, scaler, step)
        if step == 1:
            assert scaler.get_scales() == {"": 1.0, "a": 32.0, "b": 0.5, "b.1": 2.0, "head": 16.0}
    # The layer at fault backs off; the others count their finite steps although they were skipped.
    assert scaler.get_scales() == {"": 1.0, "a": 32.0, "b": 2.0, "b.1": 2.0, "head": 32.0}


@pytest.mark.parametrize("scales", [SCALES, AutoScale(warmup=1, every=2)], ids=["fixed", "auto"])
def test_resumes_to_the_bit(scales, tmp_path):
    def run(model, optimizer, scaler, steps):
        poison, found = Poison(model.b[0]), []
        for step in steps:
            poison.active = step in (1, 4)
            train_step(model, optimizer, scaler, step)
            found.append(scaler.get_scales())
        poison.active = False
        return found

    def build():
        model, optimizer = make(optimizer=torch.optim.Adam)
        options = {"growth_interval": 3, "init_scale": 2.0**4}
        return model, optimizer, LayerwiseGradScaler(model, scales, **options)

    whole, first, second = build(), build(), build()
    expected = run(*whole, range(8))
    run(*first, range(4))
    torch.save([part.state_dict() for part in first], tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert run(*second, range(4, 8)) == expected[4:]
    assert_equal(weights_of(second[0]), weights_of(whole[0]))
    assert second[2].state_dict() == whole[2].state_dict()
    assert whole[2].state_dict()["skipped"] == 2


def test_a_state_as_the_first_version_saved_it_is_loaded():
    row = {"growth_tracker": 1, "overflows": 2}
    scales = {"b": 64.0, "": 8.0, "b.1": 0.5, "a": 2.0}
    layers = {name: {"scale": scale, **row} for name, scale in scales.items()}
    state = {"layers": layers, "steps": 5, "skipped": 3}
    scaler = LayerwiseGradScaler(make()[0], SCALES, init_scale=1.0)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert scaler.get_overflows() == dict.fromkeys(["", *SCALES], 2)


def test_disabled_it_does_nothing():
    (model, optimizer), (twin, plain) = make(), make()
    scaler = LayerwiseGradScaler(model, SCALES, enabled=False)
    train_step(model, optimizer, scaler, 0)
    plain_step(twin, plain, 0)
    assert_equal(weights_of(model), weights_of(twin))
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0
    assert not scaler.is_enabled()
    assert not model.a._forward_hooks


@pytest.mark.parametrize("scales", [SCALES, AutoScale(every=1)], ids=["fixed", "auto"])
def test_asks_the_device_for_nothing(scales, monkeypatch):
    model, optimizer = make(optimizer=torch.optim.Adam, fused=True)
    scaler = LayerwiseGradScaler(model, scales, init_scale=8.0)

    def refuse(self, *_):
        raise AssertionError("a value was asked for")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        for step in range(3):
            train_step(model, optimizer, scaler, step)
    assert scaler.skipped == 0


def test_measures_exponents_on_demand():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, {"a": 1.0, "b": 4.0}, growth_interval=1)
    assert scaler.measured is None
    scaler.measure()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = loss_on(model, 0)
    scaler.scale(loss).backward()
    raw = [p.grad.clone() for p in model.b.parameters()]
    # Of both optimizers of this step.
    for part in (model.a.parameters(), [*model.b.parameters(), *model.head.parameters()]):
        scaler.step(torch.optim.SGD(part, lr=0.1))
    scaler.update()
    found = scaler.measured
    # Not what the scales have grown to.
    assert found.scales.tolist() == [1.0, 1.0, 4.0]
    assert found.weights.sum(1).tolist() == [12, 25, 60]
    # The loss's: b's input and output outside, a's output and the data, which needs no gradient.
    assert found.activations.sum(1).tolist() == [90, 30, 60]
    exponents = torch.cat([torch.frexp(g.flatten()).exponent - 1 for g in raw])
    for exponent in exponents.unique().tolist():
        expected = (exponents == exponent).sum()
        assert found.weights[2, exponent + 149 + 1] == expected
    scaler.measure(False)
    train_step(model, optimizer, scaler, 1)
    assert scaler.measured is found


def scales_by_definition(named, own):
    """The product of the scales of all chosen modules around each parameter."""
    return [
        math.prod(scale for layer, scale in own.items() if f"{name}.".startswith(f"{layer}."))
        for name in named
    ]


def test_the_scale_of_every_parameter():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES, init_scale=2.0**4, growth_interval=1)
    named, other = dict(model.named_parameters()), torch.nn.Linear(2, 2)
    carried = scaler.parameter_scales([*named.values(), other.weight])
    expected = [16.0 * scale for scale in scales_by_definition(named, SCALES)]
    assert carried().tolist() == [*expected, 16.0]
    scaler.scale(loss_on(model, 0)).backward()
    assert carried().tolist() == [*expected, 16.0]
    scaler.unscale_(optimizer)
    assert carried().tolist() == [1.0] * len(named) + [16.0]
    scaler.step(optimizer)
    scaler.update()
    grown = {name: 2 * scale for name, scale in SCALES.items()}
    expected = [32.0 * scale for scale in scales_by_definition(named, grown)]
    assert carried().tolist() == [*expected, 32.0]
    # NaN after an overflow, also for gradients that are finite.
    Poison(model.b[0])
    scaler.scale(loss_on(model, 0)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.a.parameters())
    assert torch.isnan(carried()).all()
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(carried()).all()
    scaler.remove()
    assert scaler.parameter_scales(list(named.values()))().tolist() == [1.0] * len(named)
