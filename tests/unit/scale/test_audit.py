"""Findings in the first step's graph: uses that avoid the boundaries, and float32 gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler, audit
from tests.unit.scale.cases import Block
from tests.unit.scale.training import (
    SCALES,
    assert_equal,
    make,
    take_step,
    train_step,
    unscaled_gradients,
)

TOKENS = torch.arange(11)


class Head(nn.Module):
    """Its last layer is a function of the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, x):
        return F.linear(torch.tanh(self.block(self.embed(x))), self.embed.weight)

    def loss(self):
        return F.cross_entropy(self(TOKENS).float(), TOKENS)


class Penalty(Head):
    def forward(self, x):
        return F.linear(self.block(self.embed(x)), self.embed.weight.detach())

    def loss(self):
        return super().loss() + self.block.weight.square().sum()


class Keeps(nn.Module):
    """A loss of its own in something that is kept from inside ``block``."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(6, 6), Block()
        self.block.lin.register_forward_hook(lambda module, args, out: setattr(self, "kept", out))

    def loss(self):
        return self.block(self.first(torch.ones(2, 6))).sum() + self.kept.square().sum()


class Reaches(nn.Module):
    """Calls what is inside ``outer`` without calling ``outer``."""

    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(Block(), Block())

    def loss(self):
        return self.outer[0](self.outer(torch.ones(2, 6))).sum()


REFUSED = {
    "tied by a function": (Head, {"embed": 8.0}, "'embed.weight'"),
    "tied, at one but moving": (Head, {"embed": 1.0}, "'embed'"),
    "tied, automatic, not from one": (Head, AutoScale(scale=2.0), "'embed'"),
    "tied, fixed at two": (Head, {"embed": LayerScale(2.0, fixed=True)}, "'embed.weight'"),
    "penalty": (Penalty, {"block": 8.0}, "'block.weight'"),
    "kept": (Keeps, {"block": 8.0}, "'block.lin.weight'"),
    "inside": (Reaches, {"outer": 8.0, "outer.0": 2.0}, "'outer'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gets_around_a_boundary_is_refused_before_the_backward_pass(case):
    make_model, wanted, told = REFUSED[case]
    torch.manual_seed(0)
    model = make_model()
    scaler = LayerwiseGradScaler(model, wanted)
    with pytest.raises(ValueError, match=told) as error:
        scaler.scale(model.loss())
    assert "Remedy: " in str(error.value)


def unscaled(wanted, dtype=torch.float32, steps=1, **options):
    torch.manual_seed(0)
    model = Head().to(dtype)
    scaler = LayerwiseGradScaler(model, wanted, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        take_step(optimizer, scaler, model.loss() * 2.0**-12)
    return [p.grad.float() for p in model.parameters()], scaler


def test_automatic_scales_of_such_a_layer_stay_at_one():
    expected, _ = unscaled({})
    found, scaler = unscaled("auto", torch.float16, steps=12)
    scales = scaler.get_scales()
    assert scales["embed"] == 1.0
    # And there was something to find: what is in it moves the loss's.
    assert scales[""] > 1.0
    for mine, plain in zip(found, expected, strict=True):
        # float16's roundings, and its least number for what is unscaled.
        atol = 0.02 * plain.abs().max().item() + 2.0**-24
        torch.testing.assert_close(mine, plain, rtol=0.0, atol=atol)


def test_its_overflow_moves_what_lies_around_it():
    model = Head()
    scaler = LayerwiseGradScaler(model, "auto", min_scale=2.0**-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(model.loss()).backward()
    model.embed.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.culprits() == ["embed"]
    assert scaler.get_scales() == {"": 0.5, "embed": 1.0, "block": 1.0}
    assert scaler.get_overflows() == {"": 0, "embed": 1, "block": 0}


def test_fixed_at_one_it_may_be_used_anywhere():
    plain, _ = unscaled({}, init_scale=4.0)
    found, _ = unscaled({"embed": LayerScale(1.0, fixed=True), "block": 2.0}, init_scale=4.0)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_no_bound_moves_a_scale_that_stays_at_one():
    _, scaler = unscaled("auto", torch.float16, steps=2, min_scale=2.0)
    assert scaler.get_scales()["embed"] == 1.0


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_no_alarm_for_parametrized_weights_or_a_second_scaler():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    parametrize.register_parametrization(model[0].lin, "weight", Double())
    loss = lambda model: model(torch.ones(2, 6)).sum()
    plain = unscaled_gradients(model, {}, loss)
    model.zero_grad()
    other = LayerwiseGradScaler(model, {"1": 4.0})
    scales = {"0": 8.0, "0.**.weight": 2.0}
    found = unscaled_gradients(model, scales, lambda model: other.scale(loss(model)))
    other.unscale_(torch.optim.SGD(model.parameters()))
    assert_equal(found, plain)


def test_looks_in_the_first_step_only_and_again_at_other_parameters(monkeypatch):
    looks, walk = [], audit._walk
    monkeypatch.setattr(audit, "_walk", lambda *args: looks.append(1) or walk(*args))
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    for times in (1, 2):
        for step in range(3):
            train_step(model, optimizer, scaler, step)
        assert len(looks) == times
        model.a.weight = nn.Parameter(model.a.weight.detach().clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.remove()
    LayerwiseGradScaler(model, {}, init_scale=8.0).scale(model(torch.ones(2, 4)).sum())
    assert len(looks) == 2  # nothing is chosen: nothing to look for


class Islands(nn.Module):
    """``first`` and ``norm`` stay in float32 under autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.mid = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            h = self.first(x) * 2.0**-22
        h = self.mid(h)
        with torch.autocast("cpu", enabled=False):
            h = self.norm(h.float())
        return self.last(h)


def islands(wanted, steps):
    torch.manual_seed(0)
    model, x = Islands(), torch.randn(4, 6)
    scaler = LayerwiseGradScaler(model, wanted, init_scale=1.0)
    scaler.measure()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().sum()
        take_step(optimizer, scaler, loss)
    return scaler


def test_only_what_float16_can_have_cut_off_is_counted():
    found = islands({"first": 2.0, "mid": 2.0, "norm": 2.0}, 2).measured
    # Of weights: mid's and last's were cast; first's and norm's were never float16.
    assert found.weights.sum(1).tolist() == [7, 0, 42, 0]
    # Of boundaries: what mid hands on, seen from inside and outside, and what last does.
    assert found.activations[1].sum() == found.activations[3].sum() == 0
    assert found.activations[2].sum() == 24


def test_automatic_scales_leave_alone_what_float16_cannot_cut_off():
    scales = islands(AutoScale(layers=("first", "norm")), 4).get_scales()
    assert scales["first"] * scales[""] == 1.0


class Transposed(nn.Module):
    """Its weight is seen through views before and after autocast casts it."""

    def __init__(self, views):
        super().__init__()
        self.lin, self.views = nn.Linear(6, 6, bias=False), views

    def forward(self, x):
        return F.linear(x, self.views(self.lin.weight))


VIEWS = {
    "transposed": (lambda weight: weight.t(), 36),
    "viewed": (lambda weight: weight.view(2, 3, 6).flatten(0, 1).contiguous(), 36),
    "squared": (lambda weight: weight.square() + weight, 0),
}


@pytest.mark.parametrize("case", VIEWS)
def test_gradients_that_were_cast_are_found_behind_views(case):
    views, count = VIEWS[case]
    model = nn.Sequential(Transposed(views))
    scaler = LayerwiseGradScaler(model, {"0": 2.0})
    scaler.measure()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(2, 6)).float().sum()
    take_step(torch.optim.SGD(model.parameters(), lr=0.1), scaler, loss)
    assert scaler.measured.weights.sum() == count
