"""Two tasks on scikit-learn's bundled digits: 1,797 grey images of 8 x 8 pixels."""

import hashlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from steadygrad._checks import InputError
from steadygrad.tasks.samples import TensorSamples
from steadygrad.tasks.task import Task

__all__ = ["digits_autoencoder", "digits_classifier", "load_digits"]

TRAIN_IMAGES = 1_500


def digits_classifier() -> Task:
    """Which digit is it? A small convolutional network, trained by SGD with momentum.

    Returns:
        The task; one sample is an image with shape ``(1, 8, 8)`` and its label.

    Raises:
        InputError: If scikit-learn is not installed.
    """
    images, labels, provenance = load_digits()
    return Task(
        name="digits-classifier",
        sample="image",
        make_model=make_classifier,
        train=TensorSamples((images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])),
        valid=TensorSamples((images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])),
        per_sample_loss=label_losses,
        make_optimizer=partial(SGD, momentum=0.9),
        lr=0.005,
        batch_size=8,
        lr_rule="linear",
        samples_per_second=12_000.0,
        provenance=provenance,
    )


def digits_autoencoder() -> Task:
    """An image through eight numbers and back: a small multi-layer perceptron, by AdamW.

    Returns:
        The task; one sample is an image with shape ``(64,)``.

    Raises:
        InputError: If scikit-learn is not installed.
    """
    images, _, provenance = load_digits()
    flat = images.flatten(1)
    return Task(
        name="digits-autoencoder",
        sample="image",
        make_model=make_autoencoder,
        train=TensorSamples(flat[:TRAIN_IMAGES]),
        valid=TensorSamples(flat[TRAIN_IMAGES:]),
        per_sample_loss=pixel_losses,
        make_optimizer=AdamW,
        lr=2e-3,
        batch_size=8,
        lr_rule="sqrt",
        samples_per_second=14_000.0,
        provenance=provenance,
    )


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


def make_autoencoder() -> nn.Module:
    """64 to 128 to 8 numbers and back: ``(n, 64)`` to ``(n, 64)``."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.LayerNorm(128),
        nn.GELU(),
        nn.Linear(128, 8),
        nn.Linear(8, 128),
        nn.LayerNorm(128),
        nn.GELU(),
        nn.Linear(128, 64),
    )


def label_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each image in nats, in float32 at least, with shape ``(n,)``."""
    images, labels = batch
    logits = model(images)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="none")


def pixel_losses(model: nn.Module, images: Tensor) -> Tensor:
    """Mean squared error of each image's pixels, with shape ``(n,)``."""
    return F.mse_loss(model(images), images, reduction="none").mean(1)


def load_digits() -> tuple[Tensor, Tensor, dict[str, str]]:
    """Images in [0, 1] with shape ``(1797, 1, 8, 8)`` and labels, in a fixed mixed order."""
    try:
        from sklearn.datasets import load_digits as load_bundled
    except ImportError as error:
        raise InputError(
            "The digits tasks should find scikit-learn. Found no such package. "
            'Remedy: pip install "steadygrad[cli]".'
        ) from error
    digits = load_bundled()
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
