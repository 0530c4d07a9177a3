"""Losses of gradients, hidden states, several backward passes; models that change."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune

from steadygrad.watch import GradientWatch
from tests.unit.watch.nets import Module, data, mse
from tests.unit.watch.test_forward_first import culprit

FIRST_AND_LATER = pytest.mark.parametrize("passes", [0, 1], ids=["first", "later"])


def root_of_zero(x):
    return (x * 0).abs().sqrt()


def critic(place=nn.Softplus):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), place(), nn.Linear(8, 1))


def penalty(model, of=lambda g: (g.square().sum(1).sqrt() - 1).square().mean(), x=None):
    """A function of the gradient at the inputs, which is kept in the graph."""
    x = (torch.randn(5, 4) if x is None else x).requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return of(gradient), y


@FIRST_AND_LATER
@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("curvature", [False, True])
def test_loss_that_contains_gradients(curvature, others, passes):
    """A gradient penalty and a differential equation: their faults enter at inner activations."""

    def second(gradient, x):
        return torch.autograd.grad(gradient.sum(), x, create_graph=True)[0]

    model, x = critic(), torch.randn(5, 4)
    of = (lambda g: root_of_zero(second(g, x)).sum()) if curvature else None
    of = of or (lambda g: root_of_zero(g).sum())
    watch = GradientWatch(model)
    watch.batches = passes
    healthy, _ = penalty(model)
    healthy.backward()
    assert watch.report() is None
    model.zero_grad()
    total = sum(model(torch.randn(5, 4)).mean() for _ in range(others))
    (total + penalty(model, of, x)[0]).backward()
    assert culprit(watch) == ("loss", "")


@FIRST_AND_LATER
def test_loss_that_contains_gradients_of_other_culprits(passes):
    model = critic()
    watch = GradientWatch(model)
    watch.batches = passes
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
    model.zero_grad()
    watch.close()
    model[3] = Module(lambda x: x + root_of_zero(x))
    watch = GradientWatch(model)
    penalty(model)[0].backward()
    assert culprit(watch) == ("gradient", "3")


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    hidden: tuple


class Hidden(nn.Module):
    """A model that returns what its layers gave, as Hugging Face's do."""

    def __init__(self, place, wrap):
        super().__init__()
        self.a, self.b, self.place, self.c = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            place,
            nn.Linear(8, 1),
        )
        self.wrap = wrap

    def forward(self, x):
        h1 = self.a(x)
        h2 = self.b(h1)
        h3 = self.place(h2)
        return self.wrap(self.c(h3), (h1, h2, h3))


def parts(output):
    output = vars(output) if isinstance(output, Output) else output
    return tuple(output.values()) if isinstance(output, dict) else output


WRAPS = {
    "tuple": lambda y, hidden: (y, hidden),
    "dict": lambda y, hidden: {"y": y, "hidden": hidden},
    "dataclass": Output,
}


@FIRST_AND_LATER
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("part", [0.0, 1.0, torch.inf])
def test_hidden_states(wrap, part, passes):
    """The loss may take them as well, and be at fault itself."""
    place = nn.Tanh() if part == torch.inf else Module(lambda x: root_of_zero(x) + x)
    model = Hidden(place, WRAPS[wrap])
    plain = parts(model(data()[0]))
    watch = GradientWatch(model)
    watch.batches = passes
    y, hidden = parts(model(data()[0]))
    assert torch.equal(y, plain[0])
    assert all(map(torch.equal, hidden, plain[1]))
    (y.sum() + part * hidden[1].square().mean()).backward()
    assert culprit(watch) == (("loss", "") if part == torch.inf else ("gradient", "place"))


def test_returned_tensors_are_those_of_the_model():
    """Gradients with respect to a hidden state, and one that is returned in an unknown object."""

    class Odd:
        def __init__(self, y, hidden):
            self.y, self.h = y, hidden[1]

    model = Hidden(nn.Tanh(), Odd)
    watch = GradientWatch(model)
    output = model(data()[0])
    (gradient,) = torch.autograd.grad(output.y.sum(), output.h, retain_graph=True)
    assert gradient.abs().sum() > 0
    output.y.sum().backward()
    assert watch.report() is None
    model.place = Module(lambda x: root_of_zero(x) + x)
    watch.close()
    watch = GradientWatch(model)
    model(data()[0]).y.sum().backward()
    assert culprit(watch) == ("gradient", "place")


def test_one_of_two_heads():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.p, self.q = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.p(h), self.q(h)

    for bad in (0, 1):
        model = Heads()
        watch = GradientWatch(model)
        heads = model(data()[0])
        (root_of_zero(heads[bad]).sum() + heads[1 - bad].sum()).backward()
        assert culprit(watch) == ("loss", "")


def test_branches_of_which_none_is_known_to_be_at_fault():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
            self.k = Module(lambda x: root_of_zero(x) + x)

        def forward(self, x):
            return self.q(x) + self.k(x) + self.v(x)

    model = nn.Sequential(nn.Linear(4, 4), Attention(), nn.Linear(4, 1))
    watch = GradientWatch(model)
    model(data()[0]).sum().backward()
    assert culprit(watch) == ("gradient", "1")


def test_second_backward_pass_of_one_forward_pass():
    model = nn.Sequential(nn.Linear(4, 4), Module(lambda x: x), nn.Linear(4, 2))
    watch, (x, _) = GradientWatch(model), data()
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


CHANGES = {
    "no bias": lambda m: setattr(m[0], "bias", None),
    "pruned": lambda m: prune.l1_unstructured(m[0], "bias", amount=0.5),
    "weight norm": lambda m: parametrizations.weight_norm(m[0], "weight"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_model_that_changes_trains_on(change):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8, bias=change != "weight norm"), Module(lambda x: x), nn.Linear(8, 1)
    )
    watch, (x, _) = GradientWatch(model), data()
    model(x).sum().backward()
    CHANGES[change](model)
    model(x).sum().backward()
    assert watch.report() is None
    model.zero_grad()
    model[1].function = lambda x: root_of_zero(x) + x
    model(x).sum().backward()
    assert culprit(watch) == ("gradient", "1")


def contrast(a, b):
    return F.cross_entropy(F.normalize(a) @ F.normalize(b).T, torch.arange(len(a)))


@pytest.mark.parametrize("healthy", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("loss", [contrast, F.mse_loss, F.l1_loss])
def test_model_that_is_called_twice_before_one_backward_pass(loss, call, masked, healthy):
    """What either call saw in its forward pass comes first; a mask that did no harm does not."""
    torch.manual_seed(0)
    mask = torch.tensor([0, 0, -torch.inf, 0])
    place = nn.Sequential(Module(lambda x: x + mask), nn.Softmax(-1)) if masked else nn.Tanh()
    inner = nn.Sequential(nn.Linear(3, 4), place, Module(lambda x: x), nn.Linear(4, 3))
    model = Module(lambda x: inner(x * 1.0))  # no module takes the batch itself
    model.inner = inner
    for fault in ("batch", "output", "gradient", "loss"):
        watch = GradientWatch(model)
        for step in range(healthy + 1):
            outputs, broken = [], step == healthy
            for i in range(2):
                x, here = torch.randn(6, 3), broken and i == call
                x[2] = torch.nan if here and fault == "batch" else x[2]
                bad = {"output": lambda x: x / 0, "gradient": lambda x: x + root_of_zero(x)}
                inner[2].function = bad.get(fault if here else "", lambda x: x)
                outputs.append(model(x))
            model.zero_grad()
            (loss(*outputs) * (torch.nan if broken and fault == "loss" else 1)).backward()
        found = watch.report()
        name = "inner.2" if fault in ("output", "gradient") else ""
        assert (found.kind, found.name) == (fault, name)
        assert fault == "loss" or found.batch == 2 * healthy + call
        assert fault != "batch" or found.row == 2
        watch.close()


class Keeps(nn.Module):
    """Keeps a tensor: what its code made, a layer's output, or in an object that is not known."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.how, self.scale = how, torch.ones(5)

    def forward(self, x):
        h = self.a(x)
        p = torch.softmax(h, -1)
        self.kept = {"code": p, "layer": h, "aux": (p.sum(1) * self.scale).sqrt()}.get(self.how, p)
        y = self.c(self.b(p * 2).tanh())
        return y if self.how != "object" else SimpleNamespace(y=y, kept=[p])


@pytest.mark.parametrize("healthy", [0, 2])
@pytest.mark.parametrize("how", ["code", "layer", "object", "aux"])
def test_loss_on_what_the_model_keeps(how, healthy):
    """No module is blamed for a gradient that came in there."""
    torch.manual_seed(0)
    model = Keeps(how)
    watch = GradientWatch(model)
    for step in range(healthy + 1):
        assert watch.report() is None
        zero = torch.ones(5).index_fill(0, torch.tensor([2]), float(step < healthy))
        model.scale, scale = (zero, 1) if how == "aux" else (model.scale, zero)
        model.zero_grad()
        output = model(torch.randn(5, 4))
        kept = model.kept if how == "aux" else (model.kept.square().sum(1) * scale).sqrt()
        (getattr(output, "y", output).sum() + kept.sum()).backward()
    found = watch.report()
    assert (found.kind, found.name, found.row) == ("unknown", "", 2)


class Opaque:
    def __init__(self, y):
        self.inside = [y]


class Box(dict):
    pass


@pytest.mark.parametrize(("wrap", "kind"), [(Opaque, "unknown"), (lambda y: Box(y=y), "loss")])
def test_output_in_an_object_that_is_not_known(wrap, kind):
    """Its passes are seen nevertheless, and a fault is not one that was left from before."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = Module(lambda x: wrap(inner(x)))
    model.inner = inner
    watch, (x, _) = GradientWatch(model), data()
    for factor, expected in ((1, None), (torch.nan, kind), (torch.nan, kind), (1, None)):
        model.zero_grad()
        output = model(x)
        y = output["y"] if isinstance(output, Box) else output.inside[0]
        (y.sum() * factor).backward()
        found = watch.report()
        assert (found and found.kind) == expected


class Derived(nn.Module):
    """Its forward pass takes derivatives of a part of itself, sample by sample."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = critic(), nn.Linear(4, 1)

    def forward(self, x):
        slope = vmap(grad(lambda one: self.inner(one).sum()))(x)
        return self.outer(x) + slope.sum(1, keepdim=True)


def test_function_transforms():
    model, x = critic(), torch.randn(5, 4)
    parameters = dict(model.named_parameters())
    one = vmap(grad(lambda p, x: functional_call(model, p, (x[None],)).sum()), (None, 0))
    plain = one(parameters, x)
    watch = GradientWatch(model)
    watched = one(parameters, x)
    assert all(torch.equal(watched[name], plain[name]) for name in plain)
    assert jacrev(model)(x[0]).shape == (1, 4)
    assert (watch.batches, watch.report()) == (0, None)
    model = Derived()
    watch = GradientWatch(model)
    F.l1_loss(model(x), torch.zeros(5, 1)).backward()
    assert watch.report() is None
    x[2, 1] = torch.nan
    F.l1_loss(model(x), torch.zeros(5, 1)).backward()
    assert watch.report().row == 2


TRACES = {
    "is_grads_batched": lambda model, x: torch.autograd.grad(
        model(x), x, torch.eye(5)[:, :, None], is_grads_batched=True
    ),
    "vectorized": lambda model, x: torch.autograd.functional.jacobian(model, x, vectorize=True),
    "jit": torch.jit.trace,
    "fx": lambda model, x: make_fx(lambda x: model(x))(x.detach()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", TRACES)
def test_batched_backward_passes_and_traces(trace):
    model, x = critic(), torch.randn(5, 4, requires_grad=True)
    watch = GradientWatch(model)
    TRACES[trace](model, x)
    model(x).sum().backward()
    assert watch.report() is None


def test_tensors_without_values():
    model = critic()
    watch = GradientWatch(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(3, 4)).sum().backward()
    assert (watch.batches, watch.report()) == (0, None)
    model = critic().to("meta")
    watch = GradientWatch(model)
    model(torch.randn(3, 4, device="meta")).sum().backward()
    assert watch.report() is None


def test_script_modules_are_refused():
    with pytest.raises(ValueError, match="ScriptModule at '1'"):
        GradientWatch(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))))
