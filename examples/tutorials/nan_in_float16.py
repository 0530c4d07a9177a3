"""
NaN in float16: which layer, and what to do
===========================================

float16 holds numbers from 6e-8 to 65,504. A gradient below becomes zero, one above becomes
infinite, and torch's ``GradScaler`` moves them all by one factor. Two questions remain: *which
layer broke*, and what if *no single factor* fits all layers?
"""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad import GradientWatch, LayerwiseGradScaler
from steadygrad.tasks import load_task

torch.set_num_threads(1)  # tensors this small only wait for each other


# %%
# Which layer broke
# -----------------
#
# Three layers of a perceptron of the digits; the second one's weights have grown too large for
# float16. ``GradientWatch`` is made once, and asked when the gradient's norm is not finite.

task = load_task("digits-classifier")
x, labels = task.train.batch(torch.arange(len(task.train)))
x = x.flatten(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
with torch.no_grad():
    model[2].weight.mul_(3e5)
watch = GradientWatch(model)
scaler = torch.amp.GradScaler("cpu")

with torch.autocast("cpu", torch.float16):
    loss = F.cross_entropy(model(x), labels)
scaler.scale(loss).backward()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
if not norm.isfinite():
    print(str(watch.report()).replace(". ", ".\n"))
watch.close()

# %%
# The forward pass of one layer overflowed. No loss scale fixes that: what helps is a smaller
# initialisation, a normalisation before it, or bfloat16 for that layer. Had the culprit been a
# *gradient*, a smaller scale would have helped, which the scaler finds by itself.
#
# When one scale does not fit all layers
# --------------------------------------
#
# The built-in task ``digits-deep`` is a classifier with a second head, which estimates the area of
# ink in square micrometres. Nobody has standardised that loss, so the gradients of this head are
# huge, and with a loss scale that they bear all others become zero. ``LayerwiseGradScaler(model,
# "auto")`` measures the exponents of every layer's gradients, and finds a scale for each. The loop
# is that of torch's scaler.

deep = load_task("digits-deep")


def train(
    make_scaler: Callable[[nn.Module], torch.amp.GradScaler], steps: int = 100
) -> list[float]:
    """The digits' losses in the training steps."""
    torch.manual_seed(0)
    model, found = deep.make_model(), []
    optimizer, scaler = deep.make_optimizer(model.parameters(), deep.lr), make_scaler(model)
    for _ in range(steps):
        x, labels, areas = deep.train.batch(torch.randint(len(deep.train), (deep.batch_size,)))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            logits, area = model(x)
            digits = F.cross_entropy(logits, labels)
            loss = digits + F.mse_loss(area, areas)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(digits.item())
    return found


runs = {
    "float32": train(lambda model: torch.amp.GradScaler("cpu", enabled=False)),
    "float16, one loss scale": train(lambda model: torch.amp.GradScaler("cpu")),
    "float16, a scale for each layer": train(lambda model: LayerwiseGradScaler(model, "auto")),
}
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (name, losses), color in zip(runs.items(), ("0.6", "#e69f00", "#0072b2"), strict=True):
    smooth = [sum(losses[i - 20 : i]) / 20 for i in range(20, len(losses) + 1)]
    axis.plot(range(20, len(losses) + 1), smooth, label=name, color=color)
    print(f"{name:32} loss of the last 20 steps {smooth[-1]:.3f}")
axis.set(xlabel="step", ylabel="loss of the digits, mean of 20 steps")
axis.legend(frameon=False)

# %%
# The scaler says which scales it found, and which layer made an overflow. Here a hook makes one:

model = deep.make_model()
scaler = LayerwiseGradScaler(model, "auto")
inner = model.get_submodule("blocks.2.down")
handle = inner.register_full_backward_hook(lambda module, i, o: (i[0] * torch.inf, *i[1:]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
scaler.scale(deep.per_sample_loss(model, deep.train.batch(torch.arange(8))).mean()).backward()
scaler.step(optimizer)  # left out
scaler.update()
handle.remove()
print(f"overflow in blocks.2, attributed to {', '.join(scaler.culprits())}")

# %%
# What to do with the answer
# --------------------------
#
# - A finding of kind ``output`` or ``weight``: the forward pass is at fault, see above.
# - A finding of kind ``gradient`` now and then, while the scale grows: nothing, that is how a
#   scaler searches.
# - In every step, or where layers stop learning: ``steadygrad inspect`` counts the exponents of all
#   layers and says which ones a single scale starves; then ``LayerwiseGradScaler``, or bfloat16,
#   which has float32's range.
