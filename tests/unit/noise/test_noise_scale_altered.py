"""`NoiseScale` notices gradients that are not what it saw, leaves them out, and says so once."""

import math
import warnings

import pytest
import torch
from torch import nn

from steadygrad.noise import NoiseScale
from tests.unit.noise.training_loop import (
    accumulate,
    last,
    left_out,
    losses,
    make,
    synthetic,
)

SOURCES = pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def leave(model):
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def halve(model):
    for p in model.parameters():
        p.grad /= 2


def nothing(model):
    pass


# What is done before the passes and after them, and what `step` is told.
ALTERATIONS = {
    "clipped": (nothing, clip, {}),
    "clipped by value": (nothing, lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.1), {}),
    "cleared": (nothing, lambda m: m.zero_grad(), {}),
    "left over": (leave, nothing, {}),
    "divided": (nothing, halve, {}),
    "told a scale that is not there": (nothing, nothing, {"grad_scale": 1024.0}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_it_is_noticed_left_out_counted_and_said(alteration, dtype):
    before, after, told = ALTERATIONS[alteration]
    model, x, y = make(dtype)
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
            before(model)
            accumulate(model, x + step, y)
            after(model)
            noise.step(**told)
            model.zero_grad()
    assert left_out(noise) == (3, 3)
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


@SOURCES
@pytest.mark.parametrize("alteration", ["clipped", "another pass"])
def test_every_source_notices(source, alteration):
    model, x, y = make()
    noise = NoiseScale(model, source=source)
    accumulate(model, x, y, noise)
    noise.step()
    model.zero_grad()
    for a, b in zip(x.split(5), y.split(5), strict=True):
        if alteration == "another pass":  # between two contexts
            losses(model, a + 1, b).mean().backward()
        with noise.microbatch(5):
            (losses(model, a, b).mean() / 2).backward()
    if alteration == "clipped":
        clip(model)
    with pytest.warns(UserWarning, match="altered"):
        noise.step()
    assert (left_out(noise), noise.estimate().measurements.item()) == ((1, 1), 1)


def test_every_metric_notices_and_the_count_is_saved():
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    accumulate(model, x, y)
    optimizer.step()
    noise = NoiseScale(model, samples=5, metric="preconditioned", optimizer=optimizer)
    for alter in (nothing, clip):
        optimizer.zero_grad()
        accumulate(model, x, y)
        alter(model)
        with pytest.warns() if alter is clip else warnings.catch_warnings():
            noise.step()
    assert (left_out(noise), noise.estimate().measurements.item()) == ((1, 1), 1)
    state = noise.state_dict()
    other = NoiseScale(model)
    for saved, count in ((state, 1), ({k: v for k, v in state.items() if k != "altered"}, 0)):
        other.load_state_dict(saved)
        assert other.altered.item() == count


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
@pytest.mark.parametrize("source", ["microbatch", "per_example"])
def test_what_is_wrong_with_one_parameter_is_found_when_it_is_its_turn(source):
    """One that no optimizer has, and so nobody clears."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)]).double()
    noise = NoiseScale(model, source=source)
    counts = []
    for _ in range(6):
        leave(model[5])
        for x in torch.randn(2, 3, 4, dtype=torch.float64):
            loss = model(x).square().mean() / 2
            with noise.microbatch(3):
                loss.backward()
        noise.step()
        model.zero_grad()
        counts.append(noise.altered.item())
    # Of 24 parameters every sixth is looked at in a step; these are the tenth and eleventh.
    assert counts == [0, 0, 0, 0, 1, 2]


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
    assert left_out(noise) == (0, 0)
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
            accumulate(model, x, y)
            (clip if step == 20 else nothing)(model)
            noise.step()
            steps += [step] * (len(caught) - len(steps))
    assert steps == [21]
    assert noise.altered.item() == 8


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
@pytest.mark.parametrize("how", ["clipped", "overflown", "dropped", "short window", "whole"])
def test_steps_left_out_for_their_gradients_leave_no_fair_sample(how):
    """Seven of sixty; a short window is left out for its number of parts."""
    model, sample = synthetic(4.0)
    noise = NoiseScale(model, decay=1.0, samples=8)
    for step in range(60):
        model.zero_grad()
        this = how if step % 9 == 1 else None
        for micro in range(1 if this == "short window" else 4):
            loss = model(sample(8)).mean() / 4
            (loss * torch.inf if this == "overflown" and micro else loss).backward()
        if this == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        (noise.drop_step if this == "dropped" else noise.step)()
    got, fair = noise.estimate(), how in ("short window", "whole")
    assert got.resolved.item() is got.high.isfinite().item() is fair
    assert (got.reason is None) is fair
    # Four standard errors. The estimate from clipped gradients would be far above the truth.
    assert got.value.item() == pytest.approx(4.0, rel=0.3)
    numbers = got.as_dict()
    assert numbers["skipped"] == noise.skipped.item() == (0 if how == "whole" else 7)
    assert numbers["altered"] == noise.altered.item() == (7 if how == "clipped" else 0)
