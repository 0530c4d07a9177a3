"""Faults in two nets: the first culprit is named right, whatever comes after.

The net's and the loss's form change no name; nor does the mode of the watch.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.reference.watch import Trace
from tests.unit.watch.nets import FAULTS, MODES, NETS, Module, make, step, watching

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


def test_bad_batch_is_no_habit():
    """One NaN batch, which was not reported, hides no later fault; nor is it forgotten."""
    model, (x, t) = net(), batch()
    watch, bad = watching(model), x.clone()
    bad[2] = torch.nan
    F.l1_loss(model(bad)[:2], t[:2]).backward()
    model.zero_grad()
    F.l1_loss(model(x), t).backward()
    model.zero_grad()
    F.l1_loss(model(bad), t).backward()
    found = watch.report()
    assert (found.kind, found.batch, found.row) == ("batch", 2, 2)
