"""Accumulation bugs that large projects had, made again in small; each is named."""

import copy
from collections import UserDict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad._checks import InputError
from steadygrad.watch import check_accumulation
from tests.unit.nets import Net

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


def count(batch):
    return (batch["labels"] != IGNORED).sum()


def token_sum(model, batch):
    logits, labels = model(batch["x"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum")


def token_mean(model, batch):
    """The mean over all labelled tokens of the batch."""
    return token_sum(model, batch) / count(batch)


def sequence_mean(model, batch):
    """The mean over sequences, all of one length."""
    labels = batch["labels"].clamp(min=0)
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), labels.flatten())


def dividing(loss, divisor):
    """A loop that divides each micro-batch's loss."""

    def loop(model, micros):
        for micro in micros:
            (loss(model, micro) / divisor(micros, micro)).backward()

    return loop


def check(model, loss, batch, loop=None, **options):
    """Compares with a window of the loop, or with that of a mean over micro-batches."""
    accumulate = loop and partial(loop, model)
    return check_accumulation(model, loss, batch, accumulate=accumulate, **options)


def bugs(check):
    return [window.bug for window in check.windows]


# The loops; each is one window's.


def cleared(model, micros):
    for micro in micros:
        model.zero_grad()
        (sequence_mean(model, micro) / len(micros)).backward()


def stepping(model, micros):
    """The loop as it stands in the training script."""
    short_window(model, micros)
    torch.optim.AdamW(model.parameters(), 0.1).step()
    model.zero_grad()


right = dividing(token_sum, lambda micros, micro: sum(map(count, micros)))
# Divides by the setting, and not by what was left of the epoch.
short_window = dividing(sequence_mean, lambda micros, micro: WINDOWS)


# The loss as it should be, the loop, and the bug in each window.
LOOPS = {
    "right": (token_mean, right, ["", "", "", ""]),
    # Every Trainer before October 2024: each micro-batch's mean over its own tokens.
    "mean of means": (token_mean, None, ["means"] * 4),
    # The division was left out where the model takes loss arguments and does not use them.
    "added up": (
        sequence_mean,
        dividing(sequence_mean, lambda micros, micro: 1),
        ["sum", "sum", "means", "sum"],
    ),
    "short window": (sequence_mean, short_window, ["", "other", "means", "other"]),
    "cleared": (sequence_mean, cleared, ["lost"] * 4),
    # Tokens of the first micro-batch in place of the window's.
    "by own items": (
        token_mean,
        dividing(token_sum, lambda micros, micro: count(micros[0])),
        ["other"] * 4,
    ),
    "stepping": (sequence_mean, stepping, ["lost"] * 4),
}


@pytest.mark.parametrize("name", LOOPS)
def test_bug_is_named(name):
    loss, loop, expected = LOOPS[name]
    assert bugs(check(model_of(), loss, tokens(), loop)) == expected


def test_nothing_is_changed():
    """Nor weights by a step, nor the buffer that a forward pass replaces by another tensor."""

    def average(own, x):
        own.seen = own.seen + 1
        return x

    model = model_of(nn.BatchNorm1d(6), nn.Dropout(), Net(average))
    model[4].register_buffer("seen", torch.zeros(()))
    buffer = model[4].seen
    sequence_mean(model, tokens()).backward()
    model[4].seen = buffer
    grads = [p.grad.clone() for p in model.parameters()]
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    check(model, sequence_mean, tokens(), stepping)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert model[4].seen is buffer
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    ("layer", "bug"), [(nn.BatchNorm1d(6), "batch"), (nn.Dropout(), "unclear")]
)
def test_layers_that_depend_on_chance_or_on_the_batch(layer, bug, is_training):
    """In training mode alone; also where the loop says ``model.train()``."""
    model = model_of(layer).train(is_training)

    def loop(model, micros):
        model.train()
        short_window(model, micros)

    found = check(model, sequence_mean, tokens(), loop)
    assert found.windows[EQUAL].bug == (bug if is_training else "")
    assert model.training == layer.training == is_training
    model.train()
    assert all(module.training for module in model.modules())


# Roundings


def square_mean(model, x):
    return model(x).float().square().mean()


def test_autocast_is_no_bug():
    """Roundings of bfloat16 are measured."""

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return square_mean(model, x)

    loop = dividing(loss, lambda micros, x: sum(map(len, micros)) / len(x))
    found = check(model_of(), loss, tokens()["x"], loop)
    assert found.bugs == []
    # The roundings show: this is not float32 by mistake.
    assert max(abs(w.ratio - 1) for w in found.windows) > 1e-4


@pytest.mark.parametrize(("count", "bug"), [(16, "other"), (32, "unclear")])
def test_one_micro_batch_of_many_in_bfloat16(count, bug):
    """Told where one fewer is more than the roundings of adding up: half of 1/32 is not."""
    batch = torch.randn(2 * count, 5, generator=torch.Generator().manual_seed(2)).bfloat16()
    loop = dividing(square_mean, lambda micros, x: count)
    found = check(model_of().bfloat16(), square_mean, batch, loop, micro_batches=count).windows[-1]
    assert found.bug == bug
    # Five roundings; where none is told, the first window is the last.
    assert found.ratio == pytest.approx(15 / 16 if bug == "other" else 1, abs=0.02)


def test_a_mean_of_means_of_nearly_equal_parts():
    """One token of 320 is missing, which ratio and cosine hardly show."""
    draw = torch.Generator().manual_seed(6)
    batch = {"x": torch.randn(8, 40, 5, generator=draw)}
    batch["labels"] = torch.randint(3, (8, 40), generator=draw)
    batch["labels"][0, 0] = IGNORED
    window = check(model_of(), token_mean, batch).windows[EQUAL]
    assert window.bug == "means"
    assert max(abs(window.ratio - 1), 1 - window.cosine) < 3e-4


def pair_mean(model, pair):
    return F.mse_loss(model(pair[0]), pair[1])


def test_a_gradient_that_cancels():
    """At the minimum nothing is left of the gradient but roundings."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(32, 5, generator=draw), torch.randn(32, 1, generator=draw)
    model = nn.Linear(5, 1, bias=False)
    best = torch.linalg.lstsq(x.double(), y.double()).solution
    with torch.no_grad():
        model.weight.copy_(best.T)
    assert bugs(check(model, pair_mean, (x, y))) == ["unclear"]


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
        check(model, lambda m, b: factor * sequence_mean(m, b), batch)


# Layouts of batches: sixteen samples, each with five numbers and a class.


class Named(NamedTuple):
    x: Any
    y: Any


SAMPLES = 16
DRAW = torch.Generator().manual_seed(4)
X, Y = torch.randn(SAMPLES, 5, generator=DRAW), torch.randint(3, (SAMPLES,), generator=DRAW)
FRAMES = torch.randn(SAMPLES, SAMPLES, 5, generator=DRAW)


def classes(model, batch):
    return F.cross_entropy(model(batch["x"]), torch.tensor([int(label) for label in batch["y"]]))


def of_tuple(model, batch):
    return classes(model, {"x": batch.x, "y": batch.y})


def popping(model, batch):
    return classes(model, {"y": batch.pop("y"), "x": batch["x"].mul_(2)})


CUT = {
    "numbers beside": (classes, {"x": X, "y": Y, "temperature": 2.0, "name": "train"}),
    "mapping": (classes, UserDict(x=X, y=Y)),
    "named tuple": (of_tuple, Named(X, Y)),
    "changed by the loss": (popping, {"x": X, "y": Y}),
}


@pytest.mark.parametrize("layout", CUT)
def test_layout_that_is_cut(layout):
    loss, batch = CUT[layout]
    before = X.clone()
    found = check(nn.Linear(5, 3), loss, batch)
    # A mean over samples needs equal micro-batches.
    assert bugs(found) == ["", "", "means", ""]
    assert sum(found.windows[RAGGED].sizes) == SAMPLES
    assert torch.equal(X, before)


def last_frame(model, batch):
    return F.cross_entropy(model(batch["x"].cumsum(0)[-1]), batch["y"])


REFUSED = {
    "time first": (last_frame, {"x": FRAMES[:11], "y": Y}),
    "time as long": (last_frame, {"x": FRAMES, "y": Y}),
    "object beside": (of_tuple, Named(X, object())),
    "list": (classes, {"x": X, "y": Y.tolist()}),
    "nothing": (lambda model, batch: model(X).square().mean(), {"x": 1.0}),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_layout_that_is_refused(layout):
    loss, batch = REFUSED[layout]
    with pytest.raises(InputError, match="`batch`"):
        check(nn.Linear(5, 3), loss, batch)


def running(model, x):
    """Time first: each frame with all before it."""
    return model(x.cumsum(0)).square().mean()


def spread(model, x):
    """Of a single sample it is zero."""
    y = model(x)[:, 0]
    return (y - y.mean()).square().mean()


@pytest.mark.parametrize(("loss", "x", "micro_batches"), [(running, FRAMES, 4), (spread, X, 8)])
def test_rows_that_are_no_samples(loss, x, micro_batches):
    """Rows whose loss depends on the others, of which the loop is innocent.

    Also of so few weights that equal micro-batches have the whole gradient in their span.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 1 if loss is spread else 3)
    assert bugs(check(model, loss, x, micro_batches=micro_batches)) == ["batch"]


def test_no_mean_of_means_where_few_weights_fit_any_gradient():
    """The loop is right: the loss is one whose samples depend on one another."""
    found = check(nn.Linear(2, 1), lambda model, x: x.std() * model(x).square().mean(), X[:, :2])
    assert {*found.bugs} <= {"other", "batch"}


# Gradients of other kinds


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 1))
    assert check(model, square_mean, Y).windows[EQUAL].bug == ""


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize(
    ("divisor", "bug"),
    [
        (lambda micros, micro: sum(map(count, micros)), ""),
        (lambda micros, micro: sum(map(count, micros)) * len(micros), "twice"),
        (lambda micros, micro: count(micro) * len(micros), "other"),
    ],
    ids=["right", "twice", "means"],
)
def test_sample_without_labels(divisor, bug, least):
    """Its own mean is 0 / 0, or zero, and says nothing of its weight; the window's is neither."""
    batch = tokens()
    batch["labels"][2] = IGNORED

    def masked(model, batch):
        error = model(batch["x"]).square().sum(-1)
        return (error * (batch["labels"] != IGNORED)).sum()

    def loss(model, batch):
        return masked(model, batch) / count(batch).clamp(min=least)

    found = check(model_of(), loss, batch, dividing(masked, divisor))
    assert found.windows[SINGLE].bug == bug


def test_window_without_labels_is_left_out():
    """Of prompts alone, and the rest of the batch is not."""
    batch = tokens()
    batch["labels"][:8] = IGNORED

    def loss(model, batch):
        return token_sum(model, batch) / count(batch).clamp(min=1)

    found = check(model_of(), loss, batch, right)
    names = [window.name.split()[0] for window in found.windows]
    assert (names, found.bugs) == (["equal", "ragged", "short"], [])
