"""Losses of gradients, hidden states, several passes and reports; models that change."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.nets import Net
from tests.unit.watch.nets import Module, culprit, data, mse, root_of_zero, watching, with_root

FIRST_AND_LATER = pytest.mark.parametrize("mode", ["first", "later"])


def critic():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1)
    return nn.Sequential(*layers)


def penalty(model, of=lambda g: (g.square().sum(1).sqrt() - 1).square().mean(), x=None):
    """A function of the gradient at the inputs, which is kept in the graph."""
    x = (torch.randn(5, 4) if x is None else x).requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return of(gradient), y


@FIRST_AND_LATER
@pytest.mark.parametrize("curvature", [False, True])
def test_loss_that_contains_gradients(curvature, mode):
    """A gradient penalty and a differential equation: their faults enter at inner activations."""

    def of(gradient):
        if curvature:
            (gradient,) = torch.autograd.grad(gradient.sum(), x, create_graph=True)
        return root_of_zero(gradient).sum()

    model, x = critic(), torch.randn(5, 4)
    watch = watching(model, mode)
    healthy, _ = penalty(model)
    healthy.backward()
    assert watch.report() is None
    model.zero_grad()
    (model(torch.randn(5, 4)).mean() + penalty(model, of, x)[0]).backward()
    assert culprit(watch) == ("loss", "")


@FIRST_AND_LATER
def test_loss_that_contains_gradients_of_other_culprits(mode):
    model = critic()
    watch = watching(model, mode)
    found, y = penalty(model)
    label = torch.zeros(5, 1)
    label[2] = torch.nan
    (found + mse(y, label)).backward()
    found = watch.report()
    assert (found.kind, found.row) == ("loss", 2)
    model.zero_grad()
    x = torch.randn(5, 4)
    x[3, 1] = torch.nan
    penalty(model, x=x)[0].backward()
    found = watch.report()
    assert (found.kind, found.row) == ("batch", 3)


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    hidden: tuple


WRAPS = {
    "tuple": (lambda y, hidden: (y, hidden), lambda output: output),
    "dict": (lambda y, hidden: {"y": y, "h": hidden}, lambda output: output.values()),
    "dataclass": (Output, lambda output: vars(output).values()),
    # Of an unknown class, which has the second state alone.
    "object": (
        lambda y, hidden: SimpleNamespace(y=y, h=hidden[1]),
        lambda output: (output.y, (None, output.h)),
    ),
}


@FIRST_AND_LATER
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("part", [0.0, 1.0, torch.inf])
def test_hidden_states(wrap, part, mode):
    """A model that returns what its layers gave, as Hugging Face's do; the loss may take it."""
    wrap, unwrap = WRAPS[wrap]

    def code(own, x):
        h1 = own.a(x)
        h2 = own.b(h1)
        h3 = own.place(h2)
        return wrap(own.c(h3), (h1, h2, h3))

    place = Module(lambda x: x * 1.0)
    model = Net(code, a=nn.Linear(4, 8), b=nn.Linear(8, 8), place=place, c=nn.Linear(8, 1))
    x = data()[0]
    watch = watching(model, mode)
    y, _ = unwrap(model(x))
    y.sum().backward()
    assert watch.report() is None
    model.zero_grad()
    if part < torch.inf:
        model.place.function = with_root
    y, hidden = unwrap(model(x))
    (y.sum() + part * hidden[1].square().mean()).backward()
    assert culprit(watch) == (("loss", "") if part == torch.inf else ("gradient", "place"))


def test_second_backward_pass_of_one_forward_pass():
    model = nn.Sequential(nn.Linear(4, 4), Module(lambda x: x), nn.Linear(4, 2))
    watch, (x, _) = watching(model), data()
    for function, loss, expected in (
        (lambda x: x, lambda y: y.square().sum(), None),
        (lambda x: torch.cat([x[..., :2], root_of_zero(x[..., 2:])], -1), lambda y: y.sum(),
         ("gradient", "1")),
        (lambda x: x, lambda y: root_of_zero(y).sum(), ("loss", "")),
    ):  # fmt: skip
        model.zero_grad()
        model[1].function = function
        y = model(x)
        (y[..., 0] * 0).sum().backward(retain_graph=True)
        model.zero_grad()
        loss(y).backward()
        assert culprit(watch) == expected


def contrast(a, b):
    return F.cross_entropy(F.normalize(a) @ F.normalize(b).T, torch.arange(len(a)))


FUNCTIONS = {"output": lambda x: x / 0, "gradient": with_root}


@pytest.mark.parametrize("healthy", [0, 2])
@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("loss", [contrast, F.l1_loss])
def test_model_that_is_called_twice_before_one_backward_pass(loss, call, healthy):
    """What either call saw in its forward pass comes first; a mask that did no harm does not."""
    torch.manual_seed(0)
    mask = torch.tensor([0, 0, -torch.inf, 0])
    masked = nn.Sequential(Module(lambda x: x + mask), nn.Softmax(-1))
    inner = nn.Sequential(nn.Linear(3, 4), masked, Module(lambda x: x), nn.Linear(4, 3))
    model = Net(lambda own, x: own.inner(x * 1.0), inner=inner)  # no module takes the batch
    for fault in ("batch", "output", "gradient", "loss"):
        watch = watching(model)
        for step in range(healthy + 1):
            outputs, broken = [], step == healthy
            for i in range(2):
                x, here = torch.randn(6, 3), broken and i == call
                x[2] = torch.nan if here and fault == "batch" else x[2]
                inner[2].function = FUNCTIONS.get(fault if here else "", lambda x: x)
                outputs.append(model(x))
            model.zero_grad()
            (loss(*outputs) * (torch.nan if broken and fault == "loss" else 1)).backward()
        found = watch.report()
        assert (found.kind, found.name) == (fault, "inner.2" if fault in FUNCTIONS else "")
        assert fault == "loss" or found.batch == 2 * healthy + call
        assert fault != "batch" or found.row == 2
        watch.close()


@pytest.mark.parametrize("healthy", [0, 2])
@pytest.mark.parametrize("how", ["code", "layer", "object", "loss"])
def test_loss_on_what_the_model_keeps(how, healthy):
    """What its code made, a layer's output, or a loss. No module is blamed for a gradient there."""

    def code(own, x):
        h = own.a(x)
        p = torch.softmax(h, -1)
        own.kept = (h if how == "layer" else p).square().sum(1)
        if how == "loss":
            own.kept = (own.kept * own.scale).sqrt()
        y = own.c(own.b(p * 2).tanh())
        return SimpleNamespace(y=y, kept=[p]) if how == "object" else y

    torch.manual_seed(0)
    model = Net(code, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 1))
    watch = watching(model)
    for step in range(healthy + 1):
        assert watch.report() is None
        model.scale = torch.ones(5).index_fill(0, torch.tensor([2]), float(step < healthy))
        model.zero_grad()
        output = model(torch.randn(5, 4))
        kept = model.kept if how == "loss" else (model.kept * model.scale).sqrt()
        (getattr(output, "y", output).sum() + kept.sum()).backward()
    found = watch.report()
    assert (found.kind, found.name, found.row) == ("unknown", "", 2)


def test_forward_pass_that_takes_derivatives_of_a_part_of_itself():
    def code(own, x):
        slope = vmap(grad(lambda one: own.inner(one).sum()))(x)
        return own.outer(x) + slope.sum(1, keepdim=True)

    model, x = Net(code, inner=critic(), outer=nn.Linear(4, 1)), torch.randn(5, 4)
    watch = watching(model)
    for row in (None, 2):
        if row is not None:
            x[row, 1] = torch.nan
        F.l1_loss(model(x), torch.zeros(5, 1)).backward()
        found = watch.report()
        assert (found and found.row) == row


TRACES = {
    "is_grads_batched": lambda model, x: torch.autograd.grad(
        model(x), x, torch.eye(5)[:, :, None], is_grads_batched=True
    ),
    "jit": torch.jit.trace,
    "fx": lambda model, x: make_fx(lambda x: model(x))(x.detach()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", TRACES)
def test_batched_backward_passes_and_traces(trace):
    model, x = critic(), torch.randn(5, 4, requires_grad=True)
    watch = watching(model)
    TRACES[trace](model, x)
    model(x).sum().backward()
    assert watch.report() is None
