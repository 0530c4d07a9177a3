"""Sixteen faults and more in three nets: the first culprit is named right, whatever comes after."""

import copy

import pytest
import torch

from steadygrad.watch import GradientWatch
from tests.reference.watch import Trace
from tests.unit.watch.nets import FAULTS, NETS, data, make, mse


def step(model, loss=mse, seed=0):
    x, y = data(seed)
    loss(model(x), y).backward()


MODES = {"first": (0, False), "later": (1, False), "as on a device": (0, True)}


def watching(model, mode):
    """A watch in its first pass, in a later one, or as on a device that it must not wait for."""
    watch = GradientWatch(model)
    watch.batches, watch.shared.deferred = MODES[mode]
    return watch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_culprit(net, fault, mode):
    put, loss, kind, name = FAULTS[fault]
    model, prefix = make(net)
    with watching(model, mode) as watch:
        step(model)
        assert watch.report() is None
    model.zero_grad()
    put(model, prefix)
    watch = watching(model, mode)  # a module that was put in later is not watched
    batch = watch.batches
    step(model, loss)
    found = watch.report()
    assert (found.kind, found.name, found.batch) == (kind, name.format(prefix), batch)
    assert found.finite_before
    # Once told, it is forgotten; weights of this batch still have their gradients.
    model.zero_grad()
    assert watch.report() is None


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_first_tensor_is_that_of_a_recorded_trace(net, fault):
    put, loss, kind, _ = FAULTS[fault]
    model, prefix = make(net)
    put(model, prefix)
    twin = copy.deepcopy(model)
    trace, watch = Trace(twin), GradientWatch(model)
    step(twin, loss)
    step(model, loss)
    found, (what, name) = watch.report(), trace.first()
    # A weight is there before the output that shows it.
    if kind != "weight":
        # The last module's output is the model's.
        where = "the model" if kind == "loss" and name == "head" else repr(name)
        assert found.seen_in == f"the {what} of {where}"


@pytest.mark.parametrize("net", NETS)
def test_batch_that_is_not_finite(net):
    model, _ = make(net)
    watch = GradientWatch(model)
    for batch in range(4):  # accumulated, without zero_grad
        x, y = data(batch)
        if batch == 2:
            x[0, 1, 2] = torch.nan
        mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.batch) == ("batch", 2)


@pytest.mark.parametrize("net", NETS)
def test_label_that_is_not_finite(net):
    model, _ = make(net)
    watch, (x, y) = GradientWatch(model), data()
    y[1, 0, 0] = torch.nan
    mse(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.seen_in) == ("loss", "the gradient at the output of the model")
    assert found.finite_before == "the output of 'head'"


def test_fully_masked_row():
    model, _ = make("transformer")
    softmax = model.blocks[2].attention.softmax
    softmax.mask[1] = False
    watch = GradientWatch(model)
    step(model)
    found = watch.report()
    assert (found.kind, found.name) == ("output", "blocks.2.attention.softmax")
    assert found.finite_before == "the input of 'blocks.2.attention.softmax'"


@pytest.mark.parametrize("net", NETS)
def test_optimizer_that_broke(net):
    """Plain SGD divides one weight's gradient by zero; every later gradient is NaN, and applied."""
    model, prefix = make(net)
    watch = GradientWatch(model)
    broken = model.get_parameter(f"{prefix}inner.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(5):
        optimizer.zero_grad()
        step(model, seed=batch)
        if batch == 1:
            broken.grad /= 0.0
        optimizer.step()
    found = watch.report()
    assert (found.kind, found.name, found.batch) == ("weight", f"{prefix}inner.weight", 2)
