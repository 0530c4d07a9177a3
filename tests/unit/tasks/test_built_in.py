"""Built-in tasks: promises of all, and of the examples' tasks; then the data and models of each."""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from steadygrad.tasks import BUILT_IN, load_task, mean_loss
from steadygrad.tasks.char_lm import VOCABULARY, read_corpus
from steadygrad.tasks.check import check_losses
from steadygrad.tasks.digits import digit_losses
from tests.unit.cli.quick import run_program

ROOT = Path(__file__).parents[3]
NAMES = ["my_task.py", "my_loader_task.py", "my_hf_task.py"]
SPECS = {name: name for name in BUILT_IN}
SPECS |= {name: f"{ROOT / 'examples' / name}:make_task" for name in NAMES}
loaded = cache(load_task)


def made(task):
    """A new model of a task."""
    torch.manual_seed(0)
    return task.make_model()


# All


@pytest.fixture(params=SPECS)
def task(request):
    if request.param == "my_hf_task.py":
        pytest.importorskip("transformers", reason="of the dependency group hf")
    return loaded(SPECS[request.param])


@pytest.fixture
def model(task):
    return made(task)


def test_a_sample_alone_has_the_loss_it_has_in_a_batch(task, model):
    model.eval()
    losses = check_losses(task.per_sample_loss(model, task.train.batch(torch.arange(6))), 6)
    singles = [task.per_sample_loss(model, task.train.batch(torch.tensor([i]))) for i in range(6)]
    # A batch's matrix product sums in another order than a single row's: float32 rounding.
    torch.testing.assert_close(losses, torch.cat(singles), rtol=1e-4, atol=1e-6)


def test_every_parameter_gets_a_gradient(task, model):
    task.per_sample_loss(model, task.train.batch(torch.arange(8))).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.few(3)
def test_each_task_trains(task, model):
    before = mean_loss(task, model)
    optimizer = task.optimizer(model, task.lr)
    for step in range(100 if task.name not in BUILT_IN else 60):
        indices = torch.arange(task.batch_size) + task.batch_size * step
        batch = task.train.batch(indices % len(task.train))
        task.per_sample_loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mean_loss(task, model) < 0.8 * before


def test_two_loads_are_the_same_task(task, request):
    again = load_task(SPECS[request.node.callspec.params["task"]])
    batches = [tree_leaves(each.train.batch(torch.arange(4))) for each in (task, again)]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))
    assert (again.lr, again.provenance) == (task.lr, task.provenance)


# The corpus of characters, and its model


def decode(tokens):
    """Tokens back into text; ``OTHER`` reads as U+FFFD."""
    return "".join((VOCABULARY + "\N{REPLACEMENT CHARACTER}")[token] for token in tokens)


def write(root, names, text="x = 1\n"):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n{text}", newline="")
    return root


MANY = [f"m{i}.py" for i in range(60)]


def test_whole_files_are_held_out(tmp_path):
    train, valid, _ = read_corpus(write(tmp_path, MANY))
    for name in MANY:
        # About one path in twenty, whatever else there is.
        held_out = hashlib.sha256(name.encode()).digest()[0] < 13
        assert (f"# {name}\n" in valid, f"# {name}\n" in train) == (held_out, not held_out)
    assert len(train + valid) == sum(len(f"# {name}\nx = 1\n") for name in MANY)


def test_the_digest_sees_names_borders_and_every_byte(tmp_path):
    roots = [write(tmp_path / name, MANY) for name in ("none", "again", "byte", "name", "border")]
    none, again, byte, name, border = roots
    (byte / "m3.py").write_text("# m3.py\nx = 2\n")
    (name / "m9.py").rename(name / "m9a.py")  # still the last in order
    # m30.py follows m3.py: one file that swallows the next one's name and text.
    swallowed = "m30.py" + (border / "m30.py").read_text()
    (border / "m30.py").unlink()
    (border / "m3.py").write_text((border / "m3.py").read_text() + swallowed)
    # Wherever the folder lies.
    assert read_corpus(none) == read_corpus(again)
    assert len({read_corpus(root)[2]["sha256"] for root in roots}) == 4


def test_samples_are_the_librarys_text_in_order():
    task = loaded("char-lm")
    text, held_out, provenance = read_corpus()
    inputs, targets = task.train.batch(torch.tensor([0, 1000]))
    for row, start in enumerate((0, 64_000)):
        expected = text[start : start + 65]
        assert decode(inputs[row].tolist()) == expected[:-1]
        assert decode(targets[row].tolist()) == expected[1:]
    rows = [decode(row) for row in task.valid.batch(torch.arange(256))[0].tolist()]
    plain = [row for row in rows if "\ufffd" not in row]
    assert len(plain) > 200
    assert all(row in held_out for row in plain)
    # From the whole of it.
    assert held_out.rfind(plain[-1]) > 0.95 * len(held_out)
    assert (len(task.valid), task.sample, task.provenance) == (256, "sequence", provenance)
    assert len(task.train) > 100_000


def test_no_character_sees_the_future_and_positions_matter():
    model = made(loaded("char-lm"))
    tokens = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 97
    with torch.no_grad():
        before, after, alike = model(tokens), model(changed), model(torch.full((1, 64), 5))
    # The same float32 kernels run on the same prefix.
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-6)
    assert (before[:, 40:] - after[:, 40:]).abs().amax(2).min() > 1e-6
    assert (alike[0, 1:] - alike[0, :-1]).abs().amax(1).min() > 1e-3


# Digits


def test_training_and_held_out_images_are_all_the_images_once():
    from sklearn.datasets import load_digits

    classifier, autoencoder = loaded("digits-classifier"), loaded("digits-autoencoder")
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
    assert torch.equal(parts[1][0].flatten(1), autoencoder.valid.batch(torch.arange(297)))


STARVED = {"embed", *(f"blocks.{i}" for i in range(6)), "pool", "digit"}
# The loss of guessing is ln 10 = 2.30.
UNTRAINED, TRAINED = 2.2, 1.7
# Alone, the digits train at 2**-6, and do not at 2**-8.
TOO_SMALL = 2.0**-16


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="other kernels take three times as long",
)
def test_a_fresh_run_has_this_verdict(tmp_path, monkeypatch):
    """48 steps of each training, with kernels that most processors have.

    All layers but the area's head underflow, and that one is limiting.
    """
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    options = "--steps 48 --seed 1 --threads 1 --workers 1 --device cpu --budget 10h --json"
    words = ["inspect", "digits-deep", *options.split(), "--out", str(tmp_path / "run")]
    code, out, err = run_program(*words, module="steadygrad")
    assert code == 0, err
    summary = json.loads(out)
    findings, proposal = summary["findings"], summary["proposal"]
    effects = {found["name"]: found["layers"] for found in findings if "layers" in found}
    assert {*effects} == {"underflowing", "limiting"}
    assert {*effects["underflowing"]} == STARVED
    assert min(effects["underflowing"].values()) > 0.9
    assert {*effects["limiting"]} == {"area"}
    assert {*proposal["layer_scales"]} == STARVED
    assert min(proposal["layer_scales"].values()) >= 2.0**30
    before, after = summary["phases"]["before"], summary["phases"]["after"]
    assert before["loss_scale"] <= TOO_SMALL
    assert after["skipped"] <= 5
    assert before["valid_loss"] > UNTRAINED
    assert after["valid_loss"] < TRAINED


def test_the_areas_do_not_shape_the_features():
    task = loaded("digits-deep")
    model, batch = made(task), task.train.batch(torch.arange(8))
    names, parameters = zip(*model.named_parameters(), strict=True)
    both = task.per_sample_loss(model, batch).mean()
    alone = digit_losses(model, batch).mean()
    found = torch.autograd.grad(both, parameters)
    digits = torch.autograd.grad(alone, parameters, allow_unused=True)
    for name, gradient, own in zip(names, found, digits, strict=True):
        if name.startswith("area"):
            assert own is None
            assert gradient.abs().max() > 1e8
        else:
            assert torch.equal(gradient, own)
            assert own.abs().max() < 1
