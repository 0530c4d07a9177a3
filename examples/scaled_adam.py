"""ScaledAdam in a training loop: clipping by the median, Eden, and a report of what stands out.

The optimizer takes named parameters, so that its diagnostics can say which one dominates.
"""

import io

import torch
from torch import Tensor, nn

from steadygrad.optim import Eden, ScaledAdam

STEPS, EPOCH, BATCH = 300, 100, 256


def batch(teacher: nn.Module) -> tuple[Tensor, Tensor]:
    """Samples and their noisy labels."""
    x = torch.randn(BATCH, 16)
    with torch.no_grad():
        return x, (4 * teacher(x) + torch.randn(BATCH, 4)).argmax(1)


def main() -> float:
    """Trains a small classifier and returns its last loss."""
    torch.manual_seed(0)
    teacher = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = ScaledAdam(model.named_parameters(), lr=0.03, clipping_scale=2.0)
    schedule = Eden(optimizer, lr_batches=200, lr_epochs=4, warmup_batches=50)

    for step in range(STEPS):
        schedule.step_epoch(step // EPOCH)
        x, labels = batch(teacher)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % EPOCH == EPOCH - 1:
            (found,) = optimizer.diagnostics(top=1)  # needs the gradients, and waits for the device
            ((name, share),) = found["dominance"].items()
            print(
                f"step {step + 1}  loss {loss.item():.3f}  clipping threshold "
                f"{found['threshold']:.3f}  {found['clipped']:.0%} clipped  "
                f"largest share of the norm: {name} {share:.0%}"
            )
        optimizer.zero_grad()

    # A checkpoint holds no pickled objects, and every tensor comes back in its own type.
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = ScaledAdam(model.named_parameters(), lr=0.03, clipping_scale=2.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    return loss.item()


if __name__ == "__main__":
    main()
