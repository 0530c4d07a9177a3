"""Backward passes that are no micro-batches, and steps that are thrown away."""

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale


def squared(output, y):
    return (output - y).square().mean()


def run(loop, steps=60, **options):
    """The estimate of a loop over steps of four micro-batches with six samples each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    noise = NoiseScale(model, samples=6, decay=1.0, drift=False, **options)
    truth = torch.randn(5, 2)
    for step in range(steps):
        model.zero_grad()
        batches = [torch.randn(6, 5) for _ in range(4)]
        loop(model, noise, [(x, x @ truth + torch.randn(6, 2)) for x in batches], step)
    return noise.estimate()


def plain(model, noise, batches, step):
    for x, y in batches:
        squared(model(x), y).div(4).backward()
    noise.step()


def test_steps_that_are_dropped_for_their_norm_leave_no_fair_sample():
    def skips_spikes(model, noise, batches, step):
        for x, y in batches:
            squared(model(x), y).div(4).backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()) ** 0.5
        (noise.drop_step if norm > 1.8 else noise.step)()

    found = run(skips_spikes)
    assert 5 < found.skipped < 55
    assert not found.resolved
    assert "dropped" in found.reason
    assert run(plain).resolved


def test_a_pass_for_a_diagnosis_is_no_dropped_step():
    def diagnoses(model, noise, batches, step):
        model(batches[0][0]).sum().backward()
        noise.drop_step()
        model.zero_grad()
        plain(model, noise, batches, step)

    found = run(diagnoses)
    assert found.skipped == 0
    assert found.resolved


@pytest.mark.parametrize("order", ["ABBA", "random"])
def test_two_passes_over_the_same_tensors_are_no_two_micro_batches(order):
    def two_losses(model, noise, batches, step):
        for number, (x, y) in enumerate(batches):
            first = number % 2 == 0 if order == "ABBA" else torch.rand(()) < 0.5
            for kind in (0, 1) if first else (1, 0):
                output = model(x)
                loss = squared(output, y) if kind else (output - y).abs().mean()
                loss.div(4).backward()
        noise.step()

    with pytest.raises(InputError, match="same samples"):
        run(two_losses, steps=1)


def test_a_penalty_on_the_weights_is_no_micro_batch():
    def penalises(model, noise, batches, step):
        for x, y in batches:
            squared(model(x), y).div(4).backward()
        sum(p.square().sum() for p in model.parameters()).backward()
        noise.step()

    with pytest.raises(InputError, match="penalty"):
        run(penalises, steps=1)


def test_steps_whose_number_of_passes_varies_are_all_measured():
    def varies(model, noise, batches, step):
        more = batches + [(x + 1, y) for x, y in batches]
        plain(model, noise, more[: 2 + step % 4], 0)

    assert run(varies).skipped == 0


def test_a_buffer_that_is_filled_anew_has_other_samples():
    given = torch.empty(6, 5)

    def fills(model, noise, batches, step):
        for x, y in batches:
            squared(model(given.copy_(x)), y).div(4).backward()
        noise.step()

    assert run(fills).resolved
