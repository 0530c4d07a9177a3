"""The noise scale from per-sample losses, for a loop without micro-batches.

The estimator's two backward passes replace the loop's own: `fill_grad=True` leaves the training
gradient in `.grad`.
"""

import torch
from torch import nn

from steadygrad.noise import SplitBatchNoiseScale


def main(steps: int = 200) -> float:
    """Trains a small classifier and returns the last estimate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    estimator = SplitBatchNoiseScale(update_rate=0.02)
    centers = torch.randn(4, 16)

    for step in range(1, steps + 1):
        labels = torch.randint(4, (64,))
        x = centers[labels] + 2 * torch.randn(64, 16)
        losses = nn.functional.cross_entropy(model(x), labels, reduction="none")
        noise_scale = estimator(losses, model, fill_grad=True)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            got = estimator.estimate()
            said = f"{got.value:.0f} samples, 95 % interval {got.low:.0f} to {got.high:.0f}"
            said = said if got.resolved else f"unresolved, more than {got.low:.0f} samples"
            print(f"step {step:4d}  loss {losses.mean().item():.3f}  noise scale {said}")
    return noise_scale.item()


if __name__ == "__main__":
    main()
