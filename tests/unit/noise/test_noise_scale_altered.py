"""`NoiseScale` notices gradients that are not what it saw, leaves them out, and says so once."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad.noise import NoiseScale
from tests.unit.noise.training_loop import last, losses, make, measure, synthetic


def accumulate(model, x, y, noise=None, divisor=2, scale=1.0):
    for a, b in zip(x.split(5), y.split(5), strict=True):
        if noise is not None:
            noise.samples(5)
        (losses(model, a, b).mean() * (scale / divisor)).backward()


def whole(model, noise, x, y):
    accumulate(model, x, y)
    noise.step()


def clipped(model, noise, x, y):
    accumulate(model, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    noise.step()


def clipped_by_value(model, noise, x, y):
    accumulate(model, x, y)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    noise.step()


def cleared(model, noise, x, y):
    accumulate(model, x, y)
    model.zero_grad()
    noise.step()


def left_over(model, noise, x, y):
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    accumulate(model, x, y)
    noise.step()


def not_seen(model, noise, x, y):
    accumulate(model, x, y)
    noise._source.enable(False)
    (losses(model, x[:5] + 1, y[:5]).mean() / 2).backward()
    noise._source.enable(True)
    noise.step()


def divided_by_parts(model, noise, x, y):
    accumulate(model, x, y, divisor=1)
    for p in model.parameters():
        p.grad /= 2
    noise.step()


def divided_by_samples(model, noise, x, y):
    accumulate(model, x, y, divisor=0.2)
    for p in model.parameters():
        p.grad /= 10
    noise.step()


def unscaled_without_a_scaler(model, noise, x, y):
    accumulate(model, x, y, scale=2.0**12)
    for p in model.parameters():
        p.grad /= 2.0**12
    noise.step()


def told_a_scale_that_was_taken_out(model, noise, x, y):
    accumulate(model, x, y)
    noise.step(grad_scale=1024.0)


ALTERATIONS = [
    clipped,
    clipped_by_value,
    cleared,
    left_over,
    not_seen,
    divided_by_parts,
    divided_by_samples,
    unscaled_without_a_scaler,
    told_a_scale_that_was_taken_out,
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alter", ALTERATIONS, ids=lambda alter: alter.__name__)
def test_it_is_noticed_left_out_counted_and_said(alter, dtype):
    model, x, y = make(dtype=dtype)
    noise = NoiseScale(model, samples=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            accumulate(model, x + step, y)
            noise.step()
            model.zero_grad()
        good = noise.estimate().as_dict()
        assert (noise.altered.item(), good["measurements"], caught) == (0, 3, [])
        for step in range(3):
            alter(model, noise, x + step, y)
            model.zero_grad()
    assert (noise.altered.item(), noise.skipped.item()) == (3, 3)
    # All but three steps older; 1e-12: their weights are other powers of the decay.
    found = noise.estimate().as_dict()
    assert found.pop("reason")
    doubted = {"resolved": False, "low": 0.0, "high": math.inf, "skipped": 3, "altered": 3}
    # The older half of the weights' sum is of three steps that are kept.
    doubted["selected"] = 1 / (1 + 0.99**3)
    del good["reason"]
    expected = {**good, "age": good["age"] + 3, **doubted}
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
    (warning,) = caught
    assert warning.filename == __file__
    assert "noise.altered" in str(warning.message)


@pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])
def test_every_source_notices(source):
    model, x, y = make()
    noise = NoiseScale(model, source=source)
    measure(noise, model, x, y, [5, 5])
    model.zero_grad()
    for a, b in zip(x.split(5), y.split(5), strict=True):
        loss = losses(model, a, b).mean() / 2
        with noise.microbatch(5):
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.warns(UserWarning, match="noise.altered"):
        noise.step()
    assert (noise.altered.item(), noise.estimate().measurements.item()) == (1, 1)


@pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])
def test_a_pass_between_two_contexts_is_noticed(source):
    model, x, y = make()
    noise = NoiseScale(model, source=source)
    for a, b in zip(x.split(5), y.split(5), strict=True):
        losses(model, a + 1, b).mean().backward()
        with noise.microbatch(5):
            losses(model, a, b).mean().backward()
    with pytest.warns(UserWarning, match="noise.altered"):
        noise.step()
    assert noise.altered.item() == 1


def test_every_metric_notices():
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    accumulate(model, x, y)
    optimizer.step()
    optimizer.zero_grad()
    noise = NoiseScale(model, samples=5, metric="preconditioned", optimizer=optimizer)
    accumulate(model, x, y)
    noise.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="noise.altered"):
        clipped(model, noise, x, y)
    assert (noise.altered.item(), noise.estimate().measurements.item()) == (1, 1)


def test_an_overflow_is_no_alteration():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    bad = x.clone()
    bad[0, 0] = torch.inf
    accumulate(model, bad, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    noise.step()
    assert (noise.altered.item(), noise.skipped.item()) == (0, 1)


def test_the_count_is_saved():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    with pytest.warns(UserWarning, match="noise.altered"):
        clipped(model, noise, x, y)
    other = NoiseScale(model)
    other.load_state_dict(noise.state_dict())
    assert other.altered.item() == 1
    older = noise.state_dict()
    del older["altered"]
    other.load_state_dict(older)
    assert other.altered.item() == 0


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
@pytest.mark.parametrize("source", ["microbatch", "per_example"])
def test_what_is_wrong_with_one_parameter_is_found_when_it_is_its_turn(source):
    """One that no optimizer has, and so nobody clears."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)]).double()
    noise = NoiseScale(model, source=source)
    found = []
    for _ in range(6):
        for p in model[5].parameters():
            p.grad = torch.ones_like(p)
        for x in torch.randn(2, 3, 4, dtype=torch.float64):
            loss = model(x).square().mean() / 2
            with noise.microbatch(3):
                loss.backward()
        noise.step()
        model.zero_grad()
        found.append(noise.altered.item())
    # Of 24 parameters every sixth is looked at in a step; these are the tenth and eleventh.
    assert found == [0, 0, 0, 0, 1, 2]


class Wave(nn.Module):
    """A model with a complex parameter alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0) + 1j)

    def forward(self, x):
        return (self.weight * x).abs().square().mean()


def test_parameters_that_cannot_be_compared_are_measured_all_the_same():
    torch.manual_seed(0)
    model = Wave()
    noise = NoiseScale(model, samples=3)
    for x in torch.randn(2, 3, 4):
        (model(x) / 2).backward()
    noise.step()
    assert (noise.skipped.item(), noise.altered.item()) == (0, 0)
    assert last(noise)[1] > 0


class Late:
    """A copy on the host that arrives after it was looked for, but before the next step."""

    value = coming = False

    def copy_(self, flag, non_blocking):
        assert non_blocking
        self.coming = bool(flag)

    def __bool__(self):
        before, self.value = self.value, self.coming
        return before


def test_on_an_accelerator_the_warning_comes_with_the_next_step(monkeypatch):
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    monkeypatch.setattr(noise._witness, "_on_host", Late())
    noise.altered.fill_(7)  # as after a resume: says nothing of steps to come
    steps = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(30):
            model.zero_grad()
            (clipped if step == 20 else whole)(model, noise, x, y)
            steps += [step] * (len(caught) - len(steps))
    assert steps == [21]
    assert noise.altered.item() == 8


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
@pytest.mark.parametrize("how", ["clipped", "overflown", "short window", "whole"])
def test_steps_left_out_for_their_gradients_leave_no_fair_sample(how):
    """Seven of sixty; a short window is left out for its number of parts."""
    model, sample = synthetic(4.0)
    noise = NoiseScale(model, decay=1.0, samples=8)
    for step in range(60):
        model.zero_grad()
        left_out = how if step % 9 == 1 else None
        for micro in range(1 if left_out == "short window" else 4):
            loss = model(sample(8)).mean() / 4
            (loss * torch.inf if left_out == "overflown" and micro else loss).backward()
        if left_out == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        noise.step()
    got, fair = noise.estimate(), how in ("short window", "whole")
    assert got.resolved.item() is got.high.isfinite().item() is fair
    assert (got.reason is None) is fair
    assert got.value.item() == pytest.approx(4.0, rel=0.3)  # four standard errors
    numbers = got.as_dict()
    assert numbers["skipped"] == noise.skipped.item() == (0 if how == "whole" else 7)
    assert numbers["altered"] == noise.altered.item() == (7 if how == "clipped" else 0)


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
def test_a_clipped_history_keeps_the_true_value():
    """The estimate from clipped gradients would be far above the truth, which is 4."""
    model, sample = synthetic(4.0)
    noise = NoiseScale(model, decay=1.0, samples=8)
    for step in range(400):
        model.zero_grad()
        for _ in range(4):
            (model(sample(8)).mean() / 4).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        noise.step()
    got = noise.estimate()
    assert noise.altered.item() == 200
    # 15 %: three standard errors of 200 measurements.
    assert got.value.item() == pytest.approx(4.0, rel=0.15)


class Narrow(nn.Module):
    """Layers of many kinds and layouts, checkpointed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.conv(self.embed(x).mT).mT
        h = h + checkpoint(self.body, self.norm(h), use_reentrant=False)
        return self.head(h) * self.scale


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_not_one_false_alarm_in_ten_thousand_steps(dtype):
    """Ordinary steps: ragged micro-batches, 2 to 5 of them, clipping after the measurement."""
    torch.manual_seed(0)
    model = Narrow().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    noise = NoiseScale(model, samples=lambda: len(x))
    for step in range(10_000):
        count = 2 + step % 4
        for micro in range(count):
            x = torch.randint(11, (1 + (step + micro) % 3, 6))
            logits = model(x[:, :-1]).flatten(0, 1)
            (nn.functional.cross_entropy(logits, x[:, 1:].flatten()) / count).backward()
        noise.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert (noise.altered.item(), noise.skipped.item()) == (0, 0)
    assert math.isfinite(last(noise)[1])
    assert noise.estimate().reason is None
