"""Passes of unusual form: code between modules, checkpointing, ties, accumulation."""

import dataclasses
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad.watch import GradientWatch, gradient_watch
from tests.unit.watch.nets import FAULTS, Backward, Block, Module, Stack, data, make, mse
from tests.unit.watch.test_faults import step


class Two(nn.Module):
    """Two layers, and code of its own."""

    def __init__(self, code):
        super().__init__()
        self.first, self.second, self.code = nn.Linear(4, 4), nn.Linear(4, 4), code

    def forward(self, x):
        return self.code(self, x)


def test_code_between_submodules():
    """The sum overflows: neither of its terms does."""
    inner = Two(lambda own, x: own.first(x) + own.second(x))
    model = nn.Sequential(OrderedDict(inner=inner, act=nn.Tanh(), head=nn.Linear(4, 4)))
    with torch.no_grad():
        inner.first.bias.fill_(2e38)
        inner.second.bias.fill_(2e38)
    watch, (x, y) = GradientWatch(model), data()
    (mse(model(x), y) * torch.inf).backward()
    found = watch.report()
    assert (found.kind, found.name) == ("output", "inner")
    assert found.finite_before == "the output of 'inner.second'"


def test_code_before_a_submodule():
    """A fault of `forward` before its first submodule is not that submodule's."""
    model = Two(lambda own, x: own.second(own.first(x) * 1e30 * 1e30))
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name) == ("output", "")
    assert found.seen_in == "the input of 'second'"
    assert found.finite_before == "the output of 'first'"


def test_gradient_of_a_weight_alone():
    """In float16 a weight's gradient adds up over the batch what is finite at the output."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False)).half()
    watch = GradientWatch(model)
    x = torch.full((2000, 4), 1.0, dtype=torch.float16)
    with torch.no_grad():
        model[0].weight.fill_(8.0)
        model[1].weight.fill_(1e-3)
    (model(x) * 10.0).sum().backward()
    found = watch.report()
    assert (found.kind, found.name) == ("parameter", "1.weight")


def test_submodule_whose_weights_are_used_without_a_call():
    """torch's attention never calls its `out_proj`, which has a gradient all the same."""

    class Attended(Two):
        def __init__(self):
            super().__init__(None)
            self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

        def forward(self, x):
            x = self.first(x)
            return self.second(self.attention(x, x, x)[0])

    model = Attended()
    model.second = nn.Sequential(Module(Backward.apply), model.second)
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name) == ("gradient", "second.0")
    assert found.seen_in == "the gradient at the output of 'attention'"


def test_module_that_changes_its_input_in_place():
    model = nn.Sequential(
        nn.Linear(4, 4), Module(lambda x: x.mul_(1e30).mul_(1e30)), nn.Linear(4, 4)
    )
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name, found.finite_before) == ("output", "1", "the output of '0'")


def test_tied_weights():
    """The gradient of a weight with two uses does not say at which of them it broke."""
    model = nn.Sequential(nn.Linear(4, 4), Module(Backward.apply), nn.Linear(4, 4), nn.Tanh())
    model[2].weight = model[0].weight
    model[2].bias = model[0].bias
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name) == ("gradient", "1")
    assert found.finite_before == "the gradient at the output of '1'"


def test_branches_that_take_turns():
    """Of two branches the one whose own consumer broke is blamed, and not what ran next."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.after_a, self.after_b = Module(Backward.apply), nn.Tanh()

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            return self.after_a(a) + self.after_b(b)

    model = Branches()
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name) == ("gradient", "after_a")
    assert found.seen_in == "the gradient at the output of 'a'"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fault", ["overflow in the forward pass", "square root of zero"])
def test_checkpointed(fault, reentrant):
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    put, loss, kind, name = FAULTS[fault]
    torch.manual_seed(0)
    model = Stack(Checkpointed)
    watch = GradientWatch(model)
    step(model)
    assert watch.report() is None
    watch.close()
    put(model, "blocks.1.")
    watch = GradientWatch(model)
    step(model, loss)
    found = watch.report()
    # Reentrant checkpointing has no graph of what it repeats while it repeats it.
    coarse = reentrant and kind == "gradient"
    assert (found.kind, found.name) == (kind, "blocks.1" if coarse else name.format("blocks.1."))


@pytest.mark.parametrize("deferred", [False, True])
def test_minus_infinity_that_is_usual_is_not_blamed(deferred):
    """A module that masks with minus infinity is no fault; the one that breaks later is."""
    model, _ = make("residual")
    model.blocks[1].place = nn.Sequential(
        Module(lambda x: x.masked_fill(x > x.mean(), -torch.inf)),
        nn.Softmax(-1),
        Module(lambda x: x * torch.tensor(scale)),
    )
    watch, scale = GradientWatch(model), 1.0
    watch.shared.deferred = deferred
    for seed in range(3):
        step(model, seed=seed)
        assert watch.report() is None
    scale = torch.inf
    step(model)
    found = watch.report()
    assert (found.kind, found.name, found.batch) == ("output", "blocks.1.place.2", 3)


def test_what_is_on_a_device_is_not_looked_at_when_a_pass_ends(monkeypatch):
    model, _ = make("residual")
    watch = GradientWatch(model)
    watch.shared.deferred, looks = True, []
    monkeypatch.setattr(gradient_watch, "is_finite", lambda value: looks.append(value) or True)
    for seed in range(3):
        step(model, seed=seed)
    assert looks == []
    assert (watch.report(), watch.batches) == (None, 3)


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))
    watch, tokens = GradientWatch(model), torch.tensor([1, 1, 3])
    model(tokens).sum().backward()
    assert watch.report() is None
    dense = model[0].weight.grad.to_dense().norm().item()
    assert watch.norms()["0.weight"] == pytest.approx(dense, rel=1e-6)
    (model(tokens) * torch.inf).sum().backward()
    assert (watch.report().kind, watch.batches) == ("loss", 2)


def test_norms():
    model, _ = make("residual")
    watch = GradientWatch(model)
    step(model)
    model.head.bias.grad = None
    found = watch.norms()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    # Squares of float32 added up in float64.
    assert found == pytest.approx({n: g.norm().item() for n, g in grads.items()})
    assert "head.bias" not in found


def test_cell_that_is_called_again():
    """A fault in its second call, whose weights' gradient says nothing of which call it was."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.between, self.act = nn.Linear(4, 4), Module(Backward.apply), nn.Tanh()
            self.head = nn.Linear(4, 4)

        def forward(self, x):
            x = self.act(self.cell(x))
            return self.head(self.act(self.cell(self.between(x))))

    model = Recurrent()
    watch, (x, y) = GradientWatch(model), data()
    for batch in range(2):
        mse(model(x), y).backward()
        found = watch.report()
        assert (found.kind, found.name, found.batch) == ("gradient", "between", batch)


def test_functional_code_in_backward():
    """Neither the layer before nor the one after: the module around both is named."""

    class Root(Two):
        def forward(self, x):
            return self.second((self.first(x) * 0).abs().sqrt())

    model = nn.Sequential(nn.Linear(4, 4), Root(None), nn.Linear(4, 4))
    watch, (x, y) = GradientWatch(model), data()
    watch.batches = 1
    for _ in range(2):  # the second time inputs are looked at too
        model.zero_grad()
        mse(model(x), y).backward()
        found = watch.report()
        assert (found.kind, found.name) == ("gradient", "1")
        assert found.seen_in == "the gradient at the output of '1.first'"
    assert found.finite_before == "the gradient at the input of '1.second'"


def test_output_that_is_changed_in_place_later():
    """A sum in place hides what the layer before gave, which is looked at before that."""

    class Adds(Two):
        def forward(self, x):
            y = self.first(x)
            y += x
            return self.second(y)

    model = nn.Sequential(nn.Linear(4, 4), Adds(None), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].first.bias.fill_(3e38)
        model[1].first.weight.fill_(3e38)
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name) == ("output", "1.first")


def test_first_of_the_last_row():
    """A fault that was overcome is forgotten when the next one comes."""
    model, _ = make("residual")
    watch, (x, y) = GradientWatch(model), data()
    for bad in (False, True, False, True, True):
        model.zero_grad()
        mse(model(x * torch.nan if bad else x), y).backward()
    model.zero_grad()
    found = watch.report()
    assert (found.batch, found.last) == (3, 4)
    assert watch.report() is None


def test_overflow_in_half_precision():
    """The usual cause of NaN in float16."""
    model, prefix = make("residual")
    with torch.no_grad():
        model.get_parameter(f"{prefix}outer.weight").fill_(6e4)
    watch, (x, y) = GradientWatch(model), data()
    with torch.autocast("cpu", torch.float16):
        loss = mse(model(x).float(), y)
    loss.backward()
    found = watch.report()
    assert (found.kind, found.name) == ("output", f"{prefix}outer")


def test_large_values_that_overflow_a_sum_are_finite():
    """Sums of float32 overflow here, and the squares of the gradients do; the values do not."""
    model = nn.Linear(4, 4)
    watch = GradientWatch(model)
    x = torch.full((8, 4), 1e37)
    (model(x) * 0.1).sum().backward()
    assert watch.report() is None


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Wrapped(nn.Module):
    """Its output is no tensor."""

    def __init__(self, inner, wrap):
        super().__init__()
        self.inner, self.wrap = inner, wrap

    def forward(self, x):
        return self.wrap(logits=self.inner(x))


@pytest.mark.parametrize("first", [0, 1], ids=["first pass", "later"])
@pytest.mark.parametrize("wrap", [Output, SimpleNamespace], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize(
    "fault",
    ["overflow in the forward pass", "overflow in backward only", "log of zero in the loss"],
)
def test_outputs_in_objects(fault, wrap, first):
    put, loss, kind, name = FAULTS[fault]
    inner, prefix = make("residual")
    put(inner, prefix)
    model = Wrapped(inner, wrap)
    watch, (x, y) = GradientWatch(model), data()
    watch.batches = first
    loss(model(x).logits, y).backward()
    found = watch.report()
    assert (found.kind, found.name) == (kind, name and f"inner.{name.format(prefix)}")


@pytest.mark.parametrize("deferred", [False, True])
def test_inputs_of_minus_infinity_are_masks(deferred):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, mask):
            return torch.softmax(self.layer(x) + mask, -1)

    model = Masked()
    watch, (x, y) = GradientWatch(model), data()
    watch.shared.deferred = deferred
    mask = torch.zeros(4)
    mask[0] = -torch.inf
    (mse(model(x, mask), y) * torch.inf).backward()
    assert watch.report().kind == "loss"
    model.zero_grad()
    mse(model(x, mask * torch.nan), y).backward()
    assert watch.report().kind == "batch"


def test_tied_weight_is_blamed_where_its_second_module_uses_it():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    model[2].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[8] = torch.nan
    watch = GradientWatch(model)
    model(torch.randint(0, 8, (4, 5))).abs().mean().backward()
    found = watch.report()
    assert (found.kind, found.name, found.seen_in) == ("weight", "2.weight", "the output of '2'")


@pytest.mark.parametrize("deferred", [False, True])
def test_weight_of_its_own_module_is_blamed(deferred):
    model, _ = make("residual")
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    watch = GradientWatch(model)
    watch.shared.deferred = deferred
    step(model)
    found = watch.report()
    assert (found.kind, found.name) == ("weight", "head.weight")


@pytest.mark.parametrize("deferred", [False, True])
def test_empty_weights_and_other_types(deferred):
    """Empty and quantized weights, float8 inputs, complex weights: none ends the training."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.wave = nn.Parameter(torch.full((4,), 3 + 4j))
            self.packed = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
            self.small = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x):
            x = x.float() * self.packed * self.small.float()
            return (x * self.wave).real.sum() + self.empty.sum()

    model = Odd()
    watch, (x, _y) = GradientWatch(model), data()
    watch.shared.deferred = deferred
    model(x.to(torch.float8_e4m3fn)).backward()
    assert watch.report() is None
    grad = model.wave.grad
    assert watch.norms()["wave"] == pytest.approx(grad.abs().square().sum() ** 0.5)
    (model(x.to(torch.float8_e4m3fn)) * torch.inf).backward()
    assert watch.report().kind == "loss"
