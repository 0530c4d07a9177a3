"""LANS at a large batch: bfloat16 weights with float32 masters, and its own schedule.

Biases and norms are kept out of the weight decay by their names.
"""

import torch
from torch import Tensor, nn

from steadygrad.optim import LANS, WarmupHoldDecay, param_groups

STEPS, BATCH = 150, 1024


def batch(teacher: nn.Module) -> tuple[Tensor, Tensor]:
    """Samples and their noisy labels."""
    x = torch.randn(BATCH, 16)
    with torch.no_grad():
        labels = (4 * teacher(x) + torch.randn(BATCH, 4)).argmax(1)
    return x.bfloat16(), labels


def main() -> float:
    """Trains a small classifier and returns its last loss."""
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 4))
    model.bfloat16()
    groups = param_groups(model, {"*.bias": {"weight_decay": 0.0}, "2.*": {"weight_decay": 0.0}})
    # A step is at most 3 % of a weight's norm: 150 of them must get somewhere.
    optimizer = LANS(groups, lr=0.03)
    schedule = WarmupHoldDecay(optimizer, total_steps=STEPS, warmup=0.1, hold=0.3)

    for step in range(STEPS):
        x, labels = batch(teacher)
        loss = nn.functional.cross_entropy(model(x).float(), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            found = optimizer.diagnostics(top=1)[0]  # needs the gradients, and waits
            ((name, ratio),) = found["trust_ratio"].items()
            print(
                f"step {step + 1:3d}  loss {loss.item():.3f}  largest trust ratio: {name} "
                f"{ratio:.3f}  steps left out: {found['skipped']}"
            )
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
