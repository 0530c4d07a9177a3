"""With ``layer_scales={}`` and a scale for the loss it is ``torch.amp.GradScaler``, to the bit."""

import pytest
import torch

from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.training import (
    SCALES,
    Poison,
    assert_equal,
    loss_on,
    make,
    train_step,
    weights_of,
)

RULE = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}
FIRST = 3000.1  # no power of two: the roundings must be the same too


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_steps_scales_and_skips_are_torchs(fused, unscale):
    model, optimizer = make(optimizer=torch.optim.AdamW, fused=fused)
    twin, other = make(optimizer=torch.optim.AdamW, fused=fused)
    rule = RULE | {"init_scale": FIRST}
    if fused and not unscale:
        # Here torch lets the optimizer divide, which rounds otherwise than its own unscale_ does.
        rule = {"init_scale": 2.0**12, "growth_interval": 3}
    ours, theirs = LayerwiseGradScaler(model, {}, **rule), torch.amp.GradScaler("cpu", **rule)
    poisons = [Poison(m.b[0]) for m in (model, twin)]
    for step in range(12):
        for m, o, scaler, poison in zip(
            (model, twin), (optimizer, other), (ours, theirs), poisons, strict=True
        ):
            poison.active = step in (2, 3, 8)
            o.zero_grad()
            scaler.scale(loss_on(m, step)).backward()
            if unscale:
                scaler.unscale_(o)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(o)
            scaler.update()
        assert ours.get_scale() == theirs.get_scale()
        assert_equal(weights_of(model), weights_of(twin))
    assert ours.skipped == 3


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


def damaged(key, value):
    """A state with another value, of the whole or of one layer."""

    def change(state):
        (state if key in state else state["layers"]["b"])[key] = value
        return state

    return change


def with_layers(**layers):
    return lambda state: {**state, "layers": {**state["layers"], **layers}}


DAMAGED = {
    "empty": (lambda state: {}, "layers"),
    "other layers": (lambda state: {**state, "layers": {"": {}}}, "layers"),
    "a layer more": (with_layers(c={"scale": 1.0, "growth_tracker": 0, "overflows": 0}), "layers"),
    "no layers": (damaged("layers", None), "layers"),
    "no mapping": (with_layers(a=3), "layers"),
    "negative scale": (damaged("scale", -1.0), "layers"),
    "scale that is no number": (damaged("scale", float("nan")), "layers"),
    "scale without a reciprocal": (damaged("scale", 2.0**127), "layers"),
    "negative tracker": (damaged("growth_tracker", -1), "layers"),
    "fraction": (damaged("overflows", 1.5), "layers"),
    "negative steps": (damaged("steps", -3), "steps"),
    "past int32": (damaged("growth_tracker", 2**31), "layers"),
    "past int64": (damaged("overflows", 2**63), "layers"),
    "steps past int64": (damaged("skipped", 2**70), "skipped"),
    "text": (damaged("skipped", "3"), "skipped"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_state_changes_nothing(case):
    change, told = DAMAGED[case]
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES, growth_interval=2)
    before = scaler.state_dict()
    train_step(model, optimizer, scaler, 0)
    train_step(model, optimizer, scaler, 1)
    now = scaler.state_dict()
    with pytest.raises(ValueError, match=told) as error:
        scaler.load_state_dict(change(before))
    assert "Remedy: " in str(error.value)
    assert scaler.state_dict() == now
