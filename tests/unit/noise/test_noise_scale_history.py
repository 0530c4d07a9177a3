"""`NoiseScale` over many steps: known truth, forgetting, saving, going on, drifting."""

import copy

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.noise.estimate import empty_ring, estimate_from, push, skipped_in
from tests.unit.noise.test_intervals import course_of, histories
from tests.unit.noise.training_loop import (
    accumulate,
    found,
    last,
    left_out,
    make,
    measure,
    run,
    synthetic,
)

SOURCES = pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])


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


def test_a_state_of_another_model_or_a_damaged_one_changes_nothing():
    model, x, y = make()
    noise, other = NoiseScale(model), NoiseScale(make()[0])
    measure(noise, model, x, y, [5, 5])
    with pytest.raises((RuntimeError, ValueError)):
        other.load_state_dict({**noise.state_dict(), "likeness": torch.ones(7, 7)})
    assert other.estimate().measurements.item() == 0
    with pytest.raises(InputError, match="state_dict"):
        NoiseScale(nn.Linear(2, 2)).load_state_dict(noise.state_dict())


@pytest.mark.few(1)
@SOURCES
def test_finds_a_known_noise_scale_at_any_batch_size(source):
    model, sample = synthetic(40.0)
    noise = NoiseScale(model, decay=1.0, source=source)
    run(noise, model, sample, 150, [2] * 4)
    run(noise, model, sample, 150, [16] * 8)
    got = noise.estimate()
    # 12 and 3 %: three standard errors.
    assert got.value.item() == pytest.approx(40, rel=0.12)
    assert got.noise_trace.item() == pytest.approx(40, rel=0.03)
    assert got.low.item() < 40 < got.high.item()
    assert got.resolved.item()


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


def test_decay_forgets_as_it_says():
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=0.5)
    run(noise, model, sample, 2, [4, 4])
    first, second = found(noise)[:2, 1].sum(-1).tolist()
    assert last(noise)[1] == pytest.approx((0.5 * first + second) / 1.5, rel=1e-12)


@pytest.mark.parametrize("decay", [1e-4, 0.03])
def test_a_decay_that_keeps_one_measurement_says_so(decay):
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=decay)
    run(noise, model, sample, 5, [4, 4])
    assert noise.estimate().effective.item() < 1.1
    assert not noise.estimate().resolved.item()


@pytest.mark.parametrize("source", ["found", "microbatch", "per_example", "accumulated"])
def test_every_third_step_is_measured(source):
    options = {"samples": 5} if source == "found" else {"source": source}
    measured = []
    for every, steps in ((3, range(7)), (1, range(0, 7, 3))):
        model, x, y = make()
        noise = NoiseScale(model, every=every, **options)
        for i in steps:
            model.zero_grad()
            accumulate(model, x * (1 + i), y, None if source == "found" else noise)
            noise.step()
        assert noise.estimate().measurements.item() == 3
        measured.append(found(noise))
    assert torch.equal(*measured)


def test_skipped_steps_leave_the_forward_passes_alone():
    """Wrapping a layer's output costs as much in a skipped step as in a measured one."""
    model, x, y = make()
    noise, tapped = NoiseScale(model, source="per_example", every=3), []
    model[3].register_forward_hook(lambda m, a, out: tapped.append("Tapped" in out.grad_fn.name()))
    for _ in range(4):
        measure(noise, model, x, y, [5, 5])
    assert tapped == [True] * 2 + [False] * 4 + [True] * 2


def test_an_overflowed_step_is_left_out_and_counted():
    model, x, y = make()
    noise = NoiseScale(model)
    measure(noise, model, x, y)
    before = noise.estimate().as_dict()
    x[0, 0] = torch.inf
    model.zero_grad()
    accumulate(model, x, y, noise)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # which is then no alteration
    noise.step()
    selected = pytest.approx(1 / 1.99)
    expected = {**before, "age": 1.0, "skipped": 1, "selected": selected}
    assert noise.estimate().as_dict() == expected
    assert (before["measurements"], left_out(noise)) == (1, (1, 0))


# Drift


def test_while_it_drifts_the_estimate_is_of_the_newest_measurements():
    """Of each group by itself, and never with `drift=False`, whose states are the same."""
    # The most measurements: a quarter of a half, as the whole is known to drift.
    groups = {"none": 250, "exponential": 250 / 8}
    series = [histories(course_of(g, 250, 100), 2.0, 1, seed=5) for g in groups]
    noises, signals = (torch.cat(rows).flip(-1) for rows in zip(*series, strict=True))
    ring, count = empty_ring(689, 2, torch.device("cpu"))
    for t in range(250):
        push(ring, count, (signals[:, t], noises[:, t]))
    model = nn.ModuleDict({group: nn.Linear(2, 1, bias=False) for group in groups})
    found = []
    for drift in (True, False):
        noise = NoiseScale(model, drift=drift)
        noise.load_state_dict({**noise.state_dict(), "ring": ring, "pushed": count})
        found.append(noise.estimate().by_group)
    got, whole = found
    assert [group.drifting.item() for group in got.values()] == [False, True]
    for name, most in groups.items():
        group = got[name]
        assert group.low < 128 < group.high
        assert group.measurements <= most
        ages = torch.arange(group.measurements, dtype=torch.float64)
        age = (0.99**ages @ ages / (0.99**ages).sum()).item()
        assert group.age.item() == pytest.approx(age, rel=1e-12)
        assert (whole[name].drifting.item(), whole[name].measurements.item()) == (False, 250)
    assert whole["exponential"].value < 90  # the average's


def test_nothing_waits_for_the_device():
    """On a device without memory any read of a value raises."""
    kept = empty_ring(64, 2, torch.device("meta"))
    for _ in range(40):
        push(*kept, torch.zeros(2, 2, device="meta").unbind())
    for drift in (True, False):
        facts = {"altered": skipped_in(*kept), "unlike": skipped_in(*kept) > 0}
        got = estimate_from(*kept, 0.99, 0.95, groups=["a", "b"], drift=drift, **facts)
        for each in (got, *got.by_group.values()):
            numbers = [x for x in vars(each).values() if isinstance(x, torch.Tensor)]
            assert {(x.device.type, x.shape) for x in numbers} == {("meta", ())}
            assert len(numbers) == 14
