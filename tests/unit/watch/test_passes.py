"""Passes of unusual form: code between modules, checkpointing, ties, odd outputs and types."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.nets import Net
from tests.unit.watch.nets import (
    FAULTS,
    Backward,
    Block,
    Module,
    Stack,
    culprit,
    data,
    make,
    mse,
    root_of_zero,
    step,
    watching,
    with_root,
)


def linear(**fills):
    """A layer of four features, with parameters of one value."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        for name, value in fills.items():
            layer.get_parameter(name).fill_(value)
    return layer


def between(code, second=linear):
    """A model whose second module calls two modules, with code of its own."""
    return nn.Sequential(linear(), Net(code, first=linear(), second=second()), linear())


def spoiled(own, x):
    """In place, one row of what the first module gives to the second one."""
    h = own.first(x)
    h[1:2] /= 0
    return own.second(h)


def sum_that_overflows():
    """Neither of its terms does."""
    terms = {"first": linear(bias=2e38), "second": linear(bias=2e38)}
    inner = Net(lambda own, x: own.first(x) + own.second(x), **terms)
    return nn.Sequential(linear(), inner, linear())


def sum_in_place():
    """It hides what the layer before gave, which is looked at before that."""

    def code(own, x):
        y = own.first(x)
        y += x
        return own.second(y)

    model = between(code)
    model[1].first = linear(bias=3e38, weight=3e38)
    return model


def branches_that_take_turns():
    """The one whose own consumer broke is blamed, and not what ran next."""
    return Net(
        lambda own, x: (lambda a, b: own.after_a(a) + own.after_b(b))(own.a(x), own.b(x)),
        a=linear(),
        b=linear(),
        after_a=Module(Backward.apply),
        after_b=nn.Tanh(),
    )


def branches_of_which_none_is_known():
    parts = {"q": linear(), "k": Module(with_root), "v": linear()}
    inner = Net(lambda own, x: own.q(x) + own.k(x) + own.v(x), **parts)
    return nn.Sequential(linear(), inner, linear())


# The kind and the name, and where it was seen and what was finite before it, unless that is plain.
BLAMED = {
    sum_that_overflows: ("output", "1", "the output of '1'", "the output of '1.second'"),
    sum_in_place: ("output", "1.first"),
    branches_that_take_turns: ("gradient", "after_a", "the gradient at the output of 'a'"),
    branches_of_which_none_is_known: ("gradient", "1"),
    # Neither the layer before nor the one after: the module around both is named.
    lambda: between(lambda own, x: own.second(root_of_zero(own.first(x)))): (
        "gradient", "1", "the gradient at the output of '1.first'",
        "the gradient at the input of '1.second'"),
    lambda: nn.Sequential(linear(), Module(lambda x: x.mul_(1e30).mul_(1e30)), linear()): (
        "output", "1", "the output of '1'", "the output of '0'"),
    # The next module is not blamed for its input.
    lambda: between(spoiled): (
        "output", "1", "the input of '1.second'", "the output of '1.first'"),
    lambda: between(spoiled, lambda: nn.Sequential(linear(), linear())): (
        "output", "1", "the input of '1.second'", "the output of '1.first'"),
    # What a module makes of the batch in place is no fault of the batch.
    lambda: nn.Sequential(Module(lambda x: x.div_(0)), linear()): ("output", "0"),
    # The weight of the last module, whose output is the model's.
    lambda: nn.Sequential(linear(), linear(weight=torch.nan)): ("weight", "1.weight"),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["later", "device"])
@pytest.mark.parametrize("build", BLAMED, ids=lambda build: build.__name__)
def test_culprit(build, mode):
    torch.manual_seed(0)
    model, expected = build(), BLAMED[build]
    watch, (x, y) = watching(model, mode), data()
    first = watch.batches
    for batch in range(2):
        mse(model(x.clone()), y).backward()
        found = watch.report()
        told = (found.kind, found.name, found.seen_in, found.finite_before)
        assert (told[: len(expected)], found.batch) == (expected, first + batch)
        model.zero_grad()


def test_missing_values_are_not_blamed():
    """A table whose missing values are NaN, which the model replaces."""
    parts = {"first": linear(), "place": Module(with_root), "last": linear()}
    model = Net(lambda own, x: own.last(own.place(own.first(x.nan_to_num()))), **parts)
    watch, (x, y) = watching(model), data()
    x[0, 0, 0] = torch.nan
    mse(model(x), y).backward()
    assert culprit(watch) == ("gradient", "place")


def test_gradient_of_a_weight_alone():
    """In float16 a weight's gradient adds up over the batch what is finite at the output."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False)).half()
    watch = watching(model)
    with torch.no_grad():
        model[0].weight.fill_(8.0)
        model[1].weight.fill_(1e-3)
    (model(torch.ones(2000, 4, dtype=torch.float16)) * 10.0).sum().backward()
    assert culprit(watch) == ("parameter", "1.weight")


def test_tied_weight_is_blamed_where_its_second_module_uses_it():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    model[2].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[8] = torch.nan
    watch = watching(model)
    model(torch.randint(0, 8, (4, 5))).abs().mean().backward()
    found = watch.report()
    assert (found.kind, found.name, found.seen_in) == ("weight", "2.weight", "the output of '2'")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fault", ["overflow in the forward pass", "square root of zero"])
def test_checkpointed(fault, reentrant):
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    put, loss, kind, name = FAULTS[fault]
    torch.manual_seed(0)
    model = Stack(Checkpointed)
    with watching(model) as watch:
        step(model)
        assert watch.report() is None
    put(model, "blocks.1.")
    watch = watching(model)
    step(model, loss)
    # Reentrant checkpointing has no graph of what it repeats while it repeats it.
    coarse = reentrant and kind == "gradient"
    assert culprit(watch) == (kind, "blocks.1" if coarse else name.format("blocks.1."))


@pytest.mark.parametrize("mode", ["first", "device"])
def test_inputs_of_minus_infinity_are_masks(mode):
    model = Net(lambda own, x, mask: torch.softmax(own.layer(x) + mask, -1), layer=linear())
    watch, (x, y) = watching(model, mode), data()
    mask = torch.tensor([-torch.inf, 0, 0, 0])
    (mse(model(x, mask), y) * torch.inf).backward()
    assert watch.report().kind == "loss"
    model.zero_grad()
    mse(model(x, mask * torch.nan), y).backward()
    assert watch.report().kind == "batch"


def test_large_values_that_overflow_a_sum_are_finite():
    """Sums of float32 overflow here, and the squares of the gradients do; the values do not."""
    model = nn.Linear(4, 4)
    watch = watching(model)
    (model(torch.full((8, 4), 1e37)) * 0.1).sum().backward()
    assert watch.report() is None


@pytest.mark.parametrize("mode", ["first", "device"])
def test_empty_weights_and_other_types(mode):
    """Empty and quantized weights, float8 inputs, complex weights: none ends the training."""

    def code(own, x):
        x = x.float() * own.packed * own.small.float()
        return (x * own.wave).real.sum() + own.empty.sum()

    model = Net(code)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.wave = nn.Parameter(torch.full((4,), 3 + 4j))
    model.packed = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    model.small = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    watch, x = watching(model, mode), data()[0].to(torch.float8_e4m3fn)
    model(x).backward()
    assert watch.report() is None
    # Without a gradient there is no norm.
    norms = {"empty": 0.0, "wave": model.wave.grad.abs().square().sum().sqrt().item()}
    assert watch.norms() == pytest.approx(norms)
    (model(x) * torch.inf).backward()
    assert watch.report().kind == "loss"


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))
    watch, tokens = watching(model), torch.tensor([1, 1, 3])
    model(tokens).sum().backward()
    assert watch.report() is None
    dense = model[0].weight.grad.to_dense().norm().item()
    assert watch.norms()["0.weight"] == pytest.approx(dense, rel=1e-6)
    (model(tokens) * torch.inf).sum().backward()
    assert (watch.report().kind, watch.batches) == ("loss", 2)


# Compiled code is one module


def compiled_blocks(model):
    for name, block in model.blocks.named_children():
        setattr(model.blocks, name, torch.compile(block, backend="aot_eager"))
    return model


def compiled_in_place(*modules):
    for module in modules:
        module.compile(backend="aot_eager")


# How the model is compiled, and the name of the faulty block, from outside.
COMPILED = {
    "whole": (lambda model: torch.compile(model, backend="aot_eager"), ""),
    "whole in place": (lambda model: compiled_in_place(model) or model, ""),
    "blocks": (compiled_blocks, "blocks.1"),
    "blocks in place": (lambda model: compiled_in_place(*model.blocks) or model, "blocks.1"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("fault", ["overflow by large weights", "square root of zero"])
def test_compiled(fault, compiled):
    """A fault from the beginning, seen twice, and one that came after the code had run."""
    torch.compiler.reset()
    compile_it, outside = COMPILED[compiled]
    put, loss, kind, _ = FAULTS[fault]
    inner, prefix = make("residual")
    if kind == "gradient":
        put(inner, prefix)
        # What is before the one module there is has no gradient.
        kind = kind if outside else "unknown"
    model = compile_it(inner)
    if kind == "output":
        step(model)
        plain, _ = make("residual")
        step(plain)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        put(inner, prefix)
    watch = watching(model)
    for batch in range(2):
        model.zero_grad()
        step(model, loss)
        found = watch.report()
        assert (found.kind, found.name, found.batch) == (kind, outside, batch)
