"""The digits tasks: a fixed split of real images.

And the one that a single loss scale cannot train in float16, and layer-wise scales can.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.studies.folder import read_run
from steadygrad.tasks import load_task
from steadygrad.tasks.digits import digit_losses

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def classifier():
    return load_task("digits-classifier")


@pytest.fixture(scope="module")
def autoencoder():
    return load_task("digits-autoencoder")


def test_training_and_held_out_images_are_all_the_images_once(classifier, autoencoder):
    from sklearn.datasets import load_digits

    for task in (classifier, autoencoder):
        assert (len(task.train), len(task.valid), task.sample) == (1500, 297, "image")
    digits = load_digits()
    parts = [classifier.train.batch(torch.arange(1500)), classifier.valid.batch(torch.arange(297))]
    ours = [
        (label, *(16 * image).flatten().tolist())
        for images, labels in parts
        for image, label in zip(images, labels.tolist(), strict=True)
    ]
    theirs = [(label, *row) for label, row in zip(digits.target, digits.data, strict=True)]
    assert sorted(ours) == sorted(theirs)
    # The order comes from hashes of the image numbers: it must not follow a library's version.
    assert parts[0][1][:12].tolist() == [0, 4, 0, 7, 5, 5, 5, 7, 9, 7, 0, 6]
    assert classifier.provenance["sha256"].startswith("87ff0c9e40dc7e2c")
    assert parts[0][1].bincount().tolist() == pytest.approx([150] * 10, abs=15)
    images = parts[1][0]
    assert (images.shape, images.dtype) == ((297, 1, 8, 8), torch.float32)
    assert torch.equal(images.flatten(1), autoencoder.valid.batch(torch.arange(297)))


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


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"steadygrad\[cli\]"):
        load_task("digits-classifier")


STARVED = {"embed", *(f"blocks.{i}" for i in range(6)), "pool", "digit"}
# The loss of guessing is ln 10 = 2.30.
UNTRAINED, TRAINED = 2.2, 1.7
# Alone, the digits train at 2**-6, and do not at 2**-8.
TOO_SMALL = 2.0**-16


def check_verdict(summary):
    """All layers but the area's head underflow, and that one is limiting."""
    diagnosis, proposal = summary["diagnosis"], summary["proposal"]
    assert {*diagnosis["underflowing"]} == STARVED
    assert min(diagnosis["underflowing"].values()) > 0.9
    assert {*diagnosis["limiting"]} == {"area"}
    for name in ("regressed", "nonfinite_at_any_scale", "internal_underflow", "forward"):
        assert diagnosis[name] == {}, name
    assert {*proposal["layer_scales"]} == STARVED
    assert min(proposal["layer_scales"].values()) >= 2.0**30
    before, after = summary["phases"]["before"], summary["phases"]["after"]
    assert before["loss_scale"] <= TOO_SMALL
    assert after["skipped"] <= 5
    assert before["valid_loss"] > UNTRAINED
    assert after["valid_loss"] < TRAINED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "threads", "kernels"),
    # Without vectors it takes three times as long.
    [(0, 1, "avx2"), (1, 2, "avx2"), (2, 1, "avx512"), (0, 2, "avx512"), (0, 1, "default")],
)
def test_the_verdict_is_the_same_everywhere(seed, threads, kernels, tmp_path):
    """48 steps of each training; whichever instruction sets the processor lacks are left out."""
    here = torch.backends.cpu.get_cpu_capability()
    known = ("DEFAULT", "AVX2", "AVX512")
    if here not in known or kernels.upper() not in known[: known.index(here) + 1]:
        pytest.skip(f"needs {kernels} kernels")
    more = {"OMP_NUM_THREADS": str(threads), "ATEN_CPU_CAPABILITY": kernels}
    more["OMP_WAIT_POLICY"] = "passive"  # two threads that spin are slow beside other work
    options = {"steps": 48, "seed": seed, "threads": threads, "workers": 1, "device": "cpu"}
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "steadygrad", "inspect", "digits-deep", *words, "--json"]
    done = subprocess.run(
        [*command, "--budget=10h", "--out", str(tmp_path / "run")],
        env=os.environ | more,
        capture_output=True,
        text=True,
        check=True,
    )
    check_verdict(json.loads(done.stdout))


def test_the_report_in_the_documentation_has_this_verdict():
    """The test above says that a fresh run has it too, and the task's first words that it is it."""
    run = read_run(ROOT / "docs" / "records" / "inspect")
    task, said = load_task("digits-deep"), run.header.task
    assert said.parameters == sum(p.numel() for p in task.make_model().parameters())
    assert (said.batch_size, said.lr) == (task.batch_size, task.lr)
    assert said.provenance == task.provenance
    assert {*run.header.plan.layers} == {*STARVED, "area"}
    check_verdict(run.summary)
    # What the page of `inspect` says of it.
    words = (ROOT / "docs" / "inspect.md").read_text()
    phases = run.summary["phases"]
    assert f"$2^{{{math.log2(phases['before']['loss_scale']):.0f}}}$" in words
    assert all(f"{phases[when]['valid_loss']:.2f}" in words for when in ("before", "after"))


def test_the_areas_do_not_shape_the_features():
    task = load_task("digits-deep")
    torch.manual_seed(0)
    model = task.make_model()
    batch = task.train.batch(torch.arange(8))
    task.per_sample_loss(model, batch).mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    digit_losses(model, batch).mean().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("area"):
            assert parameter.grad is None
            assert found[name].abs().max() > 1e8
        else:
            assert torch.equal(parameter.grad, found[name])
            assert parameter.grad.abs().max() < 1
