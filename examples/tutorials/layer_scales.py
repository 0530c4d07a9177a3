"""
One loss scale for all layers?
==============================

float16 holds 40 binades: powers of two from 2**-24 to 2**15. A loss scale moves the gradients of
all layers by one factor, so it works only if all of them fit in at once. Mostly they do. Here is a
network whose gradients do not, what torch's ``GradScaler`` makes of it, and what a scale for each
layer does.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad import LayerwiseGradScaler
from steadygrad.tasks import load_task

torch.set_num_threads(1)  # tensors this small only wait for each other
STEPS = 100
ONE, EACH, FULL = "float16, one loss scale", "float16, a scale for each layer", "float32"
COLORS = {FULL: "0.6", ONE: "#e69f00", EACH: "#0072b2"}

# %%
# The network
# -----------
#
# The built-in task ``digits-deep`` classifies handwritten digits by six residual blocks. A second
# head reads the same features, detached, and estimates the area of ink. Its squared error is in the
# unit of the data, square micrometres: some 10**10 at the start. In float32 that is no matter, as
# Adam does not care how large a loss is. Prices in dollars, pressures in pascals and returns in
# points do the like.

task = load_task("digits-deep")
LAYERS = {"embed": "embed", "blocks.0": "blocks.0.down", "blocks.5": "blocks.5.down"}
LAYERS |= {"digit": "digit.linear", "area": "area.linear"}
for layer, inner in LAYERS.items():
    print(f"{layer}: the linear map {inner}")

# %%
# Three runs
# ----------
#
# The loop is that of torch's scaler. Only the line that makes the scaler differs.

Scaler = torch.amp.GradScaler | LayerwiseGradScaler


class Run(NamedTuple):
    """A trained model, and the loss of the digits and the scales of each step."""

    model: nn.Module
    losses: list[float]
    scales: list[dict[str, float]]


def train(make_scaler: Callable[[nn.Module], Scaler]) -> Run:
    torch.manual_seed(0)
    model = task.make_model()
    scaler, optimizer = make_scaler(model), task.make_optimizer(model.parameters(), task.lr)
    run = Run(model, [], [])
    for _ in range(STEPS):
        x, labels, areas = task.train.batch(torch.randint(len(task.train), (task.batch_size,)))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            logits, area = model(x)
            digits = F.cross_entropy(logits, labels)
            loss = digits + F.mse_loss(area, areas)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        layerwise = isinstance(scaler, LayerwiseGradScaler)
        run.scales.append(scaler.get_scales() if layerwise else {"": scaler.get_scale()})
        run.losses.append(digits.item())
    return run


runs = {
    FULL: train(lambda model: torch.amp.GradScaler("cpu", enabled=False)),
    ONE: train(lambda model: torch.amp.GradScaler("cpu")),
    EACH: train(lambda model: LayerwiseGradScaler(model, "auto")),
}
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, run in runs.items():
    smooth = [sum(run.losses[i - 10 : i]) / 10 for i in range(10, STEPS + 1)]
    axis.plot(range(10, STEPS + 1), smooth, label=name, color=COLORS[name])
    print(f"{name:32} loss of the last 10 steps {smooth[-1]:.3f}")
axis.set(xlabel="step", ylabel="loss of the digits, mean of 10 steps")
axis.legend(frameon=False)

# %%
# The scales
# ----------
#
# torch's scaler begins at 2**16 and halves its scale until nothing overflows. The other one
# measures exponents, and moves the scale of each layer to where its gradients fit; what is drawn is
# the layer's own scale times the loss's. A line for each layer:

figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
for number, layer in enumerate(LAYERS):
    carried = [math.log2(found[""] * found[layer]) for found in runs[EACH].scales]
    axis.plot(carried, label=layer, color=plt.get_cmap("viridis")(number / len(LAYERS)))
one = [math.log2(found[""]) for found in runs[ONE].scales]
axis.plot(one, label="one for all", color=COLORS[ONE], linewidth=2.5)
axis.set(xlabel="step", ylabel="scale, as a power of two")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))

# %%
# Why one scale fails
# -------------------
#
# The model that was trained in float32 has the gradients that float16 should hold. Here are their
# exponents at the output of a linear map of each layer and in its weights, but for the smallest
# hundredth. The shaded part is what float16 holds under the one scale above.

model, inside = runs[FULL].model, dict[str, torch.Tensor]()


def keep(layer: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
    """A hook that keeps the gradient at a module's output."""

    def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: inside.update({layer: gradient}))

    return hook


for layer, inner in LAYERS.items():
    model.get_submodule(inner).register_forward_hook(keep(layer))
model.zero_grad()
task.per_sample_loss(model, task.train.batch(torch.arange(task.batch_size))).mean().backward()

figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
axis.axvspan(-24 - one[-1], 16 - one[-1], color="0.5", alpha=0.2, label="float16")
last = runs[EACH].scales[-1]
for place, layer in enumerate(LAYERS):
    in_weights = model.get_submodule(LAYERS[layer]).weight.grad
    kinds = ("linear map's output", "#009e73", inside[layer]), ("weights", "#cc79a7", in_weights)
    for height, (kind, color, values) in zip((-0.2, 0.2), kinds, strict=True):
        found = values[values != 0].abs().log2()
        low, high = found.quantile(0.01).item(), found.max().item()
        label = None if place else kind
        axis.barh(place + height, high - low, 0.36, left=low, color=color, label=label)
    sizes = inside[layer].abs().log2()  # minus infinity for zeros
    scales = one[-1], math.log2(last[""] * last[layer])
    # Below half of float16's least number, 2**-24.
    flushed = [(sizes > -math.inf) & (sizes < -25 - scale) for scale in scales]
    lost = [zeros.float().mean().item() for zeros in flushed]
    print(f"{layer}: {lost[0]:5.1%} become zero under the one scale, {lost[1]:5.1%} under its own")
axis.set_yticks(range(len(LAYERS)), [*LAYERS])
axis.invert_yaxis()
axis.set_xlabel("gradient, as a power of two")
axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))

# %%
# A larger scale would move the shaded part to the left. It would save the digits, and the head of
# the area would overflow.
#
# A layer may lose something under its own scale too. ``"auto"`` judges a layer by the gradients at
# its boundary and in its weights, and the linear map's output lies inside.
# ``AutoScale(layers=...)`` chooses modules further inside.
#
# What to do with the answer
# --------------------------
#
# - A target that is standardised needs none of this. It is not always one loss that is to blame.
# - bfloat16 has float32's exponents and needs no scale. If your hardware has it, and eight bits of
#   precision are enough, take it.
# - A plain pre-norm transformer needs one scale only: a scale for each layer gains nothing there.
# - ``steadygrad inspect`` measures this on your own task, and says whether one scale is enough.
# - If it is not: ``LayerwiseGradScaler(model, "auto")`` in the place of torch's scaler.
#   :doc:`/layerwise_scaler` says how layers are chosen, and what a step costs.
