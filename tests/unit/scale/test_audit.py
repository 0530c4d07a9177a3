"""Findings in the first step's graph: uses that avoid the boundaries, and float32 gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler
from tests.unit.nets import Net
from tests.unit.scale.cases import block, linear
from tests.unit.scale.training import assert_equal, take_step, unscaled_gradients

TOKENS = torch.arange(11)


class Head(nn.Module):
    """Its last layer is a function of the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, x):
        return F.linear(torch.tanh(self.block(self.embed(x))), self.embed.weight)


def loss_of(model):
    return F.cross_entropy(model(TOKENS).float(), TOKENS)


def penalty(model):
    """A loss of a chosen module's weights."""
    return model.block(torch.ones(2, 6)).sum() + model.block.weight.square().sum()


def kept(model):
    """A loss of its own in something that is kept from inside ``lin``'s block."""
    found = []
    model[1].lin.register_forward_hook(lambda module, args, out: found.append(out))
    return model(torch.ones(2, 6)).sum() + found[0].square().sum()


def reached(model):
    """Calls what is inside of a module without calling it."""
    return model[0][0](model[0](torch.ones(2, 6))).sum()


def inside():
    return nn.Sequential(nn.Sequential(block(), block()))


REFUSED = {
    "tied by a function": (Head, loss_of, {"embed": 8.0}, "'embed.weight'"),
    "tied, at one but moving": (Head, loss_of, {"embed": 1.0}, "'embed'"),
    "tied, automatic, not from one": (Head, loss_of, AutoScale(scale=2.0), "'embed'"),
    "tied, fixed at two": (Head, loss_of, {"embed": LayerScale(2.0, fixed=True)}, "'embed.weight'"),
    "penalty": (Head, penalty, {"block": 8.0}, "'block.weight'"),
    "kept": (lambda: nn.Sequential(linear(), block()), kept, {"1": 8.0}, "'1.lin.weight'"),
    "reached": (inside, reached, {"0": 8.0, "0.0": 2.0}, "'0'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gets_around_a_boundary_is_refused_before_the_backward_pass(case):
    make, loss, wanted, told = REFUSED[case]
    torch.manual_seed(0)
    model = make()
    scaler = LayerwiseGradScaler(model, wanted)
    with pytest.raises(ValueError, match=f"{told}.*Remedy: "):
        scaler.scale(loss(model))


def test_an_overflow_in_a_layer_moves_what_lies_around_it():
    model = Head()
    scaler = LayerwiseGradScaler(model, "auto", min_scale=2.0**-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(loss_of(model)).backward()
    model.embed.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.culprits() == ["embed"]
    assert scaler.get_scales() == {"": 0.5, "embed": 1.0, "block": 1.0}
    assert scaler.get_overflows() == {"": 0, "embed": 1, "block": 0}


def test_a_layer_fixed_at_one_may_be_used_anywhere():
    def gradients(scales):
        torch.manual_seed(0)
        return unscaled_gradients(Head(), scales, loss_of, init_scale=4.0)

    found = gradients({"embed": LayerScale(1.0, fixed=True), "block": 2.0})
    assert_equal(found, gradients({}))


def test_no_alarm_for_parametrized_weights_or_a_second_scaler():
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    double = Net(lambda net, weight: 2 * weight)
    parametrize.register_parametrization(model[0].lin, "weight", double)
    loss = lambda model: model(torch.ones(2, 6)).sum()
    plain = unscaled_gradients(model, {}, loss)
    model.zero_grad()
    other = LayerwiseGradScaler(model, {"1": 4.0})
    scales = {"0": 8.0, "0.**.weight": 2.0}
    found = unscaled_gradients(model, scales, lambda model: other.scale(loss(model)))
    other.unscale_(torch.optim.SGD(model.parameters()))
    assert_equal(found, plain)


def test_only_what_float16_can_have_cut_off_is_counted():
    """Under autocast, in a model of which ``first`` and ``norm`` stay in float32."""

    def function(net, x):
        with torch.autocast("cpu", enabled=False):
            h = net.first(x)
        h = net.mid(h)
        with torch.autocast("cpu", enabled=False):
            h = net.norm(h.float())
        return net.last(h)

    model = Net(function, first=linear(), mid=linear(), norm=nn.LayerNorm(6), last=nn.Linear(6, 1))
    scaler = LayerwiseGradScaler(model, {"first": 2.0, "mid": 2.0, "norm": 2.0}, init_scale=1.0)
    scaler.measure()
    # The second step goes by what the first one's audit has found.
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(4, 6)).float().sum()
        take_step(torch.optim.SGD(model.parameters(), lr=0.0), scaler, loss)
    found = scaler.measured
    # Of weights: mid's and last's were cast; first's and norm's were never float16.
    assert found.weights.sum(1).tolist() == [7, 0, 42, 0]
    # Of boundaries: what mid hands on, seen from inside and outside, and what last does.
    assert found.activations[1].sum() == found.activations[3].sum() == 0
    assert found.activations[2].sum() == 24


# How a weight is seen before autocast casts it, and how many of its numbers are counted.
VIEWS = {
    "transposed": (lambda weight: weight.t(), 36),
    "viewed": (lambda weight: weight.view(2, 3, 6).flatten(0, 1).contiguous(), 36),
    "squared": (lambda weight: weight.square() + weight, 0),
    "nested": (lambda weight: torch.nested.as_nested_tensor([weight]).unbind()[0], 36),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", VIEWS)
def test_gradients_that_were_cast_are_found_behind_views(case):
    views, count = VIEWS[case]
    layer = Net(lambda net, x: F.linear(x, views(net.lin.weight)), lin=nn.Linear(6, 6, bias=False))
    model = nn.Sequential(layer)
    scaler = LayerwiseGradScaler(model, {"0": 2.0})
    scaler.measure()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(2, 6)).float().sum()
    take_step(torch.optim.SGD(model.parameters(), lr=0.1), scaler, loss)
    assert scaler.measured.weights.sum() == count
