"""Compiled code is one module: the whole model, a block, and both compiled in place."""

import copy

import pytest
import torch

from steadygrad.watch import GradientWatch
from tests.unit.watch.nets import FAULTS, culprit, data, make, mse

# Remarks of the compiler on its own code.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def blocks(model):
    for name, block in model.blocks.named_children():
        setattr(model.blocks, name, torch.compile(block, backend="aot_eager"))
    return model


def in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def whole_in_place(model):
    model.compile(backend="aot_eager")
    return model


# How the model is compiled, and the name of the faulty block, from outside.
COMPILED = {
    "whole": (lambda model: torch.compile(model, backend="aot_eager"), ""),
    "blocks": (blocks, "blocks.1"),
    "in place": (in_place, "blocks.1"),
    "whole in place": (whole_in_place, ""),
}


@pytest.fixture(autouse=True)
def _reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(
    "fault",
    [
        "overflow in the forward pass",
        "overflow in backward only",
        "square root of zero",
        "log of zero in the loss",
    ],
)
def test_culprit(fault, compiled):
    put, loss, kind, name = FAULTS[fault]
    compile_it, outside = COMPILED[compiled]
    model, prefix = make("residual")
    put(model, prefix)
    model = compile_it(model)
    watch, (x, y) = GradientWatch(model), data()
    # What is before the one module there is has no gradient.
    kind = "unknown" if kind == "gradient" and not outside else kind
    for batch in range(2):
        loss(model(x), y).backward()
        found = watch.report()
        assert (found.kind, found.name, found.batch) == (kind, name and outside, batch)
        model.zero_grad()


@pytest.mark.parametrize("compiled", COMPILED)
def test_all_is_well_and_a_watch_of_code_that_has_run(compiled):
    """The latter as attached when the first NaN came."""
    compile_it, outside = COMPILED[compiled]
    inner, prefix = make("residual")
    plain, _ = make("residual")
    model = compile_it(inner)
    watch, (x, y) = GradientWatch(model), data()
    for _ in range(3):
        mse(model(x), y).backward()
        mse(plain(x), y).backward()
        assert watch.report() is None
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert watch.batches == 3
    watch.close()
    put, loss, kind, _ = FAULTS["overflow by large weights"]
    model.zero_grad()
    watch = GradientWatch(model)
    put(inner, prefix)
    loss(model(x), y).backward()
    assert culprit(watch) == (kind, outside)


def test_closed_watch_leaves_nothing_on_what_was_compiled_in_place():
    model, _ = make("residual")
    in_place(model)
    before = [block._compiled_call_impl for block in model.blocks]
    with GradientWatch(model):
        assert model.blocks[1]._compiled_call_impl is not before[1]
        copy.deepcopy(model)
    assert [block._compiled_call_impl for block in model.blocks] == before
