"""
One of my losses drowns the others
==================================

A weight on a loss says little about who is heard: gradients of different losses may differ a
hundredfold, and change while the model learns. ``LossBalancer`` gives each loss the *share of the
gradient* that you ask for.

Here an autoencoder of handwritten digits learns from three losses at once: its pixels' squared
error, the difference of a frozen classifier's features, and a critic's opinion. The same weights
are used twice, plainly and balanced; a third run has the first loss alone, to see what the others
cost.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad import LossBalancer
from steadygrad.tasks import load_task

torch.set_num_threads(1)  # tensors this small only wait for each other
WEIGHTS = {"reconstruction": 6.0, "perceptual": 3.0, "adversarial": 1.0}
STEPS, BATCH = 400, 64
COLORS = {
    "asked for": "0.75",
    "reconstruction alone": "0.45",
    "weighted": "#e69f00",
    "balanced": "#0072b2",
}


def train_classifier() -> nn.Module:
    """A classifier whose features the perceptual loss compares; frozen from then on."""
    task = load_task("digits-classifier")
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters(), 0.02)
    for _ in range(300):
        batch = task.train.batch(torch.randint(len(task.train), (BATCH,)))
        optimizer.zero_grad()
        task.per_sample_loss(model, batch).mean().backward()
        optimizer.step()
    return model.requires_grad_(False)[:-1]


def make_critic() -> nn.Module:
    """Real or not? One number for each image."""
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def critic_step(
    critic: nn.Module, optimizer: torch.optim.Optimizer, real: Tensor, fake: Tensor
) -> None:
    """The critic's own step, on the hinge loss."""
    optimizer.zero_grad()
    (F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()).backward()
    optimizer.step()


# %%
# The loop
# --------
#
# Two lines are the balancer's: ``fork`` gives each loss its own copy of the output, and one
# ordinary ``backward()`` balances what arrives at them. ``balancer.metrics`` has the shares before
# and after.


def run(features: nn.Module, weights: dict[str, float], balance: bool) -> dict[str, Tensor]:
    """Trains one autoencoder; mean shares of the three losses, and its error on unseen images."""
    torch.manual_seed(0)
    task = load_task("digits-autoencoder")
    model, critic = task.make_model(), make_critic()
    optimizer = task.make_optimizer(model.parameters(), task.lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    balancer = LossBalancer(weights, balance_grads=balance, ema_decay=0.98)
    shares, norms = [], []
    for step in range(STEPS):
        x = task.train.batch(torch.randint(len(task.train), (BATCH,)))
        y = model(x)
        critic_step(critic, critic_optimizer, x, y.detach())
        ys = balancer.fork(y)
        wanted = features(x.view(-1, 1, 8, 8))
        loss = (
            F.mse_loss(ys["reconstruction"], x)
            + F.mse_loss(features(ys["perceptual"].view(-1, 1, 8, 8)), wanted)
            - critic(ys["adversarial"]).mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= STEPS // 4:
            shares.append([balancer.metrics[f"share_after_{name}"] for name in WEIGHTS])
            norms.append([balancer.metrics[f"norm_{name}"] for name in WEIGHTS])
    with torch.no_grad():
        x = task.valid.batch(torch.arange(len(task.valid)))
        y = model(x)
        seen = F.mse_loss(features(y.view(-1, 1, 8, 8)), features(x.view(-1, 1, 8, 8)))
    return {
        "shares": torch.tensor(shares).mean(0),
        "norms": torch.tensor(norms).mean(0),
        "pixels": F.mse_loss(y, x),
        "features": seen,
    }


# %%
# Three runs
# ----------

torch.manual_seed(0)
features = train_classifier()
alone = {**dict.fromkeys(WEIGHTS, 0.0), "reconstruction": 1.0}
found = {
    "reconstruction alone": run(features, alone, balance=False),
    "weighted": run(features, WEIGHTS, balance=False),
    "balanced": run(features, WEIGHTS, balance=True),
}
target = torch.tensor(list(WEIGHTS.values())) / sum(WEIGHTS.values())


def row(numbers: Tensor, digits: int = 3) -> str:
    return "  ".join(f"{x:.{digits}f}" for x in numbers.tolist())


print(f"losses: {', '.join(WEIGHTS)}")
print(f"share asked for       {row(target)}")
for name, result in found.items():
    print(
        f"{name:21} {row(result['shares'])}   raw norms {row(result['norms'], 5)}   error of "
        f"pixels {result['pixels']:.5f}, of features {result['features']:.4f}"
    )

# %%
# With weights alone the shares are what they happen to be; balanced, they are those asked for. The
# bars on the right show the price: a loss that is heard more improves, another gets worse.

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
shares = {"asked for": target, **{name: found[name]["shares"] for name in ("weighted", "balanced")}}
for offset, (name, values) in enumerate(shares.items()):
    places = [i + 0.27 * (offset - 1) for i in range(3)]
    left.bar(places, values.tolist(), width=0.25, label=name, color=COLORS[name])
left.set_xticks(range(3), list(WEIGHTS))
left.set_ylabel("share of the gradient's norms")
left.legend(frameon=False)
for axis, key in ((middle, "pixels"), (right, "features")):
    names = [name.replace(" ", "\n") for name in found]
    axis.bar(names, [run[key].item() for run in found.values()], color=[COLORS[n] for n in found])
    axis.set_ylabel(f"error of {key}, unseen images")

# %%
# What to do with the answer
# --------------------------
#
# - Choose shares by what you want, not by the losses' sizes: ``{"reconstruction": 6, "perceptual":
#   3, "adversarial": 1}`` gives the pixels 60 %.
# - Watch ``balancer.metrics["share_before_..."]`` in a run without balancing first: perhaps your
#   weights do what you thought.
# - A loss with a noisy gradient is heard in full all the same. Give it a small share.
