"""Two small nets with a place for a fault, the faults that are planted there, and their report.

Each fault says who is to blame, by its kind and by a name in which ``{}`` is the block around it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from steadygrad.watch import GradientWatch
from tests.unit.nets import Net

WIDTH = 8


class Block(nn.Module):
    """A residual block, ``x + outer(place(tanh(inner(norm(x)))))``."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.place, self.outer = nn.Identity(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(self.place(torch.tanh(self.inner(self.norm(x)))))


class Attention(nn.Module):
    """One head; ``mask`` is true where a position may look."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = torch.ones(4, 4).tril().bool()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, -torch.inf)
        return self.out(torch.softmax(scores, -1) @ v)


class TransformerBlock(Block):
    """Attention, then the residual block."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x):
        return super().forward(x + self.attention(self.attention_norm(x)))


class Stack(nn.Module):
    """An embedding, blocks and a head, in a transformer's way."""

    def __init__(self, block):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NETS = {"residual": Block, "transformer": TransformerBlock}


def make(net):
    """A net with fixed weights, and the prefix of its faulty block."""
    torch.manual_seed(0)
    return Stack(NETS[net]), "blocks.1."


def data(seed=0):
    """Inputs and targets, both with shape ``(2, 4, 4)``."""
    x, y = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(seed))
    return x, y


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e30 * 1e30


def masked_row(x):
    """Attention in which one position may look at nothing."""
    mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device)
    mask[1] = False
    scores = (x @ x.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ x


class Module(Net):
    """Its function takes the input alone."""

    def forward(self, x):
        return self.function(x)


def root_of_zero(x):
    """Zeros, whose gradient is not finite."""
    return (x * 0).abs().sqrt()


def with_root(x):
    """The same values, whose gradient is not finite."""
    return x + root_of_zero(x)


def first_zero(x):
    """The first feature as an exact zero, which still has a gradient."""
    return torch.cat([x[..., :1] * 0, x[..., 1:].abs() + 1], -1)


def plant(function):
    """Puts a module into the place."""

    def put(model, prefix):
        model.get_submodule(prefix.rstrip(".")).place = Module(function)

    return put


def spoil(leaf, value):
    def put(model, prefix):
        with torch.no_grad():
            model.get_parameter(prefix + leaf)[2].fill_(value)

    return put


def nothing(model, prefix):
    pass


def mse(y, target):
    return F.mse_loss(y, target)


def log_of_zero(y, target):
    return -torch.log(y * 0).mean()


# The first pass follows the graph and later ones need not; nobody may wait for a device.
MODES = {"first": (0, False), "later": (1, False), "device": (0, True)}


def watching(model, mode="first"):
    """A watch in its first pass, in a later one, or as on a device that it must not wait for."""
    watch = GradientWatch(model)
    watch.batches, watch.shared.deferred = MODES[mode]
    return watch


def step(model, loss=mse, seed=0):
    x, y = data(seed)
    loss(model(x), y).backward()


def culprit(watch):
    found = watch.report()
    return found and (found.kind, found.name)


# name: how it is planted, the loss, the kind and the culprit.
FAULTS = {
    "overflow in the forward pass": (plant(lambda x: x * 1e30 * 1e30), mse, "output", "{}place"),
    "overflow by large weights": (spoil("outer.weight", 3e38), mse, "output", "{}outer"),
    "overflow in backward only": (plant(Backward.apply), mse, "gradient", "{}place"),
    "square root of zero": (plant(lambda x: first_zero(x).sqrt()), mse, "gradient", "{}place"),
    "log of zero": (plant(lambda x: first_zero(x).log()), mse, "output", "{}place"),
    "a row that is masked": (plant(masked_row), mse, "output", "{}place"),
    "root of zero beside a sum": (plant(lambda x: x + (x * 0).sqrt()), mse, "gradient", "{}place"),
    "log of zero in the loss": (nothing, log_of_zero, "loss", ""),
    "a weight that became NaN": (spoil("inner.weight", torch.nan), mse, "weight", "{}inner.weight"),
    "an infinite bias": (spoil("outer.bias", torch.inf), mse, "weight", "{}outer.bias"),
    "a root behind a saturated gate": (
        # sigmoid(inf) is 1: all outputs after it are finite, the gradient is not.
        plant(lambda x: torch.sigmoid((x * 0).rsqrt())), mse, "gradient", "{}place"),
}  # fmt: skip
