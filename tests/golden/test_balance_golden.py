"""`LossBalancer` repeats audiocraft's balancer, by both ways of calling it."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from steadygrad import LossBalancer

FILES = sorted(Path(__file__).parent.glob("balancer-*.npz"))
# The original's arithmetic in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-15}


def losses_of(ys, target):
    return {
        "l1": (ys["l1"] - target).abs().mean(),
        "l2": 30 * (ys["l2"] - target).square().mean(),
        "adv": F.softplus(-ys["adv"].sum(-1)).mean(),
    }


def raw_sum(x, target):
    """The plain sum of the losses' gradients of y."""
    y = (2 * torch.tanh(x)).detach().requires_grad_()
    losses = losses_of(dict.fromkeys(("l1", "l2", "adv"), y), target)
    return torch.autograd.grad(sum(losses.values()), y)[0]


def steps(golden, balancer, call):
    """Each step's gradient of y as the file has it, effective loss and metrics.

    The file's `grad_y` was read from a `.grad` that retained each partial gradient too, so it is
    the gradient handed on plus the plain sum.
    """
    for x, target in zip(golden["x"], golden["target"], strict=True):
        x, target = torch.from_numpy(x).requires_grad_(), torch.from_numpy(target)
        handed_on = 2 * torch.tanh(x)
        handed_on.retain_grad()
        y = handed_on.view_as(handed_on)
        effective = None
        if call == "backward":
            losses = losses_of(dict.fromkeys(balancer.weights, y), target)
            effective = balancer.backward(losses, y)
        else:
            sum(losses_of(balancer.fork(y), target).values()).backward()
        yield handed_on.grad + raw_sum(x, target), effective, balancer.metrics


@pytest.mark.parametrize("call", ["backward", "fork"])
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_repeats_the_original(file, call):
    golden = np.load(file)
    config = json.loads(str(golden["config"]))
    metrics = config["metrics"]
    metrics = ast.literal_eval(metrics) if isinstance(metrics, str) else metrics
    balancer = LossBalancer(config["weights"], **config["kwargs"])
    results = list(steps(golden, balancer, call))
    assert len(results) == config["steps"] == len(golden["grad_y"])
    for step, (grad, effective, found) in enumerate(results):
        np.testing.assert_allclose(grad, golden["grad_y"][step], **EXACT)
        if effective is not None:
            np.testing.assert_allclose(effective, golden["effective_loss"][step], **EXACT)
        for key, value in metrics[step].items():
            np.testing.assert_allclose(found[key], value, **EXACT)


def test_all_three_files_are_here():
    assert len(FILES) == 3
