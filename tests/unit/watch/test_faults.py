"""Faults in two nets: the first culprit is named right, whatever comes after; a watch's life.

The net's and the loss's form change no name; nor does the mode of the watch.
"""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad._checks import InputError
from steadygrad.watch import GradientWatch
from tests.contracts.problems import hooks_of
from tests.reference.watch import Trace
from tests.unit.watch.nets import (
    FAULTS,
    MODES,
    NETS,
    Module,
    culprit,
    data,
    make,
    mse,
    root_of_zero,
    step,
    watching,
)

ALL_MODES = pytest.mark.parametrize("mode", MODES)


@pytest.mark.few(33)
@ALL_MODES
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_culprit_is_that_of_a_recorded_trace(net, fault, mode):
    put, loss, kind, name = FAULTS[fault]
    model, prefix = make(net)
    with watching(model, mode) as watch:
        step(model)
        assert watch.report() is None
    model.zero_grad()
    put(model, prefix)
    twin = copy.deepcopy(model)
    trace, watch = Trace(twin), watching(model, mode)  # what was put in later is not watched
    batch = watch.batches
    step(model, loss)
    step(twin, loss)
    found, (what, place) = watch.report(), trace.first()
    assert (found.kind, found.name, found.batch) == (kind, name.format(prefix), batch)
    assert found.finite_before
    # A weight is there before the output that shows it.
    if kind != "weight" and mode == "first":
        # The last module's output is the model's.
        where = "the model" if kind == "loss" and place == "head" else repr(place)
        assert found.seen_in == f"the {what} of {where}"
    # Once told, it is forgotten; weights of this batch still have their gradients.
    model.zero_grad()
    assert watch.report() is None


# What the forward pass saw comes first


ROWS = 4
# Each leaves gradients at the model's output finite where the output is not.
LOSSES = {
    "l1": F.l1_loss,
    "clamp": lambda y, t: (y.clamp(-1, 1) - t).square().mean(),
    "nan_to_num": lambda y, t: (y.nan_to_num(0, 0, 0) - t).square().mean(),
    "rows left out": lambda y, t: F.mse_loss(y[[0, 2, 3]], t[[0, 2, 3]]),
}


def overflow(x):
    """In the second row."""
    return x * torch.ones(ROWS, 1).index_fill(0, torch.tensor([1]), 1e30) ** 2


def net(function=lambda x: x * 1.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), Module(function), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def batch():
    x, t = torch.randn(2, ROWS, 6, generator=torch.Generator().manual_seed(1))
    return x, t[:, :3]


@ALL_MODES
@pytest.mark.parametrize("loss", LOSSES)
def test_batch_and_overflow_with_every_loss(loss, mode):
    model, (x, t) = net(), batch()
    watch = watching(model, mode)
    LOSSES[loss](model(x), t).backward()
    assert watch.report() is None
    x[1, 2] = torch.nan
    LOSSES[loss](model(x), t).backward()
    found = watch.report()
    assert (found.kind, found.row, found.seen_in) == ("batch", 1, "the batch")
    model, (x, t) = net(overflow), batch()
    watch = watching(model, mode)
    LOSSES[loss](model(x), t).backward()
    found = watch.report()
    assert (found.kind, found.name, found.row) == ("output", "2", 1)
    assert found.finite_before == "the output of '1'"


def test_several_rows_and_rows_that_cannot_be_told():
    model, (x, t) = net(), batch()
    watch = watching(model)
    x[[0, 3]] = torch.inf
    F.l1_loss(model(x), t).backward()
    found = watch.report()
    assert (found.rows, found.row) == ((0, 3), None)
    model.zero_grad()
    x, t = batch()
    t[2, 1] = torch.nan
    F.mse_loss(model(x), t).backward()
    found = watch.report()
    assert (found.kind, found.row, found.finite_before) == ("loss", 2, "the output of '5'")
    folded = nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Flatten(0, 1), Module(lambda x: x / 0))
    watch = watching(folded)
    folded(x.requires_grad_()).sum().backward()
    assert watch.report().rows == ()  # three to a row of the batch


# Values that are not finite and do no harm


def masks(x):
    return x.masked_fill(x > x.mean(), -torch.inf)


@pytest.mark.parametrize("mode", ["first", "device"])
@pytest.mark.parametrize("healthy", [0, 3])
@pytest.mark.parametrize(
    ("place", "function", "kind"),
    [
        ("1", lambda x: masks(x) * torch.nan, "output"),
        ("4", lambda x: x / 0, "output"),
        ("4", lambda x: (x * 0).sqrt() + x, "gradient"),
        ("0", lambda x: (x * 0).sqrt() + x, "gradient"),
    ],
    ids=["the mask itself", "a later overflow", "a later root of zero", "one before it"],
)
def test_mask_is_a_habit_and_its_nan_is_none(place, function, kind, healthy, mode):
    torch.manual_seed(0)  # a row that is masked as a whole would be a fault of the softmax
    model = nn.Sequential(
        Module(lambda x: x), Module(masks), nn.Softmax(-1), nn.Linear(6, 6), Module(lambda x: x)
    )
    model = nn.Sequential(nn.Linear(6, 6), model)
    watch, (x, _) = watching(model, mode), batch()
    for _ in range(healthy):
        model(x).square().mean().backward()
        model.zero_grad()
    assert watch.report() is None
    model[1].get_submodule(place).function = function
    model(x).square().mean().backward()
    found = watch.report()
    assert (found.kind, found.name, found.batch) == (kind, f"1.{place}", healthy)


def test_nan_in_padding_is_a_habit():
    """NaN in all passes, which a later module replaces, is no reason of a fault behind it."""
    pad = torch.tensor([False, False, False, True])[:, None]
    model = nn.Sequential(
        nn.Linear(6, 6), Module(lambda x: torch.where(pad, torch.nan, x)),
        Module(lambda x: torch.where(pad, 0.0, x)), nn.Linear(6, 6), Module(lambda x: x),
    )  # fmt: skip
    watch, (x, _) = watching(model), batch()
    for _ in range(3):
        model(x).square().mean().backward()
    assert watch.report() is None
    model[4].function = lambda x: (x * 0).sqrt() + x
    model(x).square().mean().backward()
    found = watch.report()
    assert (found.kind, found.name) == ("gradient", "4")


# The life of a watch: made, refused, closed, dropped, copied


def test_gradients_are_those_without_a_watch_and_a_closed_one_leaves_nothing():
    model, _ = make("transformer")
    twin = copy.deepcopy(model)
    before = [vars(module).keys() for module in model.modules()]
    with GradientWatch(model) as watch:
        step(model)
        assert hooks_of(model) > 0
    assert [vars(module).keys() for module in model.modules()] == before
    assert hooks_of(model) == 0
    step(twin)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    step(model)
    assert watch.batches == 1


def test_dropped_watch_leaves_no_hooks():
    """One after another, as often as one likes."""
    model, _ = make("residual")
    for _ in range(3):
        watch = GradientWatch(model)
        step(model)
        assert watch.batches == 1
    del watch
    gc.collect()
    assert hooks_of(model) == 0


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
    assert str(found).startswith("No batch, rank 0: ")


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
