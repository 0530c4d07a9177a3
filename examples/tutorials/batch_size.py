"""
How noisy is my gradient?
=========================

A larger batch takes fewer steps and more samples. The **gradient noise scale** says where, for one
step of gradient descent, the exchange stops being good: below it, twice the batch nearly halves the
steps; above it, twice the batch mostly costs twice the samples. It can be read off gradients that
training computes anyway. It shows a trend, and is no batch size to train at: with Adam larger
batches have helped far above it, so that question is for ``steadygrad advise``, which trains.

The model here is an autoencoder of scikit-learn's handwritten digits. A step has eight
micro-batches of eight images.
"""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import torch
from torch import nn

from steadygrad import NoiseScale
from steadygrad.tasks import load_task

torch.set_num_threads(1)  # tensors this small only wait for each other
MICRO, COUNT, STEPS = 8, 8, 400
task = load_task("digits-autoencoder")


def batches(size: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Random batches without end."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield task.train.batch(torch.randint(len(task.train), (size,), generator=draw))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return task.per_sample_loss(model, x).mean()


# %%
# Measure it in your own loop
# ---------------------------
#
# Two lines are new: one that makes the estimator, and ``noise.step()`` after the last backward
# pass, before gradients are clipped.

torch.manual_seed(0)
model = task.make_model()
optimizer = task.make_optimizer(model.parameters(), task.lr)
noise = NoiseScale(model, samples=MICRO)
seen = []

for step, batch in zip(range(STEPS), batches(MICRO * COUNT), strict=False):
    for micro in batch.split(MICRO):
        (loss_of(model, micro) / COUNT).backward()
    noise.step()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        seen.append((step + 1, noise.estimate().as_dict()))

_, last = seen[-1]
low, high = last["low"], last["high"]
print(f"noise scale {last['value']:.0f} images, 95 % interval {low:.0f} to {high:.0f}")

# %%
# It grows while the model learns: gradients shrink, their noise does not. An interval without an
# upper end means that the data cannot tell yet.

steps = [step for step, _ in seen]
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
axis.plot(steps, [found["value"] for _, found in seen], label="noise scale")
axis.fill_between(
    steps, *([found[key] for _, found in seen] for key in ("low", "high")), alpha=0.25
)
axis.axhline(MICRO * COUNT, color="0.4", linestyle="--", label="batch size in use")
axis.set(xlabel="step", ylabel="images", yscale="log")
axis.legend(frameon=False)

# %%
# Does it say the truth?
# ----------------------
#
# Train to the same loss on unseen images at several batch sizes, with the learning rate in
# proportion to the root of the batch size, as suits Adam, and count steps.

unseen = task.valid.batch(torch.arange(len(task.valid)))


@torch.no_grad()
def validation(model: nn.Module) -> float:
    return loss_of(model, unseen).item()


TARGET = 1.1 * validation(model)


def steps_to_target(size: int) -> int:
    """Steps until the loss on unseen images is below the target."""
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters(), task.lr * (size / (MICRO * COUNT)) ** 0.5)
    for step, batch in enumerate(batches(size), 1):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and (validation(model) < TARGET or step >= 8000):
            return step
    raise AssertionError


SIZES = [4, 8, 16, 32, 64, 128, 256, 512]
needed = [steps_to_target(size) for size in SIZES]
for size, count in zip(SIZES, needed, strict=True):
    print(f"batch {size:4d}: {count:5d} steps, {count * size:7,} images")

# %%
# Steps fall in proportion to the batch at first, and then no more; from there on images are wasted.

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
left.plot(SIZES, needed, "o-")
left.set(xscale="log", yscale="log", xlabel="batch size", ylabel="steps")
right.plot(SIZES, [count * size for size, count in zip(SIZES, needed, strict=True)], "o-")
right.set(xscale="log", yscale="log", xlabel="batch size", ylabel="images")
for axis in (left, right):
    axis.axvspan(low, min(high, SIZES[-1]), alpha=0.2, label="noise scale")
left.legend(frameon=False)

# %%
# What to do with the answer
# --------------------------
#
# - A noise scale well above your batch size: a larger batch is worth a try, if you have the devices
#   for it.
# - Well below: more samples change the gradient little. Adam may gain by them all the same.
# - It is of this model at this moment, and assumes that steps are as good as they can be. Before a
#   long run ask ``steadygrad advise``, which trains at larger batch sizes and compares where
#   they end.
