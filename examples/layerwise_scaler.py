"""float16 with a scale for each layer: found by measuring, and who is to blame for an overflow.

A tanh network is trained under float16 autocast. Inside its first layers gradients are very small,
inside the third they are large; each layer's scale is found from its measured exponents.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad.scale import LayerwiseGradScaler
from steadygrad.tasks import load_task

STEPS = 100


class Gate(nn.Module):
    """``tanh(c * linear(x))``, begun like a plain layer: gradients inside are c times as large."""

    def __init__(self, inputs: int, outputs: int, c: float) -> None:
        super().__init__()
        self.linear, self.c = nn.Linear(inputs, outputs), c
        with torch.no_grad():
            nn.init.xavier_normal_(self.linear.weight).div_(c)
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Features with shape ``(n, outputs)``."""
        return torch.tanh(self.c * self.linear(x))


def make_model() -> nn.Module:
    """Small gradients in the first two layers, large ones in the last."""
    torch.manual_seed(0)
    gates = [Gate(64, 32, 2.0**-14), Gate(32, 32, 2.0**-14), Gate(32, 32, 2.0**14)]
    return nn.Sequential(*gates, nn.Linear(32, 10))


def train(model: nn.Module, scaler: LayerwiseGradScaler) -> float:
    """Trains on all digits at once, and returns the accuracy on unseen ones."""
    task = load_task("digits-classifier")
    x, y = task.train.batch(torch.arange(len(task.train)))
    groups = [
        {"params": layer.parameters(), "lr": 1e-2 / getattr(layer, "c", 1.0)}
        for layer in model.children()
    ]
    optimizer = torch.optim.Adam(groups, eps=1e-30)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x.flatten(1)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    x, y = task.valid.batch(torch.arange(len(task.valid)))
    with torch.no_grad():
        return (model(x.flatten(1)).argmax(1) == y).float().mean().item()


def blame(model: nn.Module, scaler: LayerwiseGradScaler) -> list[str]:
    """Lets a gradient overflow within the second layer, and asks who it was."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = model[1].linear.register_full_backward_hook(lambda m, i, o: (i[0] * torch.inf,))
    loss = model(torch.randn(4, 64)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # left out
    scaler.update()
    handle.remove()
    return scaler.culprits()


def main() -> None:
    """Trains, and shows what was found."""
    torch.set_num_threads(1)
    model = make_model()
    scaler = LayerwiseGradScaler(model, "auto")
    print(f"accuracy on unseen digits:  {train(model, scaler):.3f}")
    scales = {name or "loss": f"2^{math.log2(s):.0f}" for name, s in scaler.get_scales().items()}
    print(f"scales found: {scales}")
    print(f"overflow made in layer 1, attributed to layer {', '.join(blame(model, scaler))}")


if __name__ == "__main__":
    main()
