"""Steps that are left out, and said so: altered gradients, passes that are no micro-batches."""

import warnings

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale, sources
from tests.unit.noise.training_loop import accumulate, found, left_out, losses, make, synthetic


def halve(model):
    for p in model.parameters():
        p.grad /= 2


# What is done to the gradients, and what `step` is told.
ALTERATIONS = {
    "clipped": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5), {}),
    "cleared": (lambda model: model.zero_grad(), {}),
    "divided": (halve, {}),
    "told a scale that is not there": (lambda model: None, {"grad_scale": 1024.0}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_an_altered_gradient_is_noticed_left_out_counted_and_said(alteration, dtype):
    alter, told = ALTERATIONS[alteration]
    model, x, y = make(dtype)
    noise = NoiseScale(model, samples=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            accumulate(model, x + step, y)
            noise.step()
            model.zero_grad()
        assert (left_out(noise), caught) == ((0, 0), [])
        for step in range(3):
            accumulate(model, x + step, y)
            alter(model)
            noise.step(**told)
            model.zero_grad()
    got = noise.estimate()
    assert (left_out(noise), got.measurements.item(), got.resolved.item()) == ((3, 3), 3, False)
    other = NoiseScale(model)
    other.load_state_dict(noise.state_dict())
    assert left_out(other) == (3, 3)
    (warning,) = caught
    assert warning.filename == __file__


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
@pytest.mark.parametrize("source", ["microbatch", "per_example"])
def test_what_is_wrong_with_one_parameter_is_found_when_it_is_its_turn(source):
    """One that no optimizer has, and so nobody clears."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)]).double()
    noise = NoiseScale(model, source=source)
    counts = []
    for _ in range(6):
        for p in model[5].parameters():
            p.grad = torch.randn_like(p)
        for x in torch.randn(2, 3, 4, dtype=torch.float64):
            loss = model(x).square().mean() / 2
            with noise.microbatch(3):
                loss.backward()
        noise.step()
        model.zero_grad()
        counts.append(noise.altered.item())
    # Of 24 parameters every sixth is looked at in a step; these are the tenth and eleventh.
    assert counts == [0, 0, 0, 0, 1, 2]


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


def test_a_dropped_step_leaves_nothing_behind():
    """A loop that throws gradients away, and goes on with the next batch."""
    model, x, y = make()
    results = []
    for dropped in (False, True):
        noise = NoiseScale(model, samples=5)
        for number in range(3):
            model.zero_grad()
            if dropped and number == 1:
                losses(model, x, y).sum().backward()
                model.zero_grad()
                noise.drop_step()
            accumulate(model, x, y)
            noise.step()
        assert left_out(noise) == (0, 0)
        results.append(found(noise))
        noise.remove()
    assert torch.equal(*results)


class Heads(nn.Module):
    """A body and two heads, of the same samples."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x):
        h = self.body(x)
        return [head(h).square().mean() / 2 for head in self.heads]


# What a loop does with a micro-batch.

BUFFER = torch.empty(4, 3, dtype=torch.float64)


def summed(model, noise, x):
    sum(model(x)).backward()


def fills(model, noise, x):
    """One buffer for all samples, which is filled anew."""
    sum(model(BUFFER.copy_(x))).backward()


def apart(model, noise, x):
    a, b = model(x)
    a.backward(retain_graph=True)
    b.backward()


def apart_in_contexts(model, noise, x):
    for loss in model(x):
        with noise.microbatch(4):
            loss.backward(retain_graph=True)


def apart_in_one(model, noise, x):
    with noise.microbatch(4):
        apart(model, noise, x)


def called_twice(model, noise, x):
    """Two losses, each with a forward pass of its own over the same tensors."""
    summed(model, noise, x)
    summed(model, noise, x)


def penalises(model, noise, x):
    """With a penalty on the weights, which no forward pass of the model has."""
    summed(model, noise, x)
    sum(p.square().sum() for p in model.parameters()).backward()


def measured(loop, **options):
    """Three steps of two micro-batches, each with two losses."""
    torch.manual_seed(0)
    model = Heads().double()
    noise = NoiseScale(model, **options)
    for x in torch.randn(3, 2, 4, 3, dtype=torch.float64):
        model.zero_grad()
        for half in x:
            loop(model, noise, half)
        noise.step()
    assert left_out(noise) == (0, 0)
    return found(noise)


@pytest.mark.parametrize(
    ("loop", "options", "what"),
    [
        (apart, {"samples": 4}, "same samples"),
        (apart_in_contexts, {}, "same samples"),
        (apart_in_contexts, {"source": "accumulated"}, "same samples"),
        (called_twice, {"samples": 4}, "same samples"),
        (penalises, {"samples": 4}, "penalty"),
    ],
)
def test_passes_that_are_no_micro_batches_are_refused(loop, options, what):
    with pytest.raises(InputError, match=what):
        measured(loop, **options)


def test_losses_of_one_sample_are_added_up_in_one_context():
    """By the difference that both make to `.grad`; 1e-12: it is a difference."""
    together = measured(summed, samples=4)
    assert torch.equal(measured(fills, samples=4), together)
    added = measured(apart_in_one, source="accumulated")
    assert torch.allclose(added, together, rtol=1e-12)


def test_passes_without_a_step_hold_no_more_memory_and_are_warned_of_once():
    model, x, y = make()
    noise = NoiseScale(model, samples=len(x))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * sources._MOST_GIVEN):
            # Other tensors each time, as a loader's.
            losses(model, x.clone(), y).mean().backward()
    assert len(caught) == 1
    assert len(noise._source._repeats._given) == sources._MOST_GIVEN
