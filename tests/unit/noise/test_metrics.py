"""Noise scales in the geometry of an optimizer."""

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.reference import noise_scale as reference
from tests.unit.noise.training_loop import COUNTS, last, make, measure, per_sample


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


def test_nothing_is_measured_before_the_optimizer_has_state():
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y, [5, 5])
    assert (noise.estimate().measurements.item(), noise.skipped.item()) == (0, 1)
    optimizer.step()
    measure(noise, model, x, y, [5, 5])
    assert noise.estimate().measurements.item() == 1


def test_an_optimizer_without_such_state_is_named():
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y, [5, 5])
    optimizer.step()
    with pytest.raises(InputError, match="SGD"):
        measure(noise, model, x, y, [5, 5])


def test_preconditioned_reads_the_options_that_a_load_brought():
    """torch's `load_state_dict` makes new groups."""
    model, x, y = make()
    saved = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    warmed_up(model, x, y, saved)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.6))
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    optimizer.load_state_dict(saved.state_dict())
    measure(noise, model, x, y)
    rows = per_sample(model, x, y) / preconditioner(model, saved).sqrt()
    # 1e-7: as above.
    assert last(noise) == pytest.approx(
        reference.signal_and_noise(rows, COUNTS, [1.0] * 3), rel=1e-7
    )
