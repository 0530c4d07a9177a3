"""Numbers by names, as the page of the loggers has them."""

import torch
from torch import nn

from steadygrad.integrations.metrics import noise_metrics
from steadygrad.noise import NoiseScale
from tests.integrations.pages import after, blocks, run

PAGE = "loggers.md"


def measured(steps=5):
    """A noise scale after some steps, and the one of two groups' names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    noise = NoiseScale(model, samples=4)
    for _ in range(steps):
        for _ in range(3):
            (model(torch.randn(4, 4) + 1).square().mean() / 3).backward()
        noise.step()
        model.zero_grad()
    return noise


def test_names_are_those_of_the_page():
    rows = noise_metrics(measured())
    assert set(rows) >= {"steadygrad/noise_scale/by_group/0", "steadygrad/noise_scale/by_group/1"}
    assert blocks(PAGE, "text")[0].split() == [name for name in rows if "by_group" not in name]
    assert rows["steadygrad/noise_scale/resolved"] == 1.0


def test_what_is_not_finite_is_left_out():
    rows = noise_metrics(measured(steps=1))
    assert "steadygrad/noise_scale/high" not in rows
    assert rows["steadygrad/noise_scale/resolved"] == 0.0


def test_the_pages_diff_logs():
    logged = []
    found = type("Run", (), {"log": lambda self, row, step: logged.append(step)})()
    names = {"steps": 21, "train": lambda step: None, "noise": measured(), "run": found}
    run(after(blocks(PAGE, "diff")[0]), names, PAGE)
    assert logged == [0, 10, 20]
