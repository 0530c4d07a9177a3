"""Passes between two reports: several, cleared late or never, evaluations in between."""

import pytest
import torch
from torch import nn

from steadygrad.watch import GradientWatch
from tests.unit.watch.nets import Module, data, make, mse
from tests.unit.watch.test_faults import step


def test_evaluation_is_not_watched_and_forward_faults_need_no_backward():
    model, _ = make("sequential")
    watch = GradientWatch(model)
    with torch.no_grad():
        model(data()[0] * torch.nan)
    assert watch.report() is None
    model(data()[0] * torch.nan)
    assert (watch.report().kind, watch.batches) == ("batch", 1)


def test_a_mask_without_backward_is_no_fault():
    """Minus infinity in the middle of a pass, whose output is finite, before any training step."""
    model = nn.Sequential(
        nn.Linear(4, 4), Module(lambda x: x.masked_fill(x > x.mean(), -torch.inf)), nn.Softmax(-1)
    )
    watch = GradientWatch(model)
    model(data()[0])
    model(data()[0])
    assert (watch.report(), watch.batches) == (None, 2)


def test_two_forward_passes_before_one_backward():
    model, _ = make("residual")
    watch, (x, y) = GradientWatch(model), data()
    bad = x.clone()
    bad[0, 0, 0] = torch.inf
    first, second = model(bad), model(x)
    (mse(first, y) + mse(second, y)).backward()
    found = watch.report()
    assert (found.kind, found.batch) == ("batch", 0)


def test_report_within_a_window():
    """Gradients that were left not finite say nothing of the micro-batch that follows."""
    model, _ = make("residual")
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x * torch.nan), y).backward()
    assert watch.report().kind == "batch"
    mse(model(x), y).backward()
    found = watch.report()
    assert found.kind == "unseen"
    assert "no pass since the last report made it so" in str(found)
    model.zero_grad()
    mse(model(x), y).backward()
    assert watch.report() is None


def test_gradients_from_before_the_watch():
    model, _ = make("sequential")
    step(model)
    name, p = next(iter(model.named_parameters()))
    p.grad[0] = torch.nan
    found = GradientWatch(model).report()
    assert (found.kind, found.name) == ("unseen", name)
    assert str(found).startswith("No batch, rank 0: the gradient of")
    assert "made before torch.compile or after the forward pass" in str(found)


@pytest.mark.parametrize("late", [False, True])
def test_the_same_gradient_breaks_again(late):
    """As under a loss scale that is still too large; gradients are cleared each time."""
    model, _ = make("sequential")
    watch, (x, y) = GradientWatch(model), data()
    name, p = [*model.named_parameters()][-2]
    p.register_hook(lambda gradient: gradient * torch.inf)
    for _ in range(3):
        if not late:
            model.zero_grad()
        loss = mse(model(x), y)
        if late:
            model.zero_grad()
        loss.backward()
        found = watch.report()
        assert (found.kind, found.name) == ("parameter", name)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_report_between_forward_and_backward(deferred):
    model, _ = make("sequential")
    watch, (x, y) = GradientWatch(model), data()
    watch.shared.deferred = deferred
    [*model.parameters()][-2].register_hook(lambda gradient: gradient * torch.inf)
    loss = mse(model(x), y)
    assert watch.report() is None
    loss.backward()
    assert watch.report().kind == "parameter"


def test_gradients_that_are_cleared_after_the_forward_pass():
    """They are none of the next pass's, and the layer below the fault is looked at again."""

    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt()

    model = nn.Sequential(nn.Linear(8, 8), Root(), nn.Linear(8, 4))
    watch, places = GradientWatch(model), []
    for _ in range(2):
        loss = model(torch.ones(3, 8)).square().sum()
        model.zero_grad()
        loss.backward()
        found = watch.report()
        places.append((found.kind, found.name, found.seen_in))
    assert places[0] == places[1]
    assert places[0][0] == "gradient"


def test_evaluation_between_forward_and_backward():
    """Its passes are no part of the training pass."""
    model, _ = make("residual")
    watch, (x, y) = GradientWatch(model), data()
    loss = mse(model(x), y)
    with torch.no_grad():
        model(x * torch.nan)
    loss.backward()
    assert (watch.report(), watch.batches) == (None, 1)


def test_fault_early_in_a_long_window():
    """The passes after it find gradients that are not finite, and have nothing to do with it."""

    class Root(nn.Module):
        def forward(self, x):
            return x + (0 * x).abs().sqrt() if broken else 2 * x

    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4))
    watch, (x, y), found = GradientWatch(model), data(), []
    for bad in [(0, 2), (2, 1), (3, 0)]:
        for micro in range(4):
            broken = micro == bad[1]
            mse(model(x), y).backward()
        found.append(watch.report())
        model.zero_grad()
    assert [(one.kind, one.name, one.batch) for one in found] == [
        ("gradient", "1", 2),
        ("gradient", "1", 5),
        ("gradient", "1", 8),
    ]
