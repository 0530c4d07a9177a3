"""Accumulation bugs that large projects had, made again in small; each is named."""

import copy
from collections import UserDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad._checks import InputError
from steadygrad.watch import check_accumulation
from tests.unit.watch.nets import Module, Parts

WINDOWS = 4  # micro-batches, as the loops below are set
IGNORED = -100
EQUAL, SINGLE, RAGGED, SHORT = range(4)


def model_of(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), *more, nn.Linear(16, 3))


def tokens():
    """Twelve sequences of six tokens, padded to different lengths."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(12, 6, 5, generator=draw)
    labels = torch.randint(3, (12, 6), generator=draw)
    for i in range(12):
        labels[i, 1 + (7 * i) % 6 :] = IGNORED
    return {"x": x, "labels": labels}


def token_mean(model, batch):
    """The mean over all labelled tokens of the batch."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def sequence_mean(model, batch):
    """The mean over sequences, all of one length."""
    labels = batch["labels"].clamp(min=0)
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), labels.flatten())


def token_sum(model, batch):
    logits, labels = model(batch["x"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum")


def count(batch):
    return (batch["labels"] != IGNORED).sum()


def bugs(check):
    return [window.bug for window in check.windows]


# The loops; each is one window's.


def right(model, micros):
    items = sum(count(micro) for micro in micros)
    for micro in micros:
        (token_sum(model, micro) / items).backward()


def mean_of_means(model, micros):
    """Every Trainer before October 2024: each micro-batch's mean over its own tokens."""
    for micro in micros:
        (token_mean(model, micro) / len(micros)).backward()


def added_up(model, micros):
    """The division was left out where the model takes loss arguments and does not use them."""
    for micro in micros:
        sequence_mean(model, micro).backward()


def short_window(model, micros):
    """Divides by the setting, and not by what was left of the epoch."""
    for micro in micros:
        (sequence_mean(model, micro) / WINDOWS).backward()


def cleared(model, micros):
    for micro in micros:
        model.zero_grad()
        (sequence_mean(model, micro) / len(micros)).backward()


def by_own_items(model, micros):
    """Tokens of the first micro-batch in place of the window's."""
    items = count(micros[0])
    for micro in micros:
        (token_sum(model, micro) / items).backward()


def one_layer_once(model, micros):
    """One layer is trained by one micro-batch only."""
    for number, micro in enumerate(micros):
        model[0].requires_grad_(number == 0)
        (sequence_mean(model, micro) / len(micros)).backward()


def cleared_at_its_end(model, micros):
    short_window(model, micros)
    model.zero_grad()


def stepping(model, micros):
    """The loop as it stands in the training script."""
    short_window(model, micros)
    torch.optim.AdamW(model.parameters(), 0.1).step()
    model.zero_grad()


def divided_by_zero(model, micros):
    for micro in micros:
        (sequence_mean(model, micro) / 0).backward()


# The loss as it should be, and the bug in each window.
LOOPS = {
    right: (token_mean, ["", "", "", ""]),
    mean_of_means: (token_mean, ["means"] * 4),
    added_up: (sequence_mean, ["sum", "sum", "means", "sum"]),
    short_window: (sequence_mean, ["", "short", "means", "short"]),
    cleared: (sequence_mean, ["lost"] * 4),
    by_own_items: (token_mean, ["factor"] * 4),
    one_layer_once: (sequence_mean, ["other"] * 4),
    cleared_at_its_end: (sequence_mean, ["lost"] * 4),
    stepping: (sequence_mean, ["steps"] * 4),
    divided_by_zero: (sequence_mean, ["overflow"] * 4),
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_bug_is_named(loop):
    loss, expected = LOOPS[loop]
    model = model_of()
    twin = copy.deepcopy(model)
    found = check_accumulation(
        model, loss, tokens(), accumulate=lambda micros: loop(model, micros), micro_batches=WINDOWS
    )
    assert bugs(found) == expected
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) and a.grad is None and a.requires_grad for a, b in pairs)


def test_numbers_of_a_window():
    model = model_of()
    found = check_accumulation(
        model, sequence_mean, tokens(), accumulate=lambda micros: short_window(model, micros)
    )
    short = found.windows[SHORT]
    assert (short.sizes, found.windows[RAGGED].sizes) == ((3, 3, 3), (1, 1, 1, 9))
    assert (short.ratio, short.cosine) == pytest.approx((0.75, 1.0), rel=1e-5)
    assert {"3", "4"} <= {*short.words}


def test_samples_one_by_one_are_the_first_ones():
    """A large batch does not take the memory of as many gradients."""
    batch = {name: x.repeat(5, *[1] * (x.ndim - 1)) for name, x in tokens().items()}
    found = check_accumulation(model_of(), sequence_mean, batch)
    assert [len(w.sizes) for w in found.windows] == [4, 8, 4, 3]
    assert bugs(found) == ["", "", "means", ""]  # a mean over samples needs equal micro-batches


def test_nothing_is_changed():
    """Nor the buffer that a forward pass replaces by another tensor."""

    def average(own, x):
        own.seen = own.seen + 1
        return x

    model = model_of(nn.BatchNorm1d(6), nn.Dropout(), Parts(average))
    model[4].register_buffer("seen", torch.zeros(()))
    buffer = model[4].seen
    sequence_mean(model, tokens()).backward()
    model[4].seen = buffer
    grads = [p.grad.clone() for p in model.parameters()]
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    check_accumulation(model, sequence_mean, tokens())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert model[4].seen is buffer
    assert model[3].training
    assert torch.equal(torch.get_rng_state(), state)


# Losses that are random, or depend on the batch


LAYERS = {
    "batch norm": (lambda: nn.BatchNorm1d(6), "batch"),
    "dropout": (nn.Dropout, "random"),
    "always random": (lambda: Module(F.dropout), "random"),
}


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_that_depend_on_chance_or_on_the_batch(layer, is_training):
    """In training mode alone; also where the loop says ``model.train()``."""
    maker, bug = LAYERS[layer]
    model = model_of(maker()).train(is_training)

    def loop(micros):
        model.train()
        for micro in micros:
            (sequence_mean(model, micro) / len(micros)).backward()

    found = check_accumulation(model, sequence_mean, tokens(), accumulate=loop)
    expected = bug if is_training or layer == "always random" else ""
    assert found.windows[EQUAL].bug == expected
    assert model.training == model[2].training == is_training
    model.train()
    assert all(module.training for module in model.modules())


# Roundings


def test_autocast_is_no_bug():
    """Roundings of bfloat16 are measured, and a bug is told from them all the same."""

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return sequence_mean(model, batch)

    def window(divisor):
        def loop(micros):
            for micro in micros:
                samples = len(micro["x"])
                (loss(model, micro) * samples / divisor(micros)).backward()

        return check_accumulation(model, loss, tokens(), accumulate=loop)

    model = model_of()
    found = window(lambda micros: sum(len(micro["x"]) for micro in micros))
    assert found.bugs == []
    # The roundings show: this is not float32 by mistake.
    assert max(abs(w.ratio - 1) for w in found.windows) > 1e-4
    assert window(lambda micros: WINDOWS * len(micros[0]["x"])).windows[SHORT].bug == "short"


def square_mean(model, x):
    return model(x).float().square().mean()


def test_one_micro_batch_of_many_in_bfloat16():
    """The least bug that is told: a window of 15 where 16 are set."""
    batch = torch.randn(32, 5, generator=torch.Generator().manual_seed(2)).bfloat16()
    model = model_of().bfloat16()

    def loop(micros):
        for x in micros:
            (square_mean(model, x) / 16).backward()

    found = check_accumulation(model, square_mean, batch, accumulate=loop, micro_batches=16)
    assert found.windows[SHORT].bug == "short"
    assert found.windows[SHORT].ratio == pytest.approx(15 / 16, abs=0.02)  # five roundings


def pair_mean(model, pair):
    return F.mse_loss(model(pair[0]), pair[1])


@pytest.mark.parametrize("seed", range(4))
def test_mean_of_means_in_bfloat16(seed):
    """Within the roundings the direction is right."""
    torch.manual_seed(seed)
    x, y = torch.randn(16, 5).bfloat16(), torch.randn(16, 4).bfloat16()
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()
    assert check_accumulation(model, pair_mean, (x, y)).bugs == ["means"]


def test_a_gradient_that_cancels():
    """At the minimum nothing is left of the gradient but roundings."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(32, 5, generator=draw), torch.randn(32, 1, generator=draw)
    model = nn.Linear(5, 1, bias=False)
    best = torch.linalg.lstsq(x.double(), y.double()).solution
    with torch.no_grad():
        model.weight.copy_(best.T)
    assert bugs(check_accumulation(model, pair_mean, (x, y))) == ["rounding"]


@pytest.mark.parametrize("fault", ["nan", "inf", "zero", "frozen", "too few"])
def test_what_cannot_be_compared(fault):
    batch, model, factor = tokens(), model_of(), 0.0 if fault == "zero" else 1.0
    if fault in ("nan", "inf"):
        batch["x"][3] = float(fault)
    elif fault == "frozen":
        model.requires_grad_(False)
    elif fault == "too few":
        batch = {name: x[:7] for name, x in batch.items()}
    match = {"frozen": "`model`", "too few": "Found 7"}.get(fault, "GradientWatch")
    with pytest.raises(InputError, match=match):
        check_accumulation(model, lambda m, b: factor * sequence_mean(m, b), batch)


# Layouts of batches: sixteen samples, each with five numbers, and a class or some boxes.


class Attributes(dict):
    """As a tokenizer's: items are attributes too."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any


class Named(NamedTuple):
    x: Any
    y: Any


SAMPLES = 16
DRAW = torch.Generator().manual_seed(4)
X, Y = torch.randn(SAMPLES, 5, generator=DRAW), torch.randint(3, (SAMPLES,), generator=DRAW)
BOXES = [torch.randn(1 + i % 3, 3, generator=DRAW) for i in range(SAMPLES)]


def classes(model, batch):
    return F.cross_entropy(model(batch["x"]), torch.tensor([int(label) for label in batch["y"]]))


def of_record(model, batch):
    return classes(model, {"x": batch.x, "y": batch.y})


def box_mean(model, indices):
    return torch.stack([(model(X[i]) - BOXES[i]).abs().mean() for i in indices]).mean()


def popping(model, batch):
    return classes(model, {"y": batch.pop("y"), "x": batch["x"].mul_(2)})


CUT = {
    "numbers beside": (classes, {"x": X, "y": Y, "temperature": 2.0, "name": "train"}),
    "mapping": (classes, UserDict(x=X, y=Y)),
    "dict with attributes": (classes, Attributes(x=X, y=Y)),
    "named tuple": (of_record, Named(X, Y)),
    "changed by the loss": (popping, {"x": X, "y": Y}),
    "indices of boxes": (box_mean, torch.arange(SAMPLES)),
}


@pytest.mark.parametrize("layout", CUT)
def test_layout_that_is_cut(layout):
    loss, batch = CUT[layout]
    before = X.clone()
    found = check_accumulation(nn.Linear(5, 3), loss, batch)
    assert bugs(found) == ["", "", "means", ""]
    assert sum(found.windows[RAGGED].sizes) == SAMPLES
    assert torch.equal(X, before)


ENDS = torch.arange(0, 41, 5)
FRAMES = torch.randn(11, SAMPLES, 5, generator=DRAW)


def packed(model, batch):
    """The mean over sequences of each one's mean."""
    error, ends = model(batch["x"]).square().mean(1), batch["ends"].tolist()
    return torch.stack([error[i:j].mean() for i, j in pairwise(ends)]).mean()


def running(model, batch):
    """Time first: each frame with all before it."""
    return model(batch["x"].cumsum(0)).square().mean()


def last_frame(model, batch):
    return F.cross_entropy(model(batch["x"].cumsum(0)[-1]), batch["y"])


def neighbours(model, batch):
    """A graph, whose samples are nodes that point at one another."""
    return (model(batch["x"]) * model(batch["x"][batch["next"]])).mean()


def pairs(model, batch):
    return (model(batch["x"])[::2] * model(batch["x"])[1::2]).mean()


class Opaque:
    def __init__(self, x, y):
        self.x, self.y = x, y


REFUSED = {
    "packed": (packed, {"x": FRAMES.flatten(0, 1)[:40], "ends": ENDS}),
    "time first": (last_frame, {"x": FRAMES, "y": Y}),
    "time as long": (last_frame, {"x": FRAMES.repeat(2, 1, 1)[:SAMPLES], "y": Y}),
    "graph": (neighbours, {"x": X, "next": torch.randint(SAMPLES, (SAMPLES,), generator=DRAW)}),
    "object": (of_record, Opaque(X, Y)),
    "object beside": (of_record, Named(X, Opaque(X, Y))),
    "dict with attributes": (of_record, Attributes(x=X, y=Y)),
    "list": (classes, {"x": X, "y": Y.tolist()}),
    "dataclass": (of_record, Record(X, Y)),
    "nothing": (lambda model, batch: model(X).square().mean(), {"x": 1.0}),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_layout_that_is_refused(layout):
    loss, batch = REFUSED[layout]
    with pytest.raises(InputError, match="`batch`") as refused:
        check_accumulation(nn.Linear(5, 3), loss, batch)
    assert "\n" not in str(refused.value)
    assert "ndim" not in str(refused.value)


def correlation(model, batch):
    """Of a single sample it is 0 / 0."""
    x = batch["x"]
    return torch.corrcoef(torch.stack([model(x)[:, 0], x.square().sum(1)]))[0, 1]


def spread(model, batch):
    """Of a single sample it is zero."""
    y = model(batch["x"])[:, 0]
    return (y - y.mean()).square().mean()


@pytest.mark.filterwarnings("ignore:cov:UserWarning")
@pytest.mark.parametrize(
    ("loss", "x", "micro_batches"),
    [(running, FRAMES, 4), (pairs, X, 4), (correlation, X, 4), (spread, X, 8)],
)
def test_rows_that_are_no_samples(loss, x, micro_batches):
    """Rows whose loss depends on the others, of which the loop is innocent.

    Also of so few weights that equal micro-batches have the whole gradient in their span.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 1 if loss in (correlation, spread) else 3)
    assert bugs(check_accumulation(model, loss, {"x": x}, micro_batches=micro_batches)) == ["batch"]


# Gradients of other kinds


def test_complex_weights():
    """A bug of the imaginary part alone, where the real one is small."""

    def code(own, x):
        x = x.to(torch.cfloat)
        return 1e-3 * (x @ (1j * own.weight)).imag + (x @ own.weight).imag

    def loss(model, x):
        return model(x).square().mean()

    def tripled(micros):
        for micro in micros:
            (loss(model, micro) * len(micro) / sum(map(len, micros))).backward()
        model.weight.grad.imag.mul_(3)

    torch.manual_seed(0)
    model = Parts(code)
    model.weight = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
    assert check_accumulation(model, loss, X).windows[EQUAL].bug == ""
    found = check_accumulation(model, loss, X, accumulate=tripled).windows[EQUAL]
    assert (found.ratio, found.bug) == (pytest.approx(3, rel=1e-3), "other")


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 1))
    found = check_accumulation(model, lambda model, y: model(y).square().mean(), Y)
    assert found.windows[EQUAL].bug == ""


@pytest.mark.parametrize(("reduction", "bug"), [("mean", ""), ("sum", "sum")])
def test_samples_without_a_gradient(reduction, bug):
    """A hinge loss, which is zero for some: these say nothing of their weights."""

    def loss(model, x):
        return model(x).sum(1).relu().mean()

    def loop(micros):
        for micro in micros:
            share = len(micro) / sum(map(len, micros)) if reduction == "mean" else 1
            (loss(model, micro) * share).backward()

    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    assert (model(X[:8]).sum(1) < 0).any()
    assert check_accumulation(model, loss, X, accumulate=loop).windows[SINGLE].bug == bug


@pytest.mark.parametrize(
    ("divisor", "bug"),
    [
        (lambda micros, micro: sum(map(count, micros)), ""),
        (lambda micros, micro: sum(map(count, micros)) * len(micros), "twice"),
        (lambda micros, micro: count(micro) * len(micros), "overflow"),
    ],
    ids=["right", "twice", "means"],
)
def test_sample_without_labels(divisor, bug):
    """Its own mean is 0 / 0, and the window's is not."""
    batch, model = tokens(), model_of()
    batch["labels"][2] = IGNORED

    def masked(batch):
        error = model(batch["x"]).square().sum(-1)
        return (error * (batch["labels"] != IGNORED)).sum()

    def loop(micros):
        for micro in micros:
            (masked(micro) / divisor(micros, micro)).backward()

    def loss(model, batch):
        return masked(batch) / count(batch)

    found = check_accumulation(model, loss, batch, accumulate=loop)
    assert found.windows[SINGLE].bug == bug


def test_window_without_labels_is_left_out():
    """Of prompts alone, and the rest of the batch is not."""
    batch, model = tokens(), model_of()
    batch["labels"][:8] = IGNORED

    def loss(model, batch):
        return token_sum(model, batch) / count(batch).clamp(min=1)

    found = check_accumulation(
        model, loss, batch, accumulate=lambda micros: right(model, micros), micro_batches=WINDOWS
    )
    names = [window.name.split()[0] for window in found.windows]
    assert (names, found.bugs) == (["equal", "ragged", "short"], [])
