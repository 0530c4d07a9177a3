"""Life of a watch: made, refused, closed, dropped, copied with its model."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from steadygrad.watch import GradientWatch
from tests.unit.watch.nets import data, make
from tests.unit.watch.test_faults import step


def test_gradients_are_those_without_a_watch():
    model, _ = make("transformer")
    twin = copy.deepcopy(model)
    watch = GradientWatch(model)
    step(model)
    assert watch.batches == 1
    step(twin)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


def test_closed_watch_leaves_nothing():
    model, _ = make("residual")
    before = [{**vars(module)} for module in model.modules()]
    with GradientWatch(model) as watch:
        step(model)
        assert any(module._forward_hooks for module in model.modules())
    assert [vars(module).keys() for module in model.modules()] == [own.keys() for own in before]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    step(model)
    assert watch.batches == 1


def test_several_watches():
    """Of a model and of a part of it: each for itself."""
    model, _ = make("residual")
    watches = GradientWatch(model), GradientWatch(model), GradientWatch(model.blocks[1])
    model.blocks[1].inner.weight.data.fill_(torch.nan)
    step(model)
    found = [watch.report() for watch in watches]
    assert [one.name for one in found] == ["blocks.1.inner.weight"] * 2 + ["inner.weight"]
    watches[0].close()
    model.zero_grad()
    step(model)
    assert [watch.batches for watch in watches] == [1, 2, 2]


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_the_model_is_not_watched(copied):
    model, _ = make("residual")
    watch = GradientWatch(model)
    step(model)
    watch.batches = 0
    twin = copied(model)
    with torch.no_grad():
        twin.head.weight.fill_(torch.nan)
    step(twin)
    assert (watch.report(), watch.batches) == (None, 0)


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_dropped_watch_leaves_no_hooks():
    """A function that makes a watch in its body and returns: as often as one likes."""
    model, _ = make("residual")

    def train():
        watch = GradientWatch(model)
        for seed in range(3):
            step(model, seed=seed)
        return watch.batches

    assert [train() for _ in range(3)] == [3, 3, 3]
    gc.collect()
    assert hooks(model) == 0


def test_bad_batch_of_a_pass_without_backward():
    """Rollouts, and an evaluation with gradients enabled."""
    model, _ = make("sequential")
    watch = GradientWatch(model)
    for seed in range(4):
        model(data(seed)[0])
    model(data()[0] * torch.nan)
    model(data()[0])
    found = watch.report()
    assert (found.kind, found.batch) == ("batch", 4)


def test_many_forward_passes_without_backward_are_closed():
    """A fault among them is found though hundreds of passes follow without a backward pass."""
    model, _ = make("sequential")
    watch, (x, _y) = GradientWatch(model), data()
    for batch in range(200):
        model(x * torch.nan if batch == 3 else x)
        assert len(watch._open) <= 64
    assert (watch.report().batch, watch.batches) == (3, 200)


def test_model_without_weights():
    watch = GradientWatch(nn.ReLU())
    assert (watch.report(), watch.norms()) == (None, {})
