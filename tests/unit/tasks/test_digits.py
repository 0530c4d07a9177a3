"""The digits tasks: a fixed split of real images."""

import sys

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.tasks import load_task


@pytest.fixture(scope="module")
def classifier():
    return load_task("digits-classifier")


@pytest.fixture(scope="module")
def autoencoder():
    return load_task("digits-autoencoder")


def test_sizes_and_ranges(classifier, autoencoder):
    for task in (classifier, autoencoder):
        assert (len(task.train), len(task.valid), task.sample) == (1500, 297, "image")
    images, labels = classifier.train.batch(torch.arange(1500))
    assert images.shape == (1500, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert images.dtype == torch.float32
    assert labels.bincount().tolist() == pytest.approx([150] * 10, abs=15)


def test_both_tasks_show_the_same_images(classifier, autoencoder):
    images, _ = classifier.valid.batch(torch.arange(297))
    assert torch.equal(images.flatten(1), autoencoder.valid.batch(torch.arange(297)))


def test_training_and_held_out_images_are_all_the_images_once(classifier):
    from sklearn.datasets import load_digits

    digits = load_digits()
    parts = [classifier.train.batch(torch.arange(1500)), classifier.valid.batch(torch.arange(297))]
    ours = [
        (label, *(16 * image).flatten().tolist())
        for images, labels in parts
        for image, label in zip(images, labels.tolist(), strict=True)
    ]
    theirs = [(label, *row) for label, row in zip(digits.target, digits.data, strict=True)]
    assert sorted(ours) == sorted(theirs)
    assert ours != theirs


def test_the_split_never_changes(classifier):
    # The order comes from hashes of the image numbers: it must not follow a library's version.
    assert classifier.train.batch(torch.arange(12))[1].tolist() == FIRST_LABELS
    assert classifier.provenance["sha256"].startswith("87ff0c9e40dc7e2c")


FIRST_LABELS = [0, 4, 0, 7, 5, 5, 5, 7, 9, 7, 0, 6]


def test_losses_are_of_single_images(classifier, autoencoder):
    torch.manual_seed(0)
    model = autoencoder.make_model()
    images = autoencoder.train.batch(torch.arange(3))
    by_hand = ((model(images) - images) ** 2).sum(1) / 64
    # float32, two orders of summation.
    torch.testing.assert_close(
        autoencoder.per_sample_loss(model, images), by_hand, rtol=1e-5, atol=0
    )
    model = classifier.make_model()
    images, labels = classifier.train.batch(torch.arange(3))
    by_hand = -model(images).log_softmax(1)[torch.arange(3), labels]
    losses = classifier.per_sample_loss(model, (images, labels))
    torch.testing.assert_close(losses, by_hand, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["digits-classifier", "digits-autoencoder"])
def test_missing_scikit_learn_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r'scikit-learn.*pip install "steadygrad\[cli\]"'):
        load_task(name)
