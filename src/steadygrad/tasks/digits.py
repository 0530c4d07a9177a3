"""Three tasks on scikit-learn's bundled digits: 1,797 grey images of 8 x 8 pixels."""

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils._pytree import tree_map

from steadygrad._checks import from_extra
from steadygrad.numerics import wide
from steadygrad.tasks.samples import TensorSamples
from steadygrad.tasks.task import Task, mean_loss

TRAIN_IMAGES = 1_500
# Features and blocks of the patch network.
WIDTH, BLOCKS = 24, 6
# A pixel counts up to 16 dark dots; one of a scan at 300 dpi has 85 micrometres on each side.
PIXEL_AREA = 16 * (25_400 / 300) ** 2


def digits_classifier() -> Task:
    """Which digit is it? A small convolutional network, trained by SGD with momentum.

    One sample is an image with shape ``(1, 8, 8)`` and its label.
    """
    images, labels, provenance = load_digits()
    return _task(
        (images, labels),
        name="digits-classifier",
        make_model=make_classifier,
        per_sample_loss=label_losses,
        make_optimizer=partial(SGD, momentum=0.9),
        lr=0.005,
        lr_rule="linear",
        samples_per_second=12_000.0,
        provenance=provenance,
    )


def digits_autoencoder() -> Task:
    """An image through eight numbers and back: a small multi-layer perceptron, by AdamW.

    One sample is an image with shape ``(64,)``.
    """
    images, _, provenance = load_digits()
    return _task(
        images.flatten(1),
        name="digits-autoencoder",
        make_model=make_autoencoder,
        per_sample_loss=pixel_losses,
        make_optimizer=AdamW,
        lr=2e-3,
        samples_per_second=14_000.0,
        provenance=provenance,
    )


def digits_deep() -> Task:
    """Which digit is it, and how much ink? What is evaluated is the digit.

    A classifier with a second loss in a physical unit: in float16 no single loss scale bears both.
    A second head estimates the area of ink from the same features, detached; its squared error is
    in square micrometres.

    One sample is an image as patches with shape ``(16, 20)``, its label and its area.
    """
    images, labels, provenance = load_digits()
    areas = PIXEL_AREA * images.sum((1, 2, 3))
    spread, mean = torch.std_mean(areas[:TRAIN_IMAGES])
    task = _task(
        (patches(images), labels, areas),
        name="digits-deep",
        make_model=partial(PatchNet, mean.item(), spread.item()),
        per_sample_loss=digit_losses,
        make_optimizer=Adam,
        lr=5e-3,
        batch_size=250,
        samples_per_second=10_000.0,
        provenance=provenance,
    )
    return replace(task, per_sample_loss=all_losses, evaluate=partial(mean_loss, task))


def _task(data: Any, **fields: Any) -> Task:
    train = TensorSamples(tree_map(lambda rows: rows[:TRAIN_IMAGES], data))
    valid = TensorSamples(tree_map(lambda rows: rows[TRAIN_IMAGES:], data))
    return Task(train=train, valid=valid, **{"sample": "image", "batch_size": 8, **fields})


def load_digits() -> tuple[Tensor, Tensor, dict[str, str]]:
    """Images in [0, 1] with shape ``(1797, 1, 8, 8)``, labels, and where they come from.

    Raises:
        InputError: If scikit-learn is not installed.
    """
    digits = from_extra("sklearn.datasets", "cli").load_digits()
    pixels = torch.as_tensor(digits.images, dtype=torch.uint8)
    labels = torch.as_tensor(digits.target, dtype=torch.int64)
    # Hashes, not a random generator: the split is the same under every version of torch.
    order = sorted(range(len(pixels)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    data = pixels.numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
    provenance = {
        "corpus": "scikit-learn's digits (UCI optical recognition, test part)",
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return (pixels[order].unsqueeze(1) / 16).float(), labels[order], provenance


def make_classifier() -> nn.Module:
    """Two convolutions, a norm and a linear layer: ``(n, 1, 8, 8)`` to logits ``(n, 10)``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(512),
        nn.Linear(512, 10),
    )


def label_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each image in nats, in float32 at least, with shape ``(n,)``."""
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits.to(wide(logits.dtype)), labels, reduction="none")


def make_autoencoder() -> nn.Module:
    """64 to 128 to 8 numbers and back: ``(n, 64)`` to ``(n, 64)``."""
    halves = [
        [nn.Linear(a, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, b)]
        for a, b in [(64, 8), (8, 64)]
    ]
    return nn.Sequential(*halves[0], *halves[1])


def pixel_losses(model: nn.Module, images: Tensor) -> Tensor:
    """Mean squared error of each image's pixels, with shape ``(n,)``."""
    return F.mse_loss(model(images), images, reduction="none").mean(1)


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
    """A linear layer whose output, in float32 at least, has this mean and spread at the start."""

    def __init__(self, outputs: int, mean: float = 0.0, spread: float = 1.0) -> None:
        super().__init__()
        self.linear, self.mean, self.spread = nn.Linear(WIDTH, outputs), mean, spread

    def forward(self, x: Tensor) -> Tensor:
        """``(n, features)`` to ``(n, outputs)``."""
        z: Tensor = self.linear(x)
        return self.mean + self.spread * z.to(wide(z.dtype))


class PatchNet(nn.Module):
    """Two heads on residual blocks; areas have this mean and standard deviation at the start."""

    def __init__(self, mean: float, spread: float) -> None:
        super().__init__()
        self.embed = nn.Linear(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.pool = Pool()
        self.digit, self.area = Head(10), Head(1, mean, spread)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Patches ``(n, 16, 20)`` to logits ``(n, 10)`` and areas ``(n,)``."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        pooled = self.pool(x)
        return self.digit(pooled), self.area(pooled.detach()).squeeze(-1)


def patches(images: Tensor) -> Tensor:
    """2 x 2 pixels and a mark of the place for each patch: ``(n, 1, 8, 8)`` to ``(n, 16, 20)``."""
    cut = F.unfold(images, 2, stride=2).mT
    return torch.cat([2 * cut - 1, torch.eye(16).expand(len(images), 16, 16)], -1)


def digit_losses(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each image in nats, with shape ``(n,)``."""
    return F.cross_entropy(model(batch[0])[0], batch[1], reduction="none")


def all_losses(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross-entropy, and the squared error of the area in its unit, with shape ``(n,)``."""
    x, labels, areas = batch
    logits, found = model(x)
    error: Tensor = found - areas
    return F.cross_entropy(logits, labels, reduction="none") + error.square()
