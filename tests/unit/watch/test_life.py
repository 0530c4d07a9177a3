"""Life of a watch: made, refused, closed, dropped, copied; passes between two reports."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.watch import GradientWatch
from tests.unit.watch.nets import (
    Module,
    Stack,
    TransformerBlock,
    culprit,
    data,
    make,
    mse,
    root_of_zero,
    step,
    watching,
)


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_gradients_are_those_without_a_watch_and_a_closed_one_leaves_nothing():
    model, _ = make("transformer")
    twin = copy.deepcopy(model)
    before = [vars(module).keys() for module in model.modules()]
    with GradientWatch(model) as watch:
        step(model)
        assert hooks(model) > 0
    assert [vars(module).keys() for module in model.modules()] == before
    assert hooks(model) == 0
    step(twin)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    step(model)
    assert watch.batches == 1


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


def test_a_copy_of_the_model_is_not_watched():
    model, _ = make("residual")
    watch = GradientWatch(model)
    twin = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        twin.head.weight.fill_(torch.nan)
    step(twin)
    assert (watch.report(), watch.batches) == (None, 0)


def test_what_cannot_be_watched():
    with pytest.raises(InputError, match="'1'"):
        GradientWatch(nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))))
    watch = GradientWatch(nn.ReLU())
    assert (watch.report(), watch.norms()) == (None, {})


# Passes between two reports


def test_evaluation_is_not_watched_and_forward_faults_need_no_backward():
    model, _ = make("residual")
    watch, (x, y) = GradientWatch(model), data()
    loss = mse(model(x), y)
    with torch.no_grad():
        model(x * torch.nan)
    loss.backward()
    assert (watch.report(), watch.batches) == (None, 1)
    model(x * torch.nan)
    assert (watch.report().kind, watch.batches) == ("batch", 2)


def test_many_forward_passes_without_backward_are_closed():
    """A fault among them is found though hundreds of passes follow without a backward pass."""
    model, _ = make("residual")
    watch, x = GradientWatch(model), data()[0]
    for batch in range(200):
        model(x * torch.nan if batch == 3 else x)
        assert len(watch._open) <= 64
    found = watch.report()
    assert (found.kind, found.batch, watch.batches) == ("batch", 3, 200)


def test_a_mask_without_backward_is_no_fault():
    """Minus infinity in the middle of a pass, whose output is finite, before any training step."""
    masks = Module(lambda x: x.masked_fill(x > x.mean(), -torch.inf))
    model = nn.Sequential(nn.Linear(4, 4), masks, nn.Softmax(-1))
    watch = GradientWatch(model)
    model(data()[0])
    model(data()[0])
    assert (watch.report(), watch.batches) == (None, 2)


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


def test_report_within_a_window():
    """Gradients that were left not finite say nothing of the micro-batch that follows."""
    model, _ = make("residual")
    watch, (x, y) = GradientWatch(model), data()
    mse(model(x * torch.nan), y).backward()
    assert watch.report().kind == "batch"
    mse(model(x), y).backward()
    assert watch.report().kind == "unseen"
    model.zero_grad()
    mse(model(x), y).backward()
    assert watch.report() is None


def test_gradients_from_before_the_watch():
    model, _ = make("residual")
    step(model)
    name, p = next(iter(model.named_parameters()))
    p.grad[0] = torch.nan
    found = GradientWatch(model).report()
    assert (found.kind, found.name, found.batch, found.rank) == ("unseen", name, -1, 0)
    assert str(found) == (
        "No batch, rank 0: the gradient of 'embed.weight' is not finite, and no pass since the "
        "last report made it so: it was left from before; or the watch was made before "
        "torch.compile or after the forward pass, or the loop calls another module. First not "
        "finite: the gradient of 'embed.weight'. Finite before it: nothing."
    )


@pytest.mark.parametrize("late", [False, True])
def test_the_same_gradient_breaks_again(late):
    """As under a loss scale that is still too large; gradients are cleared each time."""
    model, _ = make("residual")
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
        assert culprit(watch) == ("parameter", name)


def test_fault_early_in_a_long_window():
    """The passes after it find gradients that are not finite, and have nothing to do with it."""
    model = nn.Sequential(nn.Linear(4, 4), Module(lambda x: x), nn.Linear(4, 4))
    watch, (x, y), found = GradientWatch(model), data(), []
    for bad in (2, 1, 0):
        for micro in range(4):
            model[1].function = root_of_zero if micro == bad else lambda x: 2 * x
            mse(model(x), y).backward()
        one = watch.report()
        found.append((one.kind, one.name, one.batch))
        model.zero_grad()
    assert found == [("gradient", "1", 2), ("gradient", "1", 5), ("gradient", "1", 8)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["first", "device"])
def test_no_false_alarm_in_five_hundred_steps(mode):
    """Under autocast, with attention, a mask of minus infinity, dropout, and losses of any size."""
    torch.manual_seed(0)
    masks = Module(lambda x: x.masked_fill(torch.arange(8) > 4, -torch.inf))
    model = Stack(TransformerBlock)
    model.blocks[0].place = nn.Sequential(masks, nn.Softmax(-1), nn.Dropout(0.2))
    watch = watching(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(1000):
        x, y = torch.randn(2, 2, 4, 4) * 10.0 ** float(torch.empty(()).uniform_(-4, 4))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        mse(output.float(), y).backward()
        if number % 2:  # of two micro-batches
            assert watch.report() is None
            optimizer.step()
            optimizer.zero_grad()
    assert watch.batches == 1000
