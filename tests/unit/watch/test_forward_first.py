"""What the forward pass saw comes first: the loss, later code and older passes change no name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad.watch import GradientWatch
from tests.unit.watch.nets import Module

ROWS = 4
# Each leaves gradients at the model's output finite where the output is not.
LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "hinge": lambda y, t: (1 - y * t.sign()).relu().mean(),
    "mean": lambda y, t: -y.mean(),
    "multi-margin": lambda y, t: F.multi_margin_loss(y, t.argmax(1)),
    "clamp": lambda y, t: (y.clamp(-1, 1) - t).square().mean(),
    "nan_to_num": lambda y, t: (y.nan_to_num(0, 0, 0) - t).square().mean(),
    "rows left out": lambda y, t: F.mse_loss(y[[0, 2, 3]], t[[0, 2, 3]]),
    "padded": lambda y, t: (F.l1_loss(y, t, reduction="none") * PAD).sum(),
}
PAD = torch.tensor([[1.0], [0.0], [1.0], [1.0]])


def overflow(x):
    return x * torch.ones(ROWS, 1).index_fill(0, torch.tensor([1]), 1e30) ** 2


def net(function=lambda x: x * 1.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), Module(function), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def batch(seed=1):
    x, t = torch.randn(2, ROWS, 6, generator=torch.Generator().manual_seed(seed))
    return x, t[:, :3]


def watching(model, mode):
    watch = GradientWatch(model)
    watch.batches, watch.shared.deferred = {"first": (0, 0), "later": (1, 0), "device": (0, 1)}[
        mode
    ]
    return watch


def culprit(watch):
    found = watch.report()
    return found and (found.kind, found.name)


@pytest.mark.parametrize("mode", ["first", "later", "device"])
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


def test_float16_recipe_names_the_layer_at_once():
    """The page's loop: what comes from the forward pass is reported in the step itself."""
    model, (x, t) = net(overflow), batch()
    watch = GradientWatch(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autocast("cpu", torch.float16):
        loss = F.l1_loss(model(x), t)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
    found = watch.report()
    assert (found.kind, found.name, found.row) == ("output", "2", 1)


class Outer(nn.Module):
    """Code of its own between a layer and a block."""

    def __init__(self, code, block):
        super().__init__()
        self.layer, self.block, self.code = nn.Linear(6, 6), block, code

    def forward(self, x):
        return self.block(self.code(self.layer(x)))


def in_place(h):
    h /= torch.zeros(ROWS, 1)
    return h


def part_in_place(h):
    h[1:2] /= 0
    return h


class Inner(nn.Module):
    """A block that hands its first layer another view of its input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 1)

    def forward(self, x):
        return self.first(x.view(-1, 6))


CODES = {"in place": in_place, "a row in place": part_in_place, "anew": lambda h: h / 0}
BLOCKS = {
    "layer": lambda: nn.Linear(6, 1),
    "sequence": lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)),
    "view": Inner,
}


@pytest.mark.parametrize("mode", ["first", "later", "device"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("code", CODES)
def test_next_module_is_not_blamed_for_its_input(code, block, mode):
    model = nn.Sequential(nn.Linear(6, 6), Outer(CODES[code], BLOCKS[block]()))
    watch = watching(model, mode)
    model(batch()[0]).square().mean().backward()
    found = watch.report()
    assert (found.kind, found.name) == ("output", "1")
    assert (found.seen_in, found.finite_before) == (
        "the input of '1.block'", "the output of '1.layer'",
    )  # fmt: skip


def test_batch_that_the_model_spoils_is_not_blamed():
    model = Outer(lambda h: h, nn.Linear(6, 1))
    model.layer = Module(lambda x: x.div_(0))
    watch = GradientWatch(model)
    model(batch()[0]).square().mean().backward()
    assert culprit(watch) == ("output", "layer")


def masks(x):
    return x.masked_fill(x > x.mean(), -torch.inf)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    ("place", "function", "kind"),
    [
        ("1", lambda x: masks(x) * torch.nan, "output"),
        ("4", lambda x: x / 0, "output"),
        ("4", lambda x: (x * 0).sqrt() + x, "gradient"),
    ],
    ids=["the mask itself", "a later overflow", "a later root of zero"],
)
def test_mask_is_a_habit_and_its_nan_is_none(place, function, kind, before, deferred):
    torch.manual_seed(0)  # a row that is masked as a whole would be a fault of the softmax
    model = nn.Sequential(
        nn.Linear(6, 6), Module(masks), nn.Softmax(-1), nn.Linear(6, 6), Module(lambda x: x)
    )
    watch, (x, _) = GradientWatch(model), batch()
    watch.shared.deferred = deferred
    for _ in range(before):
        model(x).square().mean().backward()
        model.zero_grad()
    assert watch.report() is None
    model.get_submodule(place).function = function
    model(x).square().mean().backward()
    assert culprit(watch) == (kind, place)


def test_mask_of_the_first_pass_is_not_blamed_for_a_backward_fault_before_it():
    model = nn.Sequential(
        nn.Linear(6, 6), Module(lambda x: (x * 0).sqrt() + x), nn.Linear(6, 6),
        Module(lambda x: x.masked_fill(torch.arange(6) > 3, -torch.inf)), nn.Softmax(-1),
    )  # fmt: skip
    watch = GradientWatch(model)
    model(batch()[0]).square().mean().backward()
    assert culprit(watch) == ("gradient", "1")


def test_bad_batch_is_no_habit():
    """One NaN batch, which was not reported, hides no later fault; nor is it forgotten."""
    model, (x, t) = net(), batch()
    watch, bad = GradientWatch(model), x.clone()
    bad[2] = torch.nan
    F.l1_loss(model(bad)[:2], t[:2]).backward()
    model.zero_grad()
    F.l1_loss(model(x), t).backward()
    model.zero_grad()
    F.l1_loss(model(bad), t).backward()
    found = watch.report()
    assert (found.kind, found.batch, found.row) == ("batch", 2, 2)


@pytest.mark.parametrize("healthy", [1, 3])
def test_nan_in_padding_is_a_habit(healthy):
    """NaN in all passes, which a later module replaces, is no reason of a fault behind it."""
    pad = torch.tensor([False, False, False, True])[:, None]
    model = nn.Sequential(
        nn.Linear(6, 6), Module(lambda x: torch.where(pad, torch.nan, x)),
        Module(lambda x: torch.where(pad, 0.0, x)), nn.Linear(6, 6), Module(lambda x: x),
    )  # fmt: skip
    watch, (x, _) = GradientWatch(model), batch()
    for _ in range(healthy):
        model(x).square().mean().backward()
    assert watch.report() is None
    model[4].function = lambda x: (x * 0).sqrt() + x
    model(x).square().mean().backward()
    assert culprit(watch) == ("gradient", "4")


class Missing(nn.Module):
    """A table whose missing values are NaN."""

    def __init__(self, function):
        super().__init__()
        self.first, self.place, self.last = nn.Linear(6, 6), Module(function), nn.Linear(6, 1)

    def forward(self, x):
        return self.last(self.place(self.first(x.nan_to_num())))


@pytest.mark.parametrize(
    ("function", "kind"),
    [(lambda x: (x * 0).sqrt() + x, "gradient"), (lambda x: x / 0, "output")],
)
def test_missing_values_are_not_blamed(function, kind):
    model, (x, _) = Missing(function), batch()
    watch = GradientWatch(model)
    x[0, 0] = torch.nan
    model(x).square().mean().backward()
    assert culprit(watch) == (kind, "place")


def test_absorbed_batch_of_a_model_without_modules():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 1))

        def forward(self, x):
            return (x @ self.weight).nan_to_num().square().mean()

    model, (x, _) = Functional(), batch()
    watch = GradientWatch(model)
    x[3, 0] = torch.nan
    model(x).backward()
    found = watch.report()
    assert (found.kind, found.row) == ("batch", 3)


def test_several_rows_and_rows_that_cannot_be_told():
    model, (x, t) = net(), batch()
    watch = GradientWatch(model)
    x[[0, 3]] = torch.inf
    F.l1_loss(model(x), t).backward()
    found = watch.report()
    assert (found.rows, found.row) == ((0, 3), None)
    model.zero_grad()
    x, t = batch()
    t[2, 1] = torch.nan
    F.mse_loss(model(x), t).backward()
    found = watch.report()
    assert (found.kind, found.row) == ("loss", 2)
    folded = nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Flatten(0, 1), Module(lambda x: x / 0))
    watch = GradientWatch(folded)
    folded(x.requires_grad_()).sum().backward()
    assert watch.report().rows == ()  # three to a row of the batch
