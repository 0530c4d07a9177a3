"""Accumulation bugs that large projects had, made again in small; each is named."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad.watch import check_accumulation

WINDOWS = 4  # micro-batches, as the loops below are set
IGNORED = -100


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


# The loops; each is one window's.


def right(model, micros):
    items = sum(count(micro) for micro in micros)
    for micro in micros:
        (token_sum(model, micro) / items).backward()


def mean_of_means(model, micros):
    """Every Trainer before October 2024: each micro-batch's mean over its own tokens."""
    for micro in micros:
        (token_mean(model, micro) / len(micros)).backward()


def divided_twice(model, micros):
    """By the tokens of the window, and by the number of micro-batches once more."""
    items = sum(count(micro) for micro in micros)
    for micro in micros:
        (token_sum(model, micro) / items / len(micros)).backward()


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


def clipped(model, micros):
    for micro in micros:
        (sequence_mean(model, micro) / len(micros)).backward()
        for p in model.parameters():
            p.grad.clamp_(-1e-3, 1e-3)


EQUAL, SINGLE, RAGGED, SHORT = range(4)
# The loss as it should be, and the bug in each window.
LOOPS = {
    right: (token_mean, ["", "", "", ""]),
    mean_of_means: (token_mean, ["means"] * 4),
    divided_twice: (token_mean, ["twice"] * 4),
    added_up: (sequence_mean, ["sum", "sum", "means", "sum"]),
    short_window: (sequence_mean, ["", "short", "means", "short"]),
    cleared: (sequence_mean, ["lost"] * 4),
    by_own_items: (token_mean, ["factor"] * 4),
    clipped: (sequence_mean, ["other"] * 4),
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_bug_is_named(loop):
    loss, expected = LOOPS[loop]
    model = model_of()
    found = check_accumulation(
        model, loss, tokens(), accumulate=lambda micros: loop(model, micros), micro_batches=WINDOWS
    )
    assert [window.bug for window in found.windows] == expected


def test_short_window_says_the_numbers():
    model = model_of()
    found = check_accumulation(
        model, sequence_mean, tokens(), accumulate=lambda micros: short_window(model, micros)
    )
    short = found.windows[SHORT]
    assert short.sizes == (3, 3, 3)
    assert (short.ratio, short.cosine) == pytest.approx((0.75, 1.0), rel=1e-5)
    assert short.words.startswith("The loop divides by 4 where the window has 3 micro-batches.")
    assert {*short.layers} == {"0", "2"}
    assert all(pair == pytest.approx((0.75, 1.0), rel=1e-5) for pair in short.layers.values())


def test_default_loop():
    """A mean over samples needs equal micro-batches."""
    found = check_accumulation(model_of(), sequence_mean, tokens())
    assert [window.bug for window in found.windows] == ["", "", "means", ""]
    assert found.windows[RAGGED].sizes == (2, 2, 4, 4)


@pytest.mark.parametrize(
    ("layer", "bug"), [(nn.BatchNorm1d(6), "batch"), (nn.LayerNorm(16), ""), (nn.Dropout(), "")]
)
def test_loss_that_depends_on_the_batch(layer, bug):
    found = check_accumulation(model_of(layer), sequence_mean, tokens())
    assert found.windows[EQUAL].bug == bug


def test_random_loss():
    noisy = lambda model, batch: sequence_mean(model, {**batch, "x": F.dropout(batch["x"])})  # noqa: E731
    assert check_accumulation(model_of(), noisy, tokens()).bugs == ["random"]


def test_one_layer_alone():
    """A layer that is trained by one micro-batch only shows in its own row."""
    model = model_of()

    def loop(micros):
        for number, micro in enumerate(micros):
            model[0].requires_grad_(number == 0)
            (sequence_mean(model, micro) / len(micros)).backward()
        model[0].requires_grad_()

    window = check_accumulation(model, sequence_mean, tokens(), accumulate=loop).windows[EQUAL]
    assert window.layers["2"] == pytest.approx((1.0, 1.0), rel=1e-5)
    assert window.layers["0"][0] < 0.9
    assert window.bug == "other"


def test_nothing_is_changed():
    model = model_of(nn.BatchNorm1d(6), nn.Dropout())
    sequence_mean(model, tokens()).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    check_accumulation(model, sequence_mean, tokens())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert model[3].training
    assert torch.equal(torch.get_rng_state(), state)


def test_too_small_a_batch():
    batch = {name: x[:7] for name, x in tokens().items()}
    with pytest.raises(ValueError, match=r"at least 8 samples.*Found 7"):
        check_accumulation(model_of(), sequence_mean, batch)


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
    right = window(lambda micros: sum(len(micro["x"]) for micro in micros))
    assert right.bugs == []
    # The roundings show: this is not float32 by mistake.
    assert max(abs(w.ratio - 1) for w in right.windows) > 1e-4
    assert window(lambda micros: WINDOWS * len(micros[0]["x"])).windows[SHORT].bug == "short"


def test_one_micro_batch_of_many_in_bfloat16():
    """The least bug that is told: a window of 15 where 16 are set."""
    draw = torch.Generator().manual_seed(2)
    batch = torch.randn(32, 5, generator=draw).bfloat16()
    model = model_of().bfloat16()
    mean = lambda model, x: model(x).float().square().mean()  # noqa: E731
    found = check_accumulation(
        model,
        mean,
        batch,
        accumulate=lambda micros: [(mean(model, x) / 16).backward() for x in micros],
        micro_batches=16,
    )
    assert found.windows[SHORT].bug == "short"
    assert found.windows[SHORT].ratio == pytest.approx(15 / 16, abs=0.02)  # five roundings


def test_a_gradient_that_cancels():
    """At the minimum nothing is left of the gradient but roundings."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(32, 5, generator=draw), torch.randn(32, 1, generator=draw)
    model = nn.Linear(5, 1, bias=False)
    best = torch.linalg.lstsq(x.double(), y.double()).solution
    with torch.no_grad():
        model.weight.copy_(best.T)
    found = check_accumulation(model, lambda m, b: F.mse_loss(m(b[0]), b[1]), (x, y))
    assert found.bugs == ["rounding"]
    assert len(found.windows) == 1


def test_samples_one_by_one_are_the_first_ones():
    """A large batch does not take the memory of as many gradients."""
    batch = {name: x.repeat(5, *[1] * (x.ndim - 1)) for name, x in tokens().items()}
    found = check_accumulation(model_of(), sequence_mean, batch)
    assert [len(w.sizes) for w in found.windows] == [4, 8, 4, 3]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_gradients_that_are_not_finite(value):
    batch = tokens()
    batch["x"][3] = value
    with pytest.raises(ValueError, match=r"Expected finite gradients.*Remedy: GradientWatch"):
        check_accumulation(model_of(), sequence_mean, batch)


def test_buffer_that_forward_replaces_is_put_back():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return x

    model = model_of(Average())
    buffer = model[2].seen
    check_accumulation(model, sequence_mean, tokens())
    assert model[2].seen is buffer
    assert buffer == 0
