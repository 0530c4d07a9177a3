"""A model with every layer that per-example norms cover, and a loop to compare them with."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steadygrad.noise.per_example import ExampleNorms

# float64 throughout unless a test says otherwise; sums have at most some thousand terms.
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
BATCH, WIDTH, ROWS = 4, 6, 7
# T (K + L) against K L: at 2 positions Gram matrices are cheaper, at 14 the gradients themselves.
POSITIONS = [2, 14]

Norms = dict[str, Tensor]


class Tiny(nn.Module):
    """Every supported kind of layer; ``tie``, ``reuse`` and ``mode`` bend it."""

    def __init__(self, tie: bool = False, reuse: int = 1, mode: str = "") -> None:
        super().__init__()
        self.reuse, self.mode = reuse, mode
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.place = nn.Embedding(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 4, 3, padding=1)
        self.image = nn.Conv2d(1, 2, 2, bias=False)
        self.head = nn.Linear(WIDTH, ROWS)
        self.small = nn.Linear(2, 1)
        if tie:
            self.head.weight = self.embed.weight

    def block(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.mix(self.norm(x)), inplace=True)
        return x.add_(1) * 0.5

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows) + self.place(torch.arange(rows.shape[1]).expand(rows.shape))
        for _ in range(self.reuse):
            if self.mode:
                x = checkpoint(self.block, x, use_reentrant=self.mode == "reentrant")
            else:
                x = self.block(x)
        waves = self.conv(self.rms(x).transpose(1, 2)).relu_()
        dots = self.image(waves.unsqueeze(1)).mean((2, 3))
        return self.head(x).flatten(1).sum(1).tanh() + self.small(dots).squeeze(1)


def rows_of(positions: int, batch: int = BATCH) -> Tensor:
    return torch.randint(0, ROWS, (batch, positions))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum() / BATCH


def looped(model: nn.Module, batch: Tensor, loss: Callable[..., Tensor] = loss_of) -> Norms:
    """Reference: each example alone, through an untapped copy."""
    model, sums = copy.deepcopy(model), {}
    for i in range(len(batch)):
        model.zero_grad()
        loss(model, batch[i : i + 1]).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad.square().sum()
    return sums


def measured(
    taps: ExampleNorms, model: nn.Module, batch: Tensor, loss: Callable[..., Tensor] = loss_of
) -> Norms:
    value = loss(model, batch)
    with taps.recording(len(batch)) as found:
        value.backward()
    return found


def gradients(model: nn.Module) -> Norms:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Norms, expected: Norms, **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            **(tolerance or TIGHT),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_measures(model: nn.Module, batch: Tensor, loss: Callable[..., Tensor] = loss_of) -> None:
    """Norms equal the loop's, and training sees the gradients that it would see untapped."""
    expected, plain = looped(model, batch, loss), copy.deepcopy(model)
    loss(plain, batch).backward()
    taps = ExampleNorms(model)
    # The first pass is audited, the second is not.
    for _ in range(2):
        model.zero_grad()
        assert_same(measured(taps, model, batch, loss), expected)
        assert_same(gradients(model), gradients(plain))
