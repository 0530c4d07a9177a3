"""Tasks in which one named layer makes infinities on the way back, for some samples only."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from steadygrad.tasks import Task, TensorSamples
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
    def __init__(self, residual: bool, explodes: bool, hot: float = HOT):
        super().__init__()
        self.hot = hot
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList([Middle(False), Middle(explodes), Middle(False)])
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        hot = x[:, :1] > self.hot
        h = self.first(x)
        for block in self.blocks:
            h = h * self.residual + block(h, hot=hot)
        return self.last(h)


class Loud(Middle):
    """Overflows in the forward pass, for hot samples."""

    def forward(self, x: Tensor, *, hot: Tensor) -> Tensor:
        z = self.linear(x)
        return torch.where(hot, 6e4 * (z.abs() + 2), z)


def overflowing(hot: float = HOT) -> Task:
    """A module in the middle whose output is too large for float16, for some samples."""

    def make() -> nn.Module:
        net = Net(residual=True, explodes=False, hot=hot)
        net.blocks[1] = Loud(explodes=False)
        return net

    return make_task(make_model=make)


always_overflowing = partial(overflowing, hot=-math.inf)
sequential = partial(make_task, make_model=lambda: Net(residual=False, explodes=True))
residual = partial(make_task, make_model=lambda: Net(residual=True, explodes=True))
healthy = partial(make_task, make_model=lambda: Net(residual=True, explodes=False))


def wide_net() -> nn.Module:
    first, middle = nn.Linear(8, 32), nn.Linear(32, 32)
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), nn.Linear(32, 1))


plain = partial(make_task, make_model=wide_net)


def unlabelled() -> Task:
    """Some labels are NaN."""
    x, y = plain().train.batch(torch.arange(4096))
    y[::7] = math.nan
    return replace(plain(), train=TensorSamples((x, y)))


def lossless() -> Task:
    """The loss is not finite for some samples, whose data are."""

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean(1) / (batch[0][:, 0] < HOT)

    return replace(plain(), per_sample_loss=losses)


def compiled() -> Task:
    """The same by the compiler, which gives up after a number of other hooks."""
    return make_task(make_model=lambda: torch.compile(wide_net(), backend="eager", fullgraph=True))
