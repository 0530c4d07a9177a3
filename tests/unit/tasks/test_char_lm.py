"""The character language model: windows, model, and what a study reads off the task."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad.tasks import load_task
from steadygrad.tasks.char_lm import (
    CharTransformer,
    char_lm,
    encode,
    read_corpus,
    sequence_losses,
    windows,
)
from tests.unit.tasks.tiny import decode


@pytest.fixture(scope="module")
def task():
    return load_task("char-lm")


@pytest.fixture(scope="module")
def model(task):
    torch.manual_seed(0)
    return task.make_model()


@pytest.mark.parametrize(("length", "count"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_windows_overlap_in_the_last_target_alone(length, count):
    text = "abcdefghijklm"[:length]
    rows = windows(text, 4)
    assert rows.shape == (count, 5)
    assert [row.tolist() for row in rows] == [
        list(encode(text[4 * i : 4 * i + 5])) for i in range(count)
    ]


def test_samples_are_the_librarys_text_in_order(task):
    text = read_corpus()[0]
    inputs, targets = task.train.batch(torch.tensor([0, 1000]))
    assert inputs.shape == targets.shape == (2, 64)
    for row, start in enumerate((0, 64_000)):
        expected = text[start : start + 65]
        assert expected.isascii()
        assert decode(bytes(inputs[row].tolist())) == expected[:-1]
        assert decode(bytes(targets[row].tolist())) == expected[1:]


def test_the_validation_text_comes_from_held_out_files(task):
    held_out = read_corpus()[1]
    inputs, _ = task.valid.batch(torch.arange(256))
    rows = [decode(bytes(row.tolist())) for row in inputs]
    plain = [row for row in rows if "\ufffd" not in row]
    assert len(plain) > 200
    assert all(row in held_out for row in plain)
    assert len(task.valid) == 256


def test_the_facts_that_a_record_keeps(task, model):
    assert task.sample == "sequence"
    assert sum(p.numel() for p in model.parameters()) == 248_737
    assert len(task.train) > 100_000
    assert task.provenance == read_corpus()[2]
    assert "Python" in task.provenance["corpus"]


def test_the_seed_alone_decides_on_the_model(task, model):
    torch.manual_seed(0)
    again = task.make_model()
    torch.manual_seed(1)
    other = task.make_model()
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(model.head.weight, other.head.weight)


def test_a_new_model_knows_nothing(task, model):
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


def test_no_character_sees_the_future(model):
    tokens = torch.randint(97, (2, 64), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 97
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    # The same float32 kernels run on the same prefix.
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-6)
    assert (before[:, 40:] - after[:, 40:]).abs().amax(2).min() > 1e-6


def test_positions_matter(model):
    with torch.no_grad():
        logits = model(torch.full((1, 64), 5))
    assert (logits[0, 1:] - logits[0, :-1]).abs().amax(1).min() > 1e-3


def test_shorter_sequences_and_double_precision(task):
    model = task.make_model().double()
    assert model(torch.zeros(3, 10, dtype=torch.int64)).shape == (3, 10, 97)
    assert model(torch.zeros(3, 10, dtype=torch.int64)).dtype == torch.float64


def test_sizes_are_arguments():
    task = char_lm(context=16, width=32)
    model = task.make_model()
    assert model.positions.weight.shape == (16, 32)
    assert task.tokens_per_sample == 16
    inputs, targets = task.train.batch(torch.tensor([1, 0]))
    assert inputs.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_weights_are_not_shared(model):
    assert model.head.weight is not model.tokens.weight
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())
