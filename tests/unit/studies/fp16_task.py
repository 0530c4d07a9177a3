"""Tasks in which one named layer makes infinities on the way back, for some samples only."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadygrad.tasks import Task, TensorSamples
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
# For every sample.
always = partial(make_task, make_model=lambda: Net(residual=True, explodes=True, hot=-math.inf))


def batch_norm() -> Task:
    """A sample's loss depends on the others in its batch."""
    return make_task(
        make_model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    )


def noisy() -> Task:
    """Random numbers in the loss do not touch the gradients."""
    task = healthy()
    return replace(
        task,
        per_sample_loss=lambda m, b: task.per_sample_loss(m, b) + torch.rand(len(b[0])),
    )


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


def samples(n: int, seed: int, target: Callable[[Tensor], Tensor]) -> TensorSamples:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorSamples((x, target(x)))


def hinge() -> Task:
    """The more it has learnt, the fewer samples have any gradient."""

    def side(x: Tensor) -> Tensor:
        return torch.sign(x[:, :1] + 0.3 * x[:, 1:2])

    return make_task(
        make_model=wide_net,
        train=samples(4096, 0, side),
        valid=samples(64, 1, side),
        batch_size=32,
        lr=0.002,
        per_sample_loss=lambda m, b: functional.relu(1 - b[1] * m(b[0])).mean(dim=1),
    )


def spiky() -> Task:
    """Nothing is wrong; a few targets are large."""

    def target(x: Tensor) -> Tensor:
        rare = torch.arange(len(x))[:, None] % 100 == 7
        return torch.tanh(x[:, :1]) + torch.where(rare, 2000.0, 0.0)

    return make_task(make_model=wide_net, train=samples(4096, 0, target), lr=1e-3)


class Faint(torch.autograd.Function):
    """Identity; the gradient becomes much smaller."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0**-18


class Step(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Faint.apply(x)


class HalfTable(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


class Padded(nn.Module):
    """Of forty positions one is no padding."""

    def __init__(self):
        super().__init__()
        self.table, self.head = HalfTable(2000, 8), nn.Linear(8, 1)
        self.first, self.second = Step(), Step()

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :1].abs() * 500).long().clamp(max=1999).repeat(1, 40)
        mask = torch.zeros(1, 40, 1, dtype=torch.half)
        mask[0, 0] = 1
        return self.head((self.second(self.first(self.table(tokens))) * mask).sum(1))


padded = partial(make_task, make_model=Padded)


def small_char_lm() -> Task:
    """The built-in language model, narrower and evaluated on less."""
    task = char_lm(context=32, width=48)
    return replace(task, valid=TensorSamples(task.valid.batch(torch.arange(0, 256, 8))))
