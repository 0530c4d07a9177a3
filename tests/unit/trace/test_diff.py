"""What a comparison says of losses, of factors, and of values that are not finite."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad.trace import Trace
from steadygrad.trace.diff import compare
from steadygrad.trace.runs import read_run
from steadygrad.trace.words import summary
from tests.unit.nets import Net
from tests.unit.trace.nets import Fault, make, train


def said(tmp_path, fault=None, right=None, **options):
    """The summary of a run without a fault against one with it."""
    for name, loop in (("a", right), ("b", fault)):
        train(tmp_path / name, *make(), loop, **{"steps": 2, "clip": 0.0, **options})
    return summary(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))


class Double(Fault):
    def on_loss(self, step, loss):
        return loss * 2


def test_a_loss_is_compared(tmp_path):
    found = said(tmp_path, Double())
    assert (found["step"], found["stage"], found["module"]) == (0, "loss", "")
    assert found["first"]["distance"] == pytest.approx(0.5, rel=1e-5)
    assert "2 times" in found["reasons"][0]


class Scaled(Fault):
    """A loss scale that is undone."""

    def __init__(self, scale):
        self.scale = scale

    def on_loss(self, step, loss):
        return loss * self.scale

    def on_gradients(self, step, model, optimizer):
        for p in model.parameters():
            p.grad.div_(self.scale)


def test_another_loss_scale_is_no_fault(tmp_path):
    found = said(tmp_path, Scaled(2048.0), Scaled(1024.0))
    assert found["verdict"] == "same"
    assert any("step 0" in remark for remark in found["remarks"])


class Decayed(Scaled):
    def on_start(self, model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.5


def test_and_does_not_hide_the_fault(tmp_path):
    found = said(tmp_path, Decayed(2048.0), Scaled(1024.0))
    assert (found["step"], found["stage"]) == (0, "update")
    assert not any("times" in reason for reason in found["reasons"])
    assert "weight_decay" in found["reasons"][0]


class Broken(Fault):
    def __init__(self, count):
        self.count = count

    def on_step(self, step, model, optimizer):
        with torch.no_grad():
            model.place.view(-1)[: self.count] = torch.nan


def test_what_is_not_finite_in_both_is_said(tmp_path):
    found = said(tmp_path, Broken(3), Broken(3))
    assert found["verdict"] == "same"
    assert any("step 0" in remark for remark in found["remarks"])
    found = said(tmp_path, Broken(3), Broken(4))
    assert (found["verdict"], found["stage"]) == ("part", "weights at the start")


def test_rounding_leaves_every_generator_as_it_was(tmp_path):
    def call(net, x):
        return net.layer(x) * random.random() + np.random.rand()

    sums = []
    for rounding in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Net(call, layer=nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        folder = tmp_path / str(rounding)
        with Trace(model, optimizer, folder, rounding=rounding) as trace:
            for _ in range(4):
                model(torch.randn(5, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                trace.step()
        sums.append([p.sum().item() for p in model.parameters()])
    assert sums[0] == sums[1]
