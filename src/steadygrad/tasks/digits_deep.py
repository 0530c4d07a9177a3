"""A network that is constructed so that no single loss scale works in float16.

A deep tanh network reads the sixteen 2 x 2 patches of a digit, each with a mark of its place, by
four layers, takes the mean over patches, and classifies it by two layers more. Each layer is
``tanh(c * linear(x))`` with a fixed power of two ``c``, and its weights are divided by ``c`` at the
start: the function is that of a plain network, and with learning rates divided by ``c`` so is its
training with Adam in float32. But gradients inside are multiplied by ``c``: 2**-15 in the early
layers, 2**14 in the last two. The means over patches and over the batch divide the early ones
further, while the last layers' weights add theirs up over all images. float16's 40 binades do not
hold both. It is a caricature of branches with small gates, pooled features and weights at odd
scales.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from steadygrad.tasks.digits import TRAIN_IMAGES, label_losses, load_digits
from steadygrad.tasks.samples import TensorSamples
from steadygrad.tasks.task import Task

__all__ = ["FactorLayer", "PatchNet", "digits_deep", "patches"]

WIDTH, SMALL, LARGE = 24, 2.0**-15, 2.0**14


class FactorLayer(nn.Module):
    """``tanh(c * linear(x))``; the linear part begins at a plain layer's, divided by ``c``.

    Args:
        inputs: Features in.
        outputs: Features out.
        c: The factor.
        last: Leaves the tanh out.
    """

    def __init__(self, inputs: int, outputs: int, c: float, last: bool = False) -> None:
        super().__init__()
        self.linear, self.c, self.last = nn.Linear(inputs, outputs), c, last
        with torch.no_grad():
            nn.init.xavier_normal_(self.linear.weight)
            self.linear.weight.div_(c)
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """``(*, inputs)`` to ``(*, outputs)``."""
        z: Tensor = self.c * self.linear(x)
        return z if self.last else torch.tanh(z)


class PatchMean(nn.Module):
    """The mean over patches."""

    def forward(self, x: Tensor) -> Tensor:
        """``(n, patches, features)`` to ``(n, features)``."""
        return x.mean(-2)


class PatchNet(nn.Module):
    """Images as patches with shape ``(n, 16, 20)`` to logits ``(n, 10)``.

    Args:
        small: Factor of the early layers.
        large: Factor of the last two.
    """

    def __init__(self, small: float = SMALL, large: float = LARGE) -> None:
        super().__init__()
        sizes = [20, WIDTH, WIDTH, WIDTH, WIDTH]
        layers = [FactorLayer(i, o, small) for i, o in pairwise(sizes)]
        self.patch = nn.Sequential(*layers, PatchMean())
        last = FactorLayer(WIDTH, 10, large, last=True)
        self.trunk = nn.Sequential(FactorLayer(WIDTH, WIDTH, large), last)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, 16, 20)`` to ``(n, 10)``."""
        logits: Tensor = self.trunk(self.patch(x))
        return logits


def patches(images: Tensor) -> Tensor:
    """2 x 2 pixels and a mark of the place for each patch: ``(n, 1, 8, 8)`` to ``(n, 16, 20)``."""
    cut = F.unfold(images, 2, stride=2).mT
    return torch.cat([2 * cut - 1, torch.eye(16).expand(len(images), 16, 16)], -1)


def digits_deep() -> Task:
    """Which digit is it? By a network that float16 with one loss scale cannot train.

    Returns:
        The task; one sample is an image as patches with shape ``(16, 20)`` and its label.

    Raises:
        InputError: If scikit-learn is not installed.
    """
    images, labels, provenance = load_digits()
    data = patches(images)
    return Task(
        name="digits-deep",
        sample="image",
        make_model=PatchNet,
        train=TensorSamples((data[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])),
        valid=TensorSamples((data[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])),
        per_sample_loss=label_losses,
        make_optimizer=make_adam,
        lr=1e-2,
        batch_size=TRAIN_IMAGES,
        lr_rule="sqrt",
        samples_per_second=50_000.0,
        provenance=provenance,
    )


def make_adam(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """Adam whose steps are relative to the weights' own sizes, with an eps that stays below all.

    Weights of a layer with factor ``c`` are ``1 / c`` times a plain layer's, and so must its
    learning rate be. The sizes at the start say what ``c`` is: a plain layer's weights have a mean
    square of ``2 / (inputs + outputs)``. Biases follow the weight before them.
    """
    groups, factor = [], 1.0
    for parameter in parameters:
        if parameter.ndim == 2:
            plain = (2 / sum(parameter.shape)) ** 0.5
            rms = parameter.detach().square().mean().sqrt().item()
            factor = 2.0 ** round(torch.tensor(rms / plain).log2().item())
        groups.append({"params": [parameter], "lr": lr * factor})
    return Adam(groups, lr=lr, eps=1e-30)
