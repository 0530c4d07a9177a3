"""The life cycle: steps, overflows and who is named for them, measuring, states, misuse.

With ``layer_scales={}`` and a scale for the loss it is `torch.amp.GradScaler`, to the bit.
"""

import copy

import pytest
import torch

from steadygrad.optim import LANS
from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler
from steadygrad.scale.equations import exponent_histogram
from tests.unit.scale.training import (
    SCALES,
    Poison,
    assert_equal,
    end_step,
    loss_on,
    make,
    train_step,
    weights_of,
)

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}, torch.inf),
    "fused adam": (torch.optim.Adam, {"fused": True}, torch.nan),
    "lans": (LANS, {"foreach": True}, -torch.inf),
}


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_without_scaling_and_without_the_one_that_overflowed(name, micro):
    """Also of micro-batches, whose gradients are clipped; one of them overflows."""
    kind, options, value = OPTIMIZERS[name]
    model, scaled = make(optimizer=kind, **options)
    twin, plain = make(optimizer=kind, **options)
    scaler = LayerwiseGradScaler(model, SCALES, growth_interval=2)
    poison = Poison(model.b[0], value)
    for step in range(5):
        before = weights_of(model)
        scaled.zero_grad()
        plain.zero_grad()
        for part in range(micro):
            poison.active = (step, part) == (1, 0)
            scaler.scale(loss_on(model, 4 * step + part) / micro).backward()
            (loss_on(twin, 4 * step + part) / micro).backward()
        if micro > 1:
            scaler.unscale_(scaled)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        end_step(scaled, scaler)
        if step == 1:
            assert_equal(weights_of(model), before)
            assert scaler.culprits() == ["b"]
        else:
            plain.step()
            assert scaler.culprits() == []
    assert_equal(weights_of(model), weights_of(twin))
    # Two growths, of b after it had backed off one alone.
    expected = {"": 1.0, "a": 4 * SCALES["a"], "b": SCALES["b"], "b.1": 4 * SCALES["b.1"]}
    assert scaler.get_scales() == expected
    assert scaler.skipped == 1


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


def test_disabled_it_does_nothing():
    (model, optimizer), (twin, plain) = make(), make()
    scaler = LayerwiseGradScaler(model, SCALES, enabled=False)
    train_step(model, optimizer, scaler, 0)
    loss_on(twin, 0).backward()
    plain.step()
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
    with torch.autocast("cpu", torch.float16):
        loss = loss_on(model, 0)
    scaler.scale(loss).backward()
    raw = torch.cat([p.grad.flatten() for p in model.b.parameters()])
    # Of both optimizers of this step.
    for part in (model.a.parameters(), [*model.b.parameters(), *model.head.parameters()]):
        scaler.step(torch.optim.SGD(part, lr=0.1))
    scaler.update()
    found = scaler.measured
    # Not what the scales have grown to.
    assert found.scales.tolist() == [1.0, 1.0, 4.0]
    assert found.weights.sum(1).tolist() == [12, 25, 60]
    assert torch.equal(found.weights[2], exponent_histogram(raw))
    # The loss's: b's input and output outside, a's output and the data, which needs no gradient.
    assert found.activations.sum(1).tolist() == [90, 30, 60]
    scaler.measure(False)
    train_step(model, optimizer, scaler, 1)
    assert scaler.measured is found


def test_the_scale_of_every_parameter():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, {"b": 4.0, "b.1": 8.0}, init_scale=16.0, growth_interval=1)
    # Of no chosen module, of one, of one in it, and of another model.
    other = torch.nn.Linear(2, 2)
    inside = [model.a.weight, model.b[0].weight, model.b[1].weight]
    carried = scaler.parameter_scales([*inside, other.weight])
    scaler.scale(loss_on(model, 0)).backward()
    assert carried().tolist() == [16.0, 64.0, 512.0, 16.0]
    scaler.unscale_(optimizer)
    assert carried().tolist() == [1.0, 1.0, 1.0, 16.0]
    end_step(optimizer, scaler)
    assert carried().tolist() == [32.0, 256.0, 4096.0, 32.0]
    # NaN after an overflow, also for gradients that are finite.
    Poison(model.b[0])
    scaler.scale(loss_on(model, 0)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.a.parameters())
    assert torch.isnan(carried()).all()
    end_step(optimizer, scaler)
    assert torch.isfinite(carried()).all()
    scaler.remove()
    assert scaler.parameter_scales(inside)().tolist() == [1.0] * 3


FIRST = 3000.1  # no power of two: the roundings must be the same too


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_steps_scales_and_skips_are_torchs(fused, unscale):
    rule = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3, "init_scale": FIRST}
    if fused and not unscale:
        # Here torch lets the optimizer divide, which rounds otherwise than its own unscale_ does.
        rule = {"init_scale": 2.0**12, "growth_interval": 3}

    def trained(make_scaler):
        model, optimizer = make(optimizer=torch.optim.AdamW, fused=fused)
        scaler, poison, found = make_scaler(model), Poison(model.b[0]), []
        for step in range(12):
            poison.active = step in (2, 3, 8)
            optimizer.zero_grad()
            scaler.scale(loss_on(model, step)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            end_step(optimizer, scaler)
            found.append([scaler.get_scale(), *(p.tolist() for p in model.parameters())])
        return found

    ours = trained(lambda model: LayerwiseGradScaler(model, {}, **rule))
    assert ours == trained(lambda _: torch.amp.GradScaler("cpu", **rule))


def test_takes_over_torchs_state():
    model, optimizer = make()
    theirs = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=4)
    for step in range(3):
        train_step(model, optimizer, theirs, step)
    ours = LayerwiseGradScaler(model, SCALES, init_scale=1.0, growth_factor=2.0, growth_interval=4)
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scales() == pytest.approx({"": FIRST, **SCALES}, rel=1e-7)
    train_step(model, optimizer, ours, 3)
    # The fourth finite step since the scale last changed; the layers have seen one.
    assert ours.get_scales() == pytest.approx({"": 2 * FIRST, **SCALES}, rel=1e-7)


def test_a_new_scale_may_be_set():
    model, _ = make()
    ours = LayerwiseGradScaler(model, SCALES, init_scale=8.0)
    ours.update(32.0)
    assert ours.get_scale() == 32.0
    ours.update(torch.tensor(64.0))
    assert ours.get_scales() == {"": 64.0, **SCALES}
    with pytest.raises(ValueError, match="new_scale"):
        ours.update(-1.0)


# Scales and options.
IDIOM = {
    "fixed": ({"a": LayerScale(4.0, fixed=True)}, {}),
    "by layer": (SCALES, {"growth_interval": 3}),
    "auto": ("auto", {}),
    "auto in every step": (AutoScale(every=1, scale=2.0**12), {}),
    "the loss alone": ({}, {"init_scale": 2.0**4, "growth_interval": 2}),
    "growth beside a skip": (
        {"b": 2.0},
        {"growth_interval": 1, "max_scale": 16.0, "init_scale": 2.0},
    ),
    "at the least scale": ({}, {"init_scale": 4.0, "min_scale": 4.0}),
}


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("mode", IDIOM)
def test_get_scale_falls_in_skipped_steps_and_in_no_others(mode, optimizers):
    """By which trainers leave out a step of the schedule."""
    torch.manual_seed(0)
    model, _ = make()
    scales, options = IDIOM[mode]
    scaler, poison = LayerwiseGradScaler(model, scales, **options), Poison(model.b[0])
    halves = [*model.parameters()][::2], [*model.parameters()][1::2]
    some = [torch.optim.SGD(h, 1e-3) for h in halves][:optimizers]
    schedule, taken = torch.optim.lr_scheduler.StepLR(some[0], 1), 0
    for step in range(40):
        poison.active = step % 7 in (2, 5, 6)
        # Of other sizes, so that measured scales move in both directions.
        size, before, skipped = 10.0 ** (step % 5), scaler.get_scale(), scaler.skipped.item()
        with torch.autocast("cpu", torch.float16):
            loss = loss_on(model, step)
        scaler.scale(loss.float() * size).backward()
        for optimizer in some:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        model.zero_grad()
        was_skipped = scaler.skipped.item() > skipped
        assert (scaler.get_scale() < before) is was_skipped
        if scaler.get_scale() >= before:
            schedule.step()
        taken += not was_skipped
        if step == 20:
            scaler.load_state_dict(copy.deepcopy(scaler.state_dict()))
            assert scaler.get_scale() == scaler.get_scales()[""]
    assert schedule.last_epoch == taken
    assert 10 < taken < 30


def test_rows_of_a_sparse_gradient_overflow_once_they_are_added_up():
    model = torch.nn.Embedding(3, 2, sparse=True).half()
    optimizer, before = torch.optim.SGD(model.parameters(), lr=1.0), weights_of(model)
    scaler = LayerwiseGradScaler(model, {}, init_scale=4e4)
    scaler.scale(model(torch.tensor([1, 1])).sum()).backward()
    end_step(optimizer, scaler)
    assert scaler.skipped == 1
    assert_equal(weights_of(model), before)


def test_scales_many_losses_at_once():
    ours = LayerwiseGradScaler(make()[0], {}, init_scale=4.0)
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert ours.scale([one, two]) == [torch.tensor(4.0), torch.tensor(8.0)]
    assert ours.scale((one,)) == (torch.tensor(4.0),)
    assert list(ours.scale(x for x in (one, two))) == [torch.tensor(4.0), torch.tensor(8.0)]
    with pytest.raises(ValueError, match="outputs"):
        ours.scale(1.0)


def test_misuse_is_told():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    with pytest.raises(RuntimeError, match="step"):
        scaler.update()
    scaler.scale(loss_on(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)
    scaler.update()


@pytest.mark.parametrize(
    ("key", "value"),
    [("scale", -1.0), ("scale", 2.0**127), ("growth_tracker", 2**31)],  # 2**127: no reciprocal
)
def test_a_saved_number_out_of_bounds_changes_nothing(key, value):
    scaler = LayerwiseGradScaler(make()[0], SCALES)
    before, damaged = scaler.state_dict(), scaler.state_dict()
    damaged["layers"]["b"][key] = value
    with pytest.raises(ValueError, match=f"{key}.*Remedy: "):
        scaler.load_state_dict(damaged)
    assert scaler.state_dict() == before
