"""Measures the gradient noise scale in an ordinary training loop.

The batch is made of micro-batches, as under gradient accumulation; their gradients already hold
everything the estimate needs.
"""

import torch
from torch import nn

from steadygrad.noise import NoiseScale

MICRO, COUNT = 16, 4


def main(steps: int = 300) -> float:
    """Trains a small regression and returns the last noise scale."""
    torch.manual_seed(0)
    truth = torch.randn(32, 1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, decay=0.98, samples=MICRO)

    for step in range(1, steps + 1):
        for _ in range(COUNT):
            x = torch.randn(MICRO, 32)
            y = x @ truth + torch.randn(MICRO, 1)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / COUNT).backward()
        noise.step()  # before clipping: the measurement is of the true gradient
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

        if step % 50 == 0:
            got = noise.estimate()
            print(
                f"step {step:4d}  loss {loss.item():6.3f}  noise scale {got.value.item():7.1f} "
                f"[{got.low.item():.1f}, {got.high.item():.1f}]"
            )
    return noise.estimate().value.item()


if __name__ == "__main__":
    main()
