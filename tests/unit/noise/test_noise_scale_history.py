"""`NoiseScale` over many steps: known truth, forgetting, saving and going on."""

import copy
import math

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.unit.noise.training_loop import last, make, measure, run, synthetic


@pytest.mark.parametrize("every", [1, 2])
def test_resumes_to_the_bit(every):
    model, x, y = make()
    straight, first = NoiseScale(model, every=every), NoiseScale(model, every=every)
    for i in range(8):
        measure(straight, model, x * (1 + i), y, [5, 5])
    for i in range(4):
        measure(first, model, x * (1 + i), y, [5, 5])
    second = NoiseScale(model, every=every)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for i in range(4, 8):
        measure(second, model, x * (1 + i), y, [5, 5])
    assert str(second.estimate().as_dict()) == str(straight.estimate().as_dict())
    # Which parameters a step compares goes on, too.
    assert torch.equal(second.state_dict()["likeness"], straight.state_dict()["likeness"])
    with pytest.raises(InputError, match="state_dict"):
        NoiseScale(nn.Linear(2, 2)).load_state_dict(first.state_dict())


def test_a_damaged_state_changes_nothing():
    model, x, y = make()
    noise, other = NoiseScale(model), NoiseScale(make()[0])
    measure(noise, model, x, y, [5, 5])
    with pytest.raises((RuntimeError, ValueError)):
        other.load_state_dict({**noise.state_dict(), "likeness": torch.ones(7, 7)})
    assert other.estimate().measurements.item() == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
def test_finds_a_known_noise_scale(source):
    model, sample = synthetic(40.0)
    noise = NoiseScale(model, decay=1.0, source=source)
    run(noise, model, sample, 300, [5, 5, 5, 5])
    got = noise.estimate()
    # 12 %: three standard errors at 300 steps of 20 samples.
    assert got.value.item() == pytest.approx(40, rel=0.12)
    assert got.low.item() < 40 < got.high.item()
    assert got.resolved.item()


def test_the_noise_per_sample_survives_a_new_batch_size():
    model, sample = synthetic(40.0)
    noise = NoiseScale(model, decay=1.0)
    run(noise, model, sample, 150, [2] * 4)
    run(noise, model, sample, 150, [16] * 8)
    got = noise.estimate()
    assert got.value.item() == pytest.approx(40, rel=0.12)
    assert got.noise_trace.item() == pytest.approx(40, rel=0.03)


def test_hopeless_data_are_unresolved():
    model, sample = synthetic(1e6)
    noise = NoiseScale(model)
    run(noise, model, sample, 20, [2, 2])
    got = noise.estimate()
    assert not got.resolved.item()
    assert math.isinf(got.high.item())
    assert got.low.item() > 2  # what can be said: far above the batch
    assert NoiseScale(model).estimate().as_dict()["measurements"] == 0


def test_history_keeps_the_newest():
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=0.2)
    run(noise, model, lambda n: sample(n) * 1e4, 4, [4, 4])
    run(noise, model, sample, 6, [4, 4])
    got = noise.estimate()
    assert got.measurements.item() == 6
    assert got.noise_trace.item() < 100  # nothing of the huge gradients is left
    noise.reset()
    assert noise.estimate().measurements.item() == 0


@pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])
def test_every_third_step_is_measured(source):
    model, x, y = make()
    all_steps, some = NoiseScale(model, source=source), NoiseScale(model, source=source, every=3)
    for i in range(7):
        measure(some, model, x * (1 + i), y, [5, 5])
        if i % 3 == 0:
            measure(all_steps, model, x * (1 + i), y, [5, 5])
    assert some.estimate().measurements.item() == 3
    assert str(some.estimate().as_dict()) == str(all_steps.estimate().as_dict())


def test_skipped_steps_leave_the_forward_passes_alone():
    """Wrapping a layer's output costs as much in a skipped step as in a measured one."""
    model, x, y = make()
    noise, tapped = NoiseScale(model, source="per_example", every=3), []
    model[3].register_forward_hook(lambda m, a, out: tapped.append("Tapped" in out.grad_fn.name()))
    for _ in range(4):
        measure(noise, model, x, y, [5, 5])
    assert tapped == [True] * 2 + [False] * 4 + [True] * 2
    other = NoiseScale(make()[0], source="per_example", every=3)
    other.load_state_dict(noise.state_dict())
    assert not other._source._taps.enabled
    noise.reset()
    tapped.clear()
    measure(noise, model, x, y, [5, 5])
    assert tapped == [True] * 2


def test_decay_forgets_as_it_says():
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=0.5)
    run(noise, model, sample, 1, [4, 4])
    first = last(noise)[1]
    run(noise, model, sample, 1, [4, 4])
    second = noise.state_dict()["ring"][1, 1].sum().item()
    assert last(noise)[1] == pytest.approx((0.5 * first + second) / 1.5, rel=1e-12)


@pytest.mark.parametrize("decay", [1e-4, 1e-3, 0.03])
def test_a_decay_that_keeps_one_measurement_says_so(decay):
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=decay)
    run(noise, model, sample, 5, [4, 4])
    assert noise.estimate().effective.item() < 1.1
    assert not noise.estimate().resolved.item()


def test_gradients_without_noise_have_a_noise_scale_of_zero():
    model = nn.Linear(1, 1, bias=False).double()
    noise = NoiseScale(model)
    run(noise, model, lambda n: model.weight.new_full((n, 1), 3.0), 20, [4, 4, 4, 4])
    got = noise.estimate()
    # Powers of two in counts and weights: nothing is rounded.
    assert [x.item() for x in (got.value, got.low, got.high)] == [0.0, 0.0, 0.0]
    assert got.resolved.item()
