"""How scales move in each phase."""

import pytest
import torch
from torch import nn

from steadygrad.studies.inspect import scalers

INTERVAL = 6


@pytest.fixture
def net(monkeypatch):
    monkeypatch.setattr(scalers, "INTERVAL", INTERVAL)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def step(scaler, model, spoilt=None):
    """One step; the gradient of a layer's weight may be infinite. Returns what moves the scale."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = scaler.state_dict()
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    if spoilt is not None:
        model[spoilt].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return before


def test_one_scale_moves_as_torch_s(net):
    """Its growth begins anew after an overflow, in whichever layer that was."""
    ours = scalers.given_scales(net)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=INTERVAL)
    copy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    seen = []
    for number in range(14):
        spoilt = 0 if number == 4 else None
        before = step(ours, net, spoilt)
        scalers.follow_one_scale(ours, ours.culprits(), before)
        step(theirs, copy, spoilt)
        seen.append((ours.get_scale(), theirs.get_scale()))
    assert [one for one, _ in seen] == [two for _, two in seen]
    assert [one for one, _ in seen] == [2.0**16] * 4 + [2.0**15] * 6 + [2.0**16] * 4


def test_it_has_a_floor(net):
    scaler = scalers.given_scales(net, 2 * scalers.LEAST_SCALE)
    for _ in range(3):
        before = step(scaler, net, spoilt=1)
        scalers.follow_one_scale(scaler, scaler.culprits(), before)
    assert scaler.get_scale() == scalers.LEAST_SCALE


def test_whose_overflow_moves_what(net):
    scaler = scalers.given_scales(net, 2.0**8, {"1": 2.0**4})
    assert scaler.get_scales() == {"": 2.0**8, "0": 1.0, "1": 2.0**4}
    # A layer with a scale of its own backs off alone.
    before = step(scaler, net, spoilt=1)
    scalers.follow_one_scale(scaler, scaler.culprits(), before, layer_scales={"1"})
    assert scaler.get_scales() == {"": 2.0**8, "0": 1.0, "1": 2.0**3}
    # What no scale prevents moves none.
    for spoilt, name in ((1, "1"), (0, "0")):
        before = step(scaler, net, spoilt)
        culprits = scaler.culprits()
        assert culprits == [name]
        scalers.follow_one_scale(scaler, culprits, before, layer_scales={"1"}, nonfinite=culprits)
        assert scaler.get_scales() == {"": 2.0**8, "0": 1.0, "1": 2.0**3}
    assert scaler.state_dict()["layers"][""]["growth_tracker"] == 1
    # The others' overflow does.
    before = step(scaler, net, spoilt=0)
    scalers.follow_one_scale(scaler, ["0", "1"], before, layer_scales={"1"}, nonfinite=["1"])
    assert scaler.get_scales() == {"": 2.0**7, "0": 1.0, "1": 2.0**3}
