"""A small model, batches, and a loop as users write it."""

import torch
from torch import nn

from steadygrad.scale import LayerwiseGradScaler

# Scales inside scales.
SCALES = {"a": 2.0**10, "b": 2.0**7, "b.1": 2.0**3}


class Model(nn.Module):
    """``a``, ``b`` with something chosen inside, and a ``head`` that is not chosen."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.head(h + torch.tanh(self.b(h)))


class Shrink(nn.Linear):
    """Its input's gradient is some 2**10 times smaller than its output's."""

    def forward(self, x):
        return super().forward(x) * 2.0**-10


def make(dtype=torch.float32, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = Model().to(dtype)
    return model, optimizer(model.parameters(), **{"lr": 0.1, **options})


def batch(step, n=6):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(n, 4, generator=draw), torch.randn(n, 2, generator=draw)


def loss_on(model, step):
    x, y = batch(step)
    return (model(x) - y).square().mean()


class Poison:
    """Makes a gradient inside one module not finite, in the next backward pass."""

    def __init__(self, module, value=torch.inf):
        self.value, self.active = value, True
        module.register_forward_hook(self.hook)

    def hook(self, module, args, output):
        if self.active and output.requires_grad:
            output.register_hook(lambda gradient: gradient + self.value)


def end_step(optimizer, scaler):
    scaler.step(optimizer)
    scaler.update()


def take_step(optimizer, scaler, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    end_step(optimizer, scaler)


def train_step(model, optimizer, scaler, step):
    take_step(optimizer, scaler, loss_on(model, step))


def unscaled_gradients(model, scales, loss_of, **options):
    """Gradients of a scaled loss of the model, unscaled."""
    scaler = LayerwiseGradScaler(model, scales, **options)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    return {name: p.grad for name, p in model.named_parameters()}


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
