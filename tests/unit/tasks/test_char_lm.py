"""The character language model: its corpus, split without a leak, its windows and its model."""

import hashlib
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from steadygrad._checks import InputError
from steadygrad.tasks import load_task
from steadygrad.tasks.char_lm import (
    OTHER,
    VOCABULARY,
    CharTransformer,
    char_lm,
    encode,
    read_corpus,
    sequence_losses,
    source_names,
    windows,
)


def decode(tokens):
    """Tokens back into text; ``OTHER`` reads as U+FFFD."""
    return "".join((VOCABULARY + "\N{REPLACEMENT CHARACTER}")[token] for token in tokens)


def write(root, names, text="x = 1\n"):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n{text}", newline="")
    return root


MANY = [f"m{i}.py" for i in range(60)]


def test_tests_packages_caches_and_machine_files_are_left_out(tmp_path):
    # Sorted as whole paths: folder by folder "a" would come before "a.py".
    kept = ["B.py", "a.py", "a/b.py", "pkg/__init__.py", "pkg/testing.py", "unittest/case.py"]
    dropped = [
        "test/test_a.py",
        "pkg/tests/test_b.py",
        "idlelib/idle_test/d.py",
        "site-packages/e.py",
        "dist-packages/f.py",
        "__pycache__/g.py",
        "encodings/cp1252.py",
        "pydoc_data/topics.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "notes.txt",
    ]
    assert source_names(write(tmp_path, kept + dropped)) == kept


def test_whole_files_are_held_out(tmp_path):
    train, valid, _ = read_corpus(write(tmp_path, MANY))
    for name in MANY:
        # About one path in twenty, whatever else there is.
        held_out = hashlib.sha256(name.encode()).digest()[0] < 13
        assert (f"# {name}\n" in valid, f"# {name}\n" in train) == (held_out, not held_out)
    assert len(train + valid) == sum(len(f"# {name}\nx = 1\n") for name in MANY)


def test_the_digest_sees_names_borders_and_every_byte(tmp_path):
    digests = set()
    for change in ("none", "byte", "name", "border"):
        root = write(tmp_path / change, MANY)
        if change == "byte":
            (root / "m3.py").write_text("# m3.py\nx = 2\n")
        if change == "name":
            (root / "m9.py").rename(root / "m9a.py")  # still the last in order
        if change == "border":
            # m30.py follows m3.py: one file that swallows the next one's name and text.
            swallowed = (root / "m30.py").read_text()
            (root / "m30.py").unlink()
            (root / "m3.py").write_text((root / "m3.py").read_text() + "m30.py" + swallowed)
        digests.add(read_corpus(root)[2]["sha256"])
    assert len(digests) == 4
    # Wherever the folder lies.
    assert read_corpus(write(tmp_path / "there", MANY)) == read_corpus(tmp_path / "none")


def test_bytes_that_are_not_utf8_and_windows_line_ends(tmp_path):
    root = write(tmp_path, MANY, "x = 1\r\n")
    (root / "latin.py").write_bytes("name = 'é'\n".encode("latin-1"))
    train, *_ = read_corpus(root)
    assert "name = '\ufffd'\n" in train
    assert "\r" not in train
    assert train.endswith("\nx = 1\n")


def test_too_few_files_are_refused(tmp_path, monkeypatch):
    for folder in (tmp_path / "python311.zip", write(tmp_path, ["m1.py"])):
        with pytest.raises(InputError, match=str(folder)):
            read_corpus(folder)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(InputError, match=str(tmp_path / "none")):
        read_corpus()


def test_the_standard_library_is_there_without_its_tests():
    names = source_names(Path(sysconfig.get_paths()["stdlib"]))
    assert len(names) > 300
    assert {"argparse.py", "asyncio/events.py"} <= set(names)
    assert not any("test" in Path(name).parent.parts for name in names)
    assert len(read_corpus()[0]) > 5_000_000


def test_tokens_are_one_byte_a_character():
    tokens = encode("def f():\n    return '~' # é\t日\x00𝄞")
    assert decode(tokens) == "def f():\n    return '~' # \ufffd\ufffd\ufffd\ufffd\ufffd"
    assert tokens[-1] == OTHER == 96
    assert list(encode(VOCABULARY)) == list(range(96))


@pytest.mark.parametrize(("length", "count"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_windows_overlap_in_the_last_target_alone(length, count):
    text = "abcdefghijklm"[:length]
    expected = [list(encode(text[4 * i : 4 * i + 5])) for i in range(count)]
    assert windows(text, 4).tolist() == expected


@pytest.fixture(scope="module")
def task():
    return load_task("char-lm")


@pytest.fixture(scope="module")
def model(task):
    torch.manual_seed(0)
    return task.make_model()


def test_samples_are_the_librarys_text_in_order(task):
    text, held_out, provenance = read_corpus()
    inputs, targets = task.train.batch(torch.tensor([0, 1000]))
    assert inputs.shape == targets.shape == (2, 64)
    for row, start in enumerate((0, 64_000)):
        expected = text[start : start + 65]
        assert expected.isascii()
        assert decode(inputs[row].tolist()) == expected[:-1]
        assert decode(targets[row].tolist()) == expected[1:]
    rows = [decode(row) for row in task.valid.batch(torch.arange(256))[0].tolist()]
    plain = [row for row in rows if "\ufffd" not in row]
    assert len(plain) > 200
    assert all(row in held_out for row in plain)
    assert (len(task.valid), task.sample, task.provenance) == (256, "sequence", provenance)
    assert len(task.train) > 100_000


def test_a_new_model_knows_nothing(task, model):
    assert sum(p.numel() for p in model.parameters()) == 248_737
    with torch.no_grad():
        losses = task.per_sample_loss(model, task.valid.batch(torch.arange(64)))
    # Uniform over 97 tokens is log(97); weights of 0.02 make logits of about 0.2, hence the 3%.
    assert losses.mean().item() == pytest.approx(torch.tensor(97.0).log().item(), rel=0.03)


def test_the_loss_is_the_mean_over_a_sequence():
    torch.manual_seed(0)
    model = CharTransformer(7, context=5, width=8).double()
    inputs, targets = torch.randint(7, (2, 3, 5))
    rows = [F.cross_entropy(model(x[None])[0], y) for x, y in zip(inputs, targets, strict=True)]
    # float64, two orders of summation.
    torch.testing.assert_close(
        sequence_losses(model, (inputs, targets)), torch.stack(rows), rtol=1e-12, atol=0
    )


def test_no_character_sees_the_future_and_positions_matter(model):
    tokens = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 97
    with torch.no_grad():
        before, after, alike = model(tokens), model(changed), model(torch.full((1, 64), 5))
    # The same float32 kernels run on the same prefix.
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-6)
    assert (before[:, 40:] - after[:, 40:]).abs().amax(2).min() > 1e-6
    assert (alike[0, 1:] - alike[0, :-1]).abs().amax(1).min() > 1e-3


def test_sizes_are_arguments():
    task = char_lm(context=16, width=32)
    assert task.tokens_per_sample == 16
    inputs, targets = task.train.batch(torch.tensor([1, 0]))
    assert inputs.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    model = task.make_model()
    assert model.positions.weight.shape == (16, 32)
    # A sequence may be shorter.
    assert model(inputs[:, :10]).shape == (2, 10, 97)
