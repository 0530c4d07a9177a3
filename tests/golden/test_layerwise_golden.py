"""`LayerwiseGradScaler` repeats fairscale's class, up to the defect after an overflow."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.reference.layerwise import Original
from torch import nn

from steadygrad.scale import LayerwiseGradScaler

HERE = Path(__file__).parent
NAMES = ["growth", "overflow", "plain"]
# The same float64 products in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-14}
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Run:
    """A golden file, and the network in it."""

    def __init__(self, name):
        with np.load(HERE / f"layerwise-{name}.npz") as file:
            self.arrays = {key: file[key] for key in file.files}
        self.config = json.loads(str(self.arrays.pop("config")))
        self.layers = self.config["layers"]
        parts = [("fc1", nn.Linear(6, 8)), ("act1", nn.Tanh()), ("fc2", nn.Linear(8, 8))]
        parts += [("act2", nn.Tanh()), ("fc3", nn.Linear(8, 3)), ("identity", nn.Identity())]
        self.net = nn.Sequential(OrderedDict(parts)).double()
        init = {n: torch.from_numpy(self.arrays[f"init/{n}"]) for n in self.net.state_dict()}
        self.net.load_state_dict(init)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def losses(self):
        for x, y in zip(self.arrays["x"], self.arrays["y"], strict=True):
            self.optimizer.zero_grad()
            yield (self.net(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean()

    def poison(self, step):
        """The file's inputs are clean; in these steps a gradient of the first layer was not."""
        if step in self.config["poisoned_steps"]:
            self.net.fc1.weight.grad[0, 0] = torch.inf

    def compare(self, step):
        for name, parameter in self.net.named_parameters():
            expected = self.arrays[f"param/{name}"][step]
            np.testing.assert_allclose(parameter.detach().numpy(), expected, **EXACT)

    def snapshot(self):
        return [p.detach().clone() for p in self.net.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_repeats_the_original(name):
    run = Run(name)
    scaler = LayerwiseGradScaler(run.net, run.config["scales"], **run.config["kwargs"])
    poisoned, skipped = run.config["poisoned_steps"], []
    for step, loss in enumerate(run.losses()):
        before = run.snapshot()
        scaler.scale(loss).backward()
        run.poison(step)
        scaler.step(run.optimizer)
        scaler.update()
        if all(map(torch.equal, before, run.snapshot())):
            skipped.append(step)
        found = [scaler.get_scales().get(layer, 1.0) for layer in run.layers]
        assert found == run.arrays["scaling_factors"][step].tolist()
        if not poisoned or step <= poisoned[0]:
            run.compare(step)
        else:
            assert all(torch.isfinite(p).all() for p in run.snapshot())
    assert skipped == poisoned
    assert scaler.skipped == len(poisoned)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_original_with_its_defect(name):
    run = Run(name)
    scaler = Original(run.net, run.config["scales"], **run.config["kwargs"])
    for step, _ in enumerate(run.arrays["x"]):
        scaler.scale()
        run.optimizer.zero_grad()
        x, y = (torch.from_numpy(run.arrays[key][step]) for key in ("x", "y"))
        (run.net(x) - y).square().mean().backward()
        run.poison(step)
        scaler.unscale()
        scaler.step(run.optimizer)
        found = [scaler.scales[layer] for layer in run.layers]
        assert found == run.arrays["scaling_factors"][step].tolist()
        run.compare(step)
