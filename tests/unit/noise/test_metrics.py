"""Noise scales in the geometry of an optimizer."""

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.reference import noise_scale as reference
from tests.unit.noise.training_loop import COUNTS, last, make, measure, per_sample, synthetic


def warmed_up(model, x, y, optimizer, steps=3):
    for _ in range(steps):
        model.zero_grad()
        (model(x) - y).square().sum(-1).mean().backward()
        optimizer.step()


def preconditioner(model, optimizer):
    """sqrt(v̂) + eps of every parameter, flat, straight from Adam's definition."""
    rows = []
    for p in model.parameters():
        state, group = optimizer.state[p], optimizer.param_groups[0]
        second = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"].item())
        rows.append((second.sqrt() + group["eps"]).flatten())
    return torch.cat(rows)


@pytest.mark.parametrize("source", ["microbatch", "accumulated"])
def test_preconditioned_by_adams_second_moment_before_the_step(source):
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    warmed_up(model, x, y, optimizer)
    noise = NoiseScale(model, source=source, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y)
    rows = per_sample(model, x, y) / preconditioner(model, optimizer).sqrt()
    # 1e-7: Adam counts its steps in float32, and so the bias correction has seven digits.
    assert last(noise) == pytest.approx(
        reference.signal_and_noise(rows, COUNTS, [1.0] * 3), rel=1e-7
    )


def test_rmsprop_is_a_preconditioner_too():
    model, x, y = make()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    warmed_up(model, x, y, optimizer)
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y)
    second = torch.cat([optimizer.state[p]["square_avg"].flatten() for p in model.parameters()])
    rows = per_sample(model, x, y) / (second.sqrt() + 1e-8).sqrt()
    assert last(noise) == pytest.approx(
        reference.signal_and_noise(rows, COUNTS, [1.0] * 3), rel=1e-9
    )


class Preconditioned(torch.optim.SGD):
    """An optimizer that keeps a second moment in a way of its own."""

    def __init__(self, model, *, betas=(0.9, 0.999), **state):
        super().__init__(model.parameters(), lr=0.0)
        self.param_groups[0]["betas"] = betas
        for p in model.parameters():
            self.state[p] = {"exp_avg_sq": torch.ones_like(p), **state}


@pytest.mark.parametrize(
    "how",
    [
        {"betas": (0.9, 0.99, 0.999), "step": 1},
        {},
        {"step": 1, "exp_avg_sq": torch.ones(2, 2)},
    ],
    ids=["three betas", "no step", "another shape"],
)
def test_a_second_moment_of_another_kind_is_refused(how):
    model, x, y = make()
    optimizer = Preconditioned(model, **how)
    with pytest.raises(InputError, match="optimizer"):
        measure(NoiseScale(model, metric="preconditioned", optimizer=optimizer), model, x, y)


def test_amsgrad_divides_by_the_largest_second_moment():
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    warmed_up(model, x * 10, y, optimizer)
    warmed_up(model, x / 10, y / 10, optimizer)
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y)
    for p in model.parameters():
        optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["max_exp_avg_sq"]
    rows = per_sample(model, x, y) / preconditioner(model, optimizer).sqrt()
    # 1e-7: as above.
    assert last(noise) == pytest.approx(
        reference.signal_and_noise(rows, COUNTS, [1.0] * 3), rel=1e-7
    )


@pytest.mark.parametrize("metric", ["preconditioned", "l1"])
def test_nothing_is_measured_before_the_optimizer_has_state(metric):
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    noise = NoiseScale(model, metric=metric, optimizer=optimizer)
    measure(noise, model, x, y, [5, 5])
    assert (noise.estimate().measurements.item(), noise.skipped.item()) == (0, 1)
    optimizer.step()
    measure(noise, model, x, y, [5, 5])
    assert noise.estimate().measurements.item() == 1


@pytest.mark.parametrize("metric", ["preconditioned", "l1"])
def test_an_optimizer_without_such_state_is_named(metric):
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = NoiseScale(model, metric=metric, optimizer=optimizer)
    measure(noise, model, x, y, [5, 5])
    optimizer.step()
    with pytest.raises(InputError, match="SGD"):
        measure(noise, model, x, y, [5, 5])


@pytest.mark.parametrize("source", ["microbatch", "accumulated"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_l1_on_one_step_is_its_definition(source, scale):
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    warmed_up(model, x, y, optimizer)
    noise = NoiseScale(model, source=source, metric="l1", optimizer=optimizer)
    measure(noise, model, x[:9], y[:9], [3, 3, 3], scale=scale)
    means = reference.part_means(per_sample(model, x[:9], y[:9]), [3, 3, 3])
    momentum = torch.cat(
        [optimizer.state[p]["momentum_buffer"].flatten() for p in model.parameters()]
    )
    c4 = (torch.pi**0.5) / 2  # of two degrees of freedom
    deviation = (means.std(0) * 3**0.5).sum() / c4
    descent = (means.mean(0) * momentum.sign()).sum()
    # 1e-6: coordinates are summed in float32.
    expected = [float(descent) ** 2, float(deviation) ** 2]
    assert last(noise) == pytest.approx(expected, rel=1e-6)


def test_l1_finds_a_known_noise_scale():
    dim = 64
    model, sample = synthetic(4.0, dim)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.99)
    noise = NoiseScale(model, decay=1.0, metric="l1", optimizer=optimizer)
    for _ in range(400):
        optimizer.zero_grad()
        for _ in range(4):
            with noise.microbatch(8):
                (model(sample(8)).mean() / 4).backward()
        noise.step()
        optimizer.step()
    sigma = (4.0 / dim) ** 0.5
    g = synthetic(4.0, dim)[1](1_000_000 // dim).mean(0)
    truth = (dim * sigma / g.abs().sum().item()) ** 2
    got = noise.estimate()
    # 5 %: the first momenta point a little off, and that only lowers the descent.
    assert got.value.item() == pytest.approx(truth, rel=0.05)
    assert got.resolved.item()


def test_l1_refuses_unequal_micro_batches_and_single_examples():
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    warmed_up(model, x, y, optimizer)
    noise = NoiseScale(model, metric="l1", optimizer=optimizer)
    with pytest.raises(InputError, match="equal micro-batches"):
        measure(noise, model, x, y)
    with pytest.raises(InputError, match="source"):
        NoiseScale(nn.Linear(2, 2), source="per_example", metric="l1", optimizer=optimizer)
