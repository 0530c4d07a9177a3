"""The life cycle: steps, overflows and who is named for them, accumulation, resume."""

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
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "fused adam": (torch.optim.Adam, {"fused": True}),
    "lans": (LANS, {}),
}


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    return OPTIMIZERS[request.param]


def test_steps_are_those_without_scaling_to_the_bit(optimizer):
    kind, options = optimizer
    model, scaled = make(optimizer=kind, **options)
    twin, plain = make(optimizer=kind, **options)
    scaler = LayerwiseGradScaler(model, SCALES, growth_interval=2)
    for step in range(5):
        train_step(model, scaled, scaler, step)
        plain_step(twin, plain, step)
    assert_equal(weights_of(model), weights_of(twin))
    grown = {"": 1.0} | {name: 4 * scale for name, scale in SCALES.items()}
    assert scaler.get_scales() == grown
    assert scaler.skipped == 0


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_after_an_overflow_it_is_as_if_the_batch_had_not_been(optimizer, value):
    kind, options = optimizer
    model, scaled = make(optimizer=kind, **options)
    twin, plain = make(optimizer=kind, **options)
    scaler = LayerwiseGradScaler(model, SCALES)
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
    assert scaler.skipped == 1


@pytest.mark.parametrize("place", ["a", "b", "b.0", "b.1", "head"])
def test_an_overflow_is_counted_where_it_arose_and_nowhere_else(place):
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    Poison(model.get_submodule(place))
    train_step(model, optimizer, scaler, 0)
    # A hook that comes after the scaler's lies outside of the boundary, in what is around it.
    name = {"a": "", "b": "", "b.0": "b", "b.1": "b", "head": ""}[place]
    assert scaler.culprits() == [name]
    counts = dict.fromkeys(["", *SCALES], 0)
    assert scaler.get_overflows() == counts | {name: 1}
    expected = {"": 1.0, **SCALES}
    if name:
        expected[name] *= 0.5
    assert scaler.get_scales() == expected


def test_a_scale_that_is_too_large_for_the_type_is_its_own_layers_fault():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).half()
    scaler = LayerwiseGradScaler(model, {"0": 2.0**4, "1": 2.0**30, "2": 2.0**4})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8).half()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    overflows, scales = scaler.get_overflows(), scaler.get_scales()
    assert overflows["1"] == scaler.skipped > 5
    assert (overflows["0"], overflows["2"], overflows[""]) == (0, 0, 0)
    assert scales["1"] == 2.0 ** (30 - overflows["1"])
    assert (scales["0"], scales["2"]) == (16.0, 16.0)


def test_accumulates_with_frozen_scales():
    model, scaled = make()
    twin, plain = make()
    scaler = LayerwiseGradScaler(model, SCALES, growth_interval=1)
    for step in range(3):
        scaled.zero_grad()
        plain.zero_grad()
        for micro in range(4):
            scaler.scale(loss_on(model, 4 * step + micro) / 4).backward()
            (loss_on(twin, 4 * step + micro) / 4).backward()
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        scaler.step(scaled)
        plain.step()
        scaler.update()
    assert_equal(weights_of(model), weights_of(twin))


def test_an_overflow_in_one_micro_batch_skips_the_step():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    poison, before = Poison(model.b[0]), weights_of(model)
    for micro in range(3):
        poison.active = micro == 1
        scaler.scale(loss_on(model, micro)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal(weights_of(model), before)
    assert scaler.culprits() == ["b"]


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


@pytest.mark.parametrize("scales", [SCALES, "auto", AutoScale(warmup=1, every=2)])
def test_resumes_to_the_bit(scales):
    def run(model, optimizer, scaler, steps, poison):
        scales = []
        for step in steps:
            poison.active = step in (1, 4)
            train_step(model, optimizer, scaler, step)
            scales.append(scaler.get_scales())
        return scales

    def build():
        model, optimizer = make(optimizer=torch.optim.Adam)
        scaler = LayerwiseGradScaler(model, scales, growth_interval=3, init_scale=2.0**4)
        return model, optimizer, scaler, Poison(model.b[0])

    *whole, poison = build()
    expected = run(*whole, range(8), poison)
    *first, poison = build()
    run(*first, range(4), poison)
    states = [part.state_dict() for part in first]
    *second, poison = build()
    for part, state in zip(second, states, strict=True):
        part.load_state_dict(state)
    assert run(*second, range(4, 8), poison) == expected[4:]
    assert_equal(weights_of(second[0]), weights_of(whole[0]))
    assert second[2].state_dict() == whole[2].state_dict()
    assert whole[2].state_dict()["skipped"] == 2


def test_a_state_goes_through_a_file_without_pickles(tmp_path):
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    train_step(model, optimizer, scaler, 0)
    torch.save(scaler.state_dict(), tmp_path / "state.pt")
    other = LayerwiseGradScaler(make()[0], dict.fromkeys(SCALES, 1.0))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scales() == {"": 1.0, **SCALES}


def test_a_state_as_the_first_version_saved_it_is_loaded():
    row = {"growth_tracker": 1, "overflows": 2}
    state = {
        "layers": {
            "b": {"scale": 64.0, **row},
            "": {"scale": 8.0, **row},
            "b.1": {"scale": 0.5, **row},
            "a": {"scale": 2.0, **row},
        },
        "steps": 5,
        "skipped": 3,
    }
    scaler = LayerwiseGradScaler(make()[0], SCALES, init_scale=1.0)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert scaler.get_overflows() == dict.fromkeys(["", *SCALES], 2)


def test_disabled_it_does_nothing():
    model, optimizer = make()
    twin, plain = make()
    scaler = LayerwiseGradScaler(model, SCALES, enabled=False)
    train_step(model, optimizer, scaler, 0)
    plain_step(twin, plain, 0)
    assert_equal(weights_of(model), weights_of(twin))
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0
    assert not scaler.is_enabled()
    assert not model.a._forward_hooks


@pytest.mark.parametrize("scales", [SCALES, AutoScale(every=1)])
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


def test_what_was_measured_stays_what_it_was():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES, growth_interval=1)
    scaler.measure()
    train_step(model, optimizer, scaler, 0)
    kept = scaler.measured
    scales = kept.scales.tolist()
    assert scales[1] == SCALES["a"]
    train_step(model, optimizer, scaler, 1)
    assert kept.scales.tolist() == scales
    assert scaler.measured.scales[1] == 2 * SCALES["a"]
