"""A classifier with a second loss in a physical unit: in float16 no single loss scale bears both.

Residual blocks read the sixteen 2 x 2 patches of a digit, and the mean over patches is classified.
A second head estimates a by-product from the same features, the area of ink, and its gradient ends
there: duration predictors of speech models are trained so, and probes, and critics beside an actor.
The head's output is standardised, its squared error is not: it is in the unit of the data, square
micrometres, as prices are left in dollars, pressures in pascals and returns in points. In float32
this costs nothing, for Adam's steps do not depend on the size of a loss and no gradient of one
reaches the other's layers. In float16 the gradients of that head overflow at any loss scale above
about 2**-20, and there all others, which are means over images and patches, are zero. Everything in
the forward pass is smaller than 2**8.

The other remedy, as good where one thinks of it, is a target that is standardised as well.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from steadygrad.tasks.digits import TRAIN_IMAGES, load_digits
from steadygrad.tasks.losses import mean_loss
from steadygrad.tasks.samples import TensorSamples
from steadygrad.tasks.task import Task

__all__ = ["PatchNet", "digits_deep", "patches"]

WIDTH, BLOCKS = 24, 6
# A pixel counts up to 16 dark dots; one of a scan at 300 dpi has 85 micrometres on each side.
PIXEL_AREA = 16 * (25_400 / 300) ** 2


class Block(nn.Module):
    """``x + linear(gelu(linear(norm(x))))``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``(*, features)`` to the same."""
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Pool(nn.Module):
    """The mean over patches, normalised."""

    def forward(self, x: Tensor) -> Tensor:
        """``(n, patches, features)`` to ``(n, features)``."""
        return F.layer_norm(x.mean(-2), (WIDTH,))


class Head(nn.Module):
    """A linear layer whose output is in float32, as is usual before a loss.

    Args:
        outputs: Features out.
        mean: Of the outputs at the start.
        spread: What they are multiplied by.
    """

    def __init__(self, outputs: int, mean: float = 0.0, spread: float = 1.0) -> None:
        super().__init__()
        self.linear, self.mean, self.spread = nn.Linear(WIDTH, outputs), mean, spread

    def forward(self, x: Tensor) -> Tensor:
        """``(n, features)`` to ``(n, outputs)``."""
        z: Tensor = self.linear(x)
        return self.mean + self.spread * z.to(torch.promote_types(z.dtype, torch.float32))


class PatchNet(nn.Module):
    """Images as patches with shape ``(n, 16, 20)`` to logits ``(n, 10)`` and areas ``(n,)``.

    Args:
        mean: Of the areas.
        spread: Their standard deviation.
    """

    def __init__(self, mean: float, spread: float) -> None:
        super().__init__()
        self.embed = nn.Linear(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.pool = Pool()
        self.digit, self.area = Head(10), Head(1, mean, spread)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(n, 16, 20)`` to ``(n, 10)`` and ``(n,)``."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        pooled = self.pool(x)
        return self.digit(pooled), self.area(pooled.detach()).squeeze(-1)


def patches(images: Tensor) -> Tensor:
    """2 x 2 pixels and a mark of the place for each patch: ``(n, 1, 8, 8)`` to ``(n, 16, 20)``."""
    cut = F.unfold(images, 2, stride=2).mT
    return torch.cat([2 * cut - 1, torch.eye(16).expand(len(images), 16, 16)], -1)


def digits_deep() -> Task:
    """Which digit is it, and how much ink? What is evaluated is the digit.

    Returns:
        The task; one sample is an image as patches with shape ``(16, 20)``, its label and its area.

    Raises:
        InputError: If scikit-learn is not installed.
    """
    images, labels, provenance = load_digits()
    areas = PIXEL_AREA * images.sum((1, 2, 3))
    tensors, seen = (patches(images), labels, areas), areas[:TRAIN_IMAGES]
    task = Task(
        name="digits-deep",
        sample="image",
        make_model=partial(PatchNet, seen.mean().item(), seen.std().item()),
        train=TensorSamples(tuple(x[:TRAIN_IMAGES] for x in tensors)),
        valid=TensorSamples(tuple(x[TRAIN_IMAGES:] for x in tensors)),
        per_sample_loss=digit_losses,
        make_optimizer=Adam,
        lr=5e-3,
        batch_size=250,
        lr_rule="sqrt",
        samples_per_second=10_000.0,
        provenance=provenance,
    )
    return replace(task, per_sample_loss=all_losses, evaluate=partial(mean_loss, task))


def digit_losses(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each image in nats, with shape ``(n,)``."""
    return F.cross_entropy(model(batch[0])[0], batch[1], reduction="none")


def all_losses(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross-entropy, and the squared error of the area in its unit, with shape ``(n,)``."""
    x, labels, areas = batch
    logits, found = model(x)
    error: Tensor = found - areas
    return F.cross_entropy(logits, labels, reduction="none") + error.square()
