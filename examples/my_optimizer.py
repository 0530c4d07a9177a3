"""An optimizer of your own beside AdamW, as a function of the model and the learning rate.

steadygrad compare my_task.py:make_task --add my_optimizer.py:make_lion

Here Lion (Chen et al. 2023): each weight moves by the learning rate, in the direction that the sign
of a momentum says.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BETA1, BETA2 = 0.9, 0.99


class Lion(Optimizer):
    """Steps by the signs of an average of momentum and gradient."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(group["lr"] * momentum.lerp(p.grad, 1 - BETA1).sign())
                    momentum.lerp_(p.grad, 1 - BETA2)


def make_lion(model: nn.Module, lr: float) -> Lion:
    return Lion(model.parameters(), lr=lr)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, inputs = nn.Linear(8, 1), torch.randn(256, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    optimizer = make_lion(model, lr=0.01)
    for _ in range(200):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after 200 steps of Lion: {loss.item():.4f}")
