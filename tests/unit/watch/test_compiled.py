"""Compiled code is one module: the whole model, a block, and both compiled in place."""

import copy

import pytest
import torch

from steadygrad.watch import GradientWatch
from tests.unit.watch.nets import FAULTS, data, make, mse

# Remarks of the compiler on its own code.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

CHOSEN = [
    "overflow in the forward pass",
    "overflow in backward only",
    "square root of zero",
    "log of zero in the loss",
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


COMPILED = {
    "whole": lambda model: torch.compile(model, backend="aot_eager"),
    "blocks": blocks,
    "in place": in_place,
    "whole in place": whole_in_place,
}
# Of the faulty block, from outside.
NAMES = {"whole": "", "blocks": "blocks.1", "in place": "blocks.1", "whole in place": ""}


@pytest.fixture(autouse=True)
def _reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("fault", CHOSEN)
def test_culprit(fault, compiled):
    put, loss, kind, name = FAULTS[fault]
    model, prefix = make("residual")
    put(model, prefix)
    model = COMPILED[compiled](model)
    watch, (x, y) = GradientWatch(model), data()
    for batch in range(2):
        loss(model(x), y).backward()
        found = watch.report()
        # What is before the one module there is has no gradient.
        kind = "unknown" if kind == "gradient" and not NAMES[compiled] else kind
        assert (found.kind, found.name, found.batch) == (kind, name and NAMES[compiled], batch)
        model.zero_grad()


@pytest.mark.parametrize("compiled", COMPILED)
def test_all_is_well(compiled):
    model, _ = make("residual")
    plain, _ = make("residual")
    model = COMPILED[compiled](model)
    watch, (x, y) = GradientWatch(model), data()
    for _ in range(3):
        mse(model(x), y).backward()
        mse(plain(x), y).backward()
        assert watch.report() is None
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert watch.batches == 3


def test_closed_watch_leaves_nothing_on_what_was_compiled_in_place():
    model, _ = make("residual")
    in_place(model)
    before = [block._compiled_call_impl for block in model.blocks]
    with GradientWatch(model):
        assert model.blocks[1]._compiled_call_impl is not before[1]
        copy.deepcopy(model)
    assert [block._compiled_call_impl for block in model.blocks] == before


@pytest.mark.parametrize("compiled", COMPILED)
def test_watch_of_code_that_has_run(compiled):
    """Attached when the first NaN came."""
    put, loss, kind, _ = FAULTS["overflow by large weights"]
    plain, prefix = make("residual")
    model, (x, y) = COMPILED[compiled](plain), data()
    for _ in range(2):
        mse(model(x), y).backward()
        model.zero_grad()
    watch = GradientWatch(model)
    put(plain, prefix)
    loss(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name) == (kind, NAMES[compiled])
