"""
Which step: AdamW, ScaledAdam, LANS or LAMB?
============================================

They differ in what a step is relative to. AdamW moves every weight by about the learning rate.
ScaledAdam moves a tensor by the learning rate times *its own size* (root mean square), and learns
sizes as well; LANS and LAMB move it by the rate times its norm. So their learning rates are other
numbers, and comparing them at one rate says nothing.

Here each is tried at seven rates on the digits autoencoder, with one linear warm-up and decay for
all.
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import nn

from steadygrad.optim import LAMB, LANS, ScaledAdam
from steadygrad.tasks import load_task

torch.set_num_threads(1)  # tensors this small only wait for each other
task = load_task("digits-autoencoder")
unseen = task.valid.batch(torch.arange(len(task.valid)))
STEPS, BATCH = 150, 64

# A name, its class, and the rate in the middle of the ladder.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "AdamW": (torch.optim.AdamW, 6e-3),
    "ScaledAdam": (ScaledAdam, 1e-1),
    "LANS": (LANS, 3e-2),
    "LAMB": (LAMB, 3e-2),
}


# %%
# The loop is torch's own: the optimizers take parameters or groups, and have ``foreach`` and
# ``fused`` as torch's have.


def train(make: Callable[..., torch.optim.Optimizer], lr: float, seed: int) -> float:
    """Loss on unseen images after the whole schedule."""
    torch.manual_seed(seed)
    model = task.make_model()
    optimizer = make(model.parameters(), lr=lr)
    warmup = STEPS // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (STEPS - step) / (STEPS - warmup))
    )
    for _ in range(STEPS):
        x = task.train.batch(torch.randint(len(task.train), (BATCH,)))
        task.per_sample_loss(model, x).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss_of(model)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    return task.per_sample_loss(model, unseen).mean().item()


factors = [2.0**i for i in range(-3, 4)]
found = {}
for name, (make, middle) in OPTIMIZERS.items():
    found[name] = [train(make, middle * factor, seed=0) for factor in factors]
    best = min(range(len(factors)), key=lambda i: found[name][i])
    print(f"{name:11} best rate {middle * factors[best]:.4f}, loss {found[name][best]:.4f}")

# %%
# The lowest point of each curve is what that optimizer can do here; its width is how much a wrong
# rate costs. A curve whose lowest point is at an end needs a longer ladder.

figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
for name, losses in found.items():
    axis.plot([OPTIMIZERS[name][1] * factor for factor in factors], losses, "o-", label=name)
axis.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="loss, unseen images")
axis.legend(frameon=False)

# %%
# How much of it is luck? Three more seeds at each best rate:

for name, (make, middle) in OPTIMIZERS.items():
    best = min(range(len(factors)), key=lambda i: found[name][i])
    again = torch.tensor([train(make, middle * factors[best], seed) for seed in (1, 2, 3)])
    print(f"{name:11} {again.mean():.4f}, standard deviation between seeds {again.std():.4f}")

# %%
# What to do with the answer
# --------------------------
#
# - Differences as small as those between seeds are none. ``steadygrad compare`` does the whole of
#   this on your own task: the same number of trials for each, two lengths of training, fresh paired
#   seeds, an interval, and "cannot tell" where it cannot.
# - ScaledAdam is what icefall's Zipformer is trained with, LANS and LAMB are made for large
#   batches. On the built-in tasks each is better somewhere and worse elsewhere; the tables are on
#   their pages.
