"""Noise scales in the geometry of an optimizer."""

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.unit.noise.training_loop import (
    COUNTS,
    assert_defined,
    left_out,
    losses,
    make,
    measure,
    per_sample,
)


def train(model, x, y, optimizer, steps=3):
    for _ in range(steps):
        model.zero_grad()
        losses(model, x, y).mean().backward()
        optimizer.step()


def preconditioner(model, optimizer):
    """The root of the second moment plus eps of every parameter, flat, from the definitions."""
    rows, group = [], optimizer.param_groups[0]
    for p in model.parameters():
        state = optimizer.state[p]
        names = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
        second = next(state[name] for name in names if name in state)
        if "betas" in group:
            second = second / (1 - group["betas"][1] ** state["step"].item())
        rows.append((second.sqrt() + group["eps"]).flatten())
    return torch.cat(rows)


OPTIMIZERS = {
    # 1e-7: Adam counts its steps in float32, and so the bias correction has seven digits.
    "adam": (torch.optim.Adam, {}, 1e-7),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, 1e-7),
    "rmsprop": (torch.optim.RMSprop, {}, 1e-9),
}


@pytest.mark.parametrize(
    ("name", "source"),
    [*((name, "microbatch") for name in OPTIMIZERS), ("adam", "accumulated")],
)
def test_preconditioned_by_the_second_moment_before_the_step(name, source):
    kind, options, rel = OPTIMIZERS[name]
    model, x, y = make()
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    train(model, x * 10, y, optimizer)
    # The largest second moment is not the last one.
    train(model, x / 10, y / 10, optimizer)
    noise = NoiseScale(model, source=source, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y)
    rows = per_sample(model, x, y) / preconditioner(model, optimizer).sqrt()
    assert_defined(noise.estimate(), rows, COUNTS, rel=rel)


def test_options_are_those_that_a_load_brought():
    """torch's `load_state_dict` makes new groups."""
    model, x, y = make()
    saved = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    train(model, x, y, saved)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.6))
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    optimizer.load_state_dict(saved.state_dict())
    measure(noise, model, x, y)
    rows = per_sample(model, x, y) / preconditioner(model, saved).sqrt()
    assert_defined(noise.estimate(), rows, COUNTS, rel=1e-7)


class Preconditioned(torch.optim.SGD):
    """An optimizer that keeps a state of its own."""

    def __init__(self, model, *, betas=None, **state):
        super().__init__(model.parameters(), lr=0.0)
        self.param_groups[0]["betas"] = betas
        for p in model.parameters():
            self.state[p] = {"exp_avg_sq": torch.ones_like(p), **state}


@pytest.mark.parametrize(
    "how",
    [
        {"betas": (0.9, 0.99, 0.999), "step": 1},
        {"betas": (0.9, 0.999)},
        {"betas": (0.9, 0.999), "step": 1, "exp_avg_sq": torch.ones(2, 2)},
        {"exp_avg_sq": None, "momentum_buffer": 1},
    ],
    ids=["three betas", "no step", "another shape", "none"],
)
def test_a_second_moment_of_another_kind_is_refused(how):
    model, x, y = make()
    optimizer = Preconditioned(model, **how)
    with pytest.raises(InputError, match="optimizer"):
        measure(NoiseScale(model, metric="preconditioned", optimizer=optimizer), model, x, y)


def test_nothing_is_measured_before_the_optimizer_has_state():
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y, [5, 5])
    assert (noise.estimate().measurements.item(), left_out(noise)) == (0, (1, 0))
    optimizer.step()
    measure(noise, model, x, y, [5, 5])
    assert noise.estimate().measurements.item() == 1
