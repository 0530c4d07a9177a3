"""Measures the gradient noise scale in an ordinary training loop, and follows it.

The batch is made of micro-batches, as under gradient accumulation; their gradients already hold
everything the estimate needs. `BatchSizeController` turns estimates into their number.
"""

import torch
from torch import nn

from steadygrad.noise import BatchSizeController, NoiseScale

MICRO = 16


def main(steps: int = 300) -> int:
    """Trains a small regression and returns the final number of micro-batches a step."""
    torch.manual_seed(0)
    truth = torch.randn(32, 1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, decay=0.98, samples=MICRO)
    controller = BatchSizeController(MICRO, count=2, min_count=2, max_count=16)

    for step in range(1, steps + 1):
        for _ in range(controller.count):
            x = torch.randn(MICRO, 32)
            y = x @ truth + torch.randn(MICRO, 1)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / controller.count).backward()
        noise.step()  # before clipping: the measurement is of the true gradient
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

        if step % 50 == 0:
            got = noise.estimate()
            controller.update(got)
            print(
                f"step {step:4d}  loss {loss.item():6.3f}  noise scale {got.value.item():7.1f} "
                f"[{got.low.item():.1f}, {got.high.item():.1f}]  "
                f"next batch {controller.batch_size}"
            )
    return controller.count


if __name__ == "__main__":
    main()
