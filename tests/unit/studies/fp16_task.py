"""Tasks in which one named layer makes infinities on the way back, for some samples only."""

import math

import torch
from torch import Tensor, nn

from steadygrad.tasks import Task
from steadygrad.tasks.char_lm import char_lm
from tests.unit.studies.tiny_task import make_task

# About one row in 44, and one batch of four in eleven.
HOT = 2.0


class Explode(torch.autograd.Function):
    """Identity; the gradient becomes infinite where it is told to."""

    @staticmethod
    def forward(ctx, x, hot):
        ctx.save_for_backward(hot)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (hot,) = ctx.saved_tensors
        return torch.where(hot, math.inf, gradient), None


class Middle(nn.Module):
    def __init__(self, explodes: bool):
        super().__init__()
        self.linear, self.explodes = nn.Linear(16, 16), explodes

    def forward(self, x: Tensor, *, hot: Tensor) -> Tensor:
        z = torch.tanh(self.linear(x))
        return Explode.apply(z, hot) if self.explodes else z


class Net(nn.Module):
    def __init__(self, residual: bool, explodes: bool):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList([Middle(False), Middle(explodes), Middle(False)])
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        hot = x[:, :1] > HOT
        h = self.first(x)
        for block in self.blocks:
            h = h * self.residual + block(h, hot=hot)
        return self.last(h)


def sequential() -> Task:
    return make_task(make_model=lambda: Net(residual=False, explodes=True))


def residual() -> Task:
    return make_task(make_model=lambda: Net(residual=True, explodes=True))


def healthy() -> Task:
    return make_task(make_model=lambda: Net(residual=True, explodes=False))


def small_char_lm() -> Task:
    """The built-in language model, narrower and evaluated on less."""
    return char_lm(context=32, width=48, valid_sequences=32)
