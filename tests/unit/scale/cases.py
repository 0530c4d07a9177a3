"""Small models of every shape that a gradient can flow through, and modules to choose in each."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.nets import Net

WIDTH = 6


def linear():
    return nn.Linear(WIDTH, WIDTH)


def block():
    return Net(lambda net, x: torch.tanh(net.lin(x)), lin=linear())


def residual():
    def function(net, x):
        x = x + net.a(x)
        x = x + net.b(x)
        return net.out(x)

    return Net(function, a=block(), b=block(), out=nn.Linear(WIDTH, 2))


def reused():
    """One block three times in a row, and once more beside itself."""

    def function(net, x):
        x = net.again(net.again(net.again(net.first(x))))
        return x * net.again(x)

    return Net(function, first=linear(), again=block())


def attention():
    """Keywords, several inputs of which two are one tensor, and a dictionary as output."""

    def inner(net, query, *, memory, options=None):
        weights = torch.softmax(net.q(query) @ net.k(memory["keys"]).mT, -1)
        found = weights @ net.v(memory["values"])
        return {"found": found, "nest": [weights, (query, None)], "n": 3}

    def function(net, x):
        h = net.norm(x)
        out = net.attention(query=h, memory={"keys": h, "values": x}, options={"mode": "soft"})
        return x + out["found"] * out["nest"][0].sum() + out["nest"][1][0]

    layers = {name: linear() for name in "qkv"}
    return Net(function, attention=Net(inner, **layers), norm=nn.LayerNorm(WIDTH))


def in_place():
    """In place on a scaled output, first thing in a scaled module, and between two of them."""

    def function(net, x):
        h = net.a(x)
        h.mul_(2)
        h = net.relu(h) + 1
        h = net.c(h)
        h += 1
        return net.b(h)

    c = nn.Sequential(nn.ReLU(inplace=True), linear())
    return Net(function, a=linear(), b=block(), relu=nn.ReLU(inplace=True), c=c)


def caller_relies():
    """The caller uses an argument that a scaled module has changed in place."""

    def change(net, x):
        x.mul_(3).add_(1)

    def function(net, x):
        h = net.a(x)
        net.change(h)
        return net.b(h) + h

    return Net(function, a=linear(), change=Net(change), b=block())


def passed_through():
    """A scaled module that returns its input beside what it computes from it."""

    def function(net, x):
        x = x * 2
        same, value = net.inner(x)
        return net.out(same) * value + x

    inner = Net(lambda net, x: (x, net.lin(x) * net.gain), lin=linear())
    inner.gain = nn.Parameter(torch.ones(WIDTH))
    return Net(function, inner=inner, out=block())


def checkpointed(reentrant):
    def function(net, x):
        x = net.a(x)
        x = checkpoint(net.b, x, use_reentrant=reentrant)
        return net.c(x) + x

    return Net(function, a=block(), b=block(), c=block())


def tied():
    """Two layers that share their weight."""
    net = Net(lambda net, x: net.down(torch.sin(net.up(x))), up=linear(), down=linear())
    net.down.weight = net.up.weight
    return net


# Name: how it is made, and what is chosen.
CASES = {
    "sequential": (
        lambda: nn.Sequential(block(), block(), block(), nn.Identity()),
        {"0": 4.0, "1": 8.0, "1.lin": 0.5, "2": 2.0},
    ),
    "residual": (residual, {"a": 4.0, "b": 0.25}),
    "reused": (reused, {"again": 16.0}),
    "keywords, dictionary": (attention, {"attention": 8.0, "attention.q": 4.0, "norm": 2.0}),
    "in place": (in_place, {"a": 4.0, "b": 8.0, "c": 16.0, "relu": 2.0}),
    "in place outside": (in_place, {"a": 4.0, "b": 8.0, "c.1": 16.0}),
    "caller relies on it": (caller_relies, {"change": 4.0, "b": 8.0}),
    "passed through": (passed_through, {"inner": 8.0, "inner.lin": 4.0}),
    "checkpoint": (partial(checkpointed, False), {"a": 4.0, "b": 8.0, "b.lin": 2.0}),
    "reentrant checkpoint": (partial(checkpointed, True), {"a": 4.0, "b": 8.0, "b.lin": 2.0}),
}

# A chosen module changes its argument: compiled code could not hand that back.
REFUSED_COMPILED = {"in place", "caller relies on it"}
# A boundary adds up the gradients of a tensor that is used several times in another order.
REORDERED = {"keywords, dictionary"}


def model_of(case):
    torch.manual_seed(0)
    return CASES[case][0]()


def data_of(case):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(5, WIDTH, generator=draw)


def loss_of(model, x):
    out = model(x)
    # Weights, so that no gradient is zero because of a symmetry.
    return (out * (1 + torch.arange(out.shape[-1], device=out.device))).square().sum()
