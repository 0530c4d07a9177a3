"""A network for which no single loss scale works in float16, and one for which any does.

**The construction**, so that nobody takes it for an accident. A deep tanh network looks at the
sixteen 2 x 2 patches of a digit, each with its place, by four layers, takes the mean over patches,
and classifies it by two layers more. Each layer is ``tanh(c * linear(x))`` with a fixed power of
two ``c``, and weights that are divided by ``c`` at the start: the function is that of a plain
network, in float32 training with Adam is too, but the gradients inside are multiplied by ``c``.
Early layers have c = 2**-14, the last ones 2**14. The mean over patches and over the whole training
set as one batch makes the early ones smaller still. So 40 binades are not enough for both: that is
a caricature of branches with small gates, pooled features and weights stored at odd scales.

**The honest case** is the built-in language model, a plain pre-norm transformer.

Run: python benchmarks/scaler_trains.py [--seeds 3] [--epochs 300] [--save]
"""

import argparse
import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import torch
import torch.nn.functional as F
from side_by_side import hardware, save
from torch import Tensor, nn

from steadygrad.scale import AutoScale, LayerwiseGradScaler
from steadygrad.tasks import load_task

WIDTH, SMALL, LARGE = 24, 2.0**-14, 2.0**14
# By hand, from the numbers of the construction.
LAYER_SCALES = {"patch.*": 2.0**26, "trunk.*": 2.0**4}


class Layer(nn.Module):
    """``tanh(c * linear(x))``; the linear part begins at a plain layer's, divided by ``c``."""

    def __init__(self, inputs: int, outputs: int, c: float, last: bool = False) -> None:
        super().__init__()
        self.linear, self.c, self.last = nn.Linear(inputs, outputs), c, last
        with torch.no_grad():
            nn.init.xavier_normal_(self.linear.weight)
            self.linear.weight.div_(c)
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        z = self.c * self.linear(x)
        return z if self.last else torch.tanh(z)


class Mean(nn.Module):
    """The mean over patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-2)


class PatchNet(nn.Module):
    """Images as patches with shape ``(n, 16, 20)`` to logits ``(n, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [20, WIDTH, WIDTH, WIDTH, WIDTH]
        layers = [Layer(i, o, SMALL) for i, o in zip(sizes[:-1], sizes[1:], strict=True)]
        self.patch = nn.Sequential(*layers, Mean())
        self.trunk = nn.Sequential(Layer(WIDTH, WIDTH, LARGE), Layer(WIDTH, 10, LARGE, last=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(self.patch(x))


def patches(images: Tensor) -> Tensor:
    """2 x 2 pixels and a mark of the place for each patch: ``(n, 16, 20)``."""
    cut = F.unfold(images, 2, stride=2).mT
    return torch.cat([2 * cut - 1, torch.eye(16).expand(len(images), 16, 16)], -1)


@dataclass(frozen=True)
class Digits:
    """Training and validation images."""

    x: Tensor
    y: Tensor
    valid_x: Tensor
    valid_y: Tensor

    @classmethod
    def load(cls) -> "Digits":
        task = load_task("digits-classifier")
        x, y = task.train.batch(torch.arange(len(task.train)))
        vx, vy = task.valid.batch(torch.arange(len(task.valid)))
        return cls(patches(x), y, patches(vx), vy)


def train(
    data: Digits,
    make_scaler: Callable[[nn.Module], object],
    *,
    seed: int,
    epochs: int,
    half: bool = True,
    lr: float = 1e-2,
) -> tuple[float, object]:
    """Accuracy on the validation images after so many full-batch steps, and the scaler."""
    torch.manual_seed(seed)
    model = PatchNet()
    # The weights' sizes differ by 2**28, and so must their steps.
    groups = [{"params": m.parameters(), "lr": lr / m.c} for m in model.modules() if hasattr(m, "c")]
    optimizer = torch.optim.Adam(groups, eps=1e-30)
    scaler = make_scaler(model)
    with torch.autocast("cpu", torch.float16, enabled=half):
        for step in range(epochs):
            for group, m in zip(groups, [m for m in model.modules() if hasattr(m, "c")]):
                pass
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.x), data.y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            right = (model(data.valid_x).argmax(1) == data.valid_y).float().mean()
    return right.item(), scaler

if __name__ == "__main__":
    torch.set_num_threads(1)
    d = Digits.load()
    none = lambda m: torch.amp.GradScaler("cpu", enabled=False)
    for lr in (3e-3,1e-2):
      t = time.time()
      print(lr, "fp32", train(d, none, seed=0, epochs=300, half=False, lr=lr)[0], time.time()-t, flush=True)
    t = time.time()
    print("fp16 layers", train(d, lambda m: LayerwiseGradScaler(m, LAYER_SCALES), seed=0, epochs=300)[0], time.time()-t, flush=True)
    a, s = train(d, lambda m: LayerwiseGradScaler(m, "auto"), seed=0, epochs=300)
    print("auto", a, {k: math.log2(v) for k,v in s.get_scales().items()}, s.skipped, s.get_overflows(), flush=True)
    for k in (0, 8, 16,24):
        a, s = train(d, lambda m: torch.amp.GradScaler("cpu", init_scale=2.0**k), seed=0, epochs=300)
        print(k, a, s.get_scale())
