"""Finds the module that made the gradient non-finite, norms by part, and faulty accumulation."""

import torch
import torch.nn.functional as F
from torch import nn

from steadygrad.watch import GradientWatch, check_accumulation


class Normalised(nn.Module):
    """Divides by the norm, without an epsilon: the gradient at zero is 0 / 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """To a length below one."""
        return x / (1 + x.pow(2).sum(-1, keepdim=True).sqrt())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), Normalised(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters())
watch = GradientWatch(model)
for step in range(20):
    x, labels = torch.randn(16, 8), torch.randint(3, (16,))
    if step == 12:
        x[3] = 0.0  # an empty sample
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    if step == 0:
        print({name: round(value, 3) for name, value in watch.norms().items()})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm.isfinite():
        optimizer.step()
    else:
        print(watch.report())
    optimizer.zero_grad()


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def my_window(micro_batches: list[dict[str, torch.Tensor]]) -> None:
    for micro in micro_batches:
        (loss_fn(model, micro) / 4).backward()  # the setting, not what the window has


batch = {"x": torch.randn(16, 8), "labels": torch.randint(3, (16,))}
print(check_accumulation(model, loss_fn, batch, accumulate=my_window, micro_batches=4))
