"""The character language model: windows, model, and what a study reads off the task."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad._checks import InputError
from steadygrad.tasks import load_task
from steadygrad.tasks.char_lm import CharTransformer, WindowSamples, char_lm, sequence_losses
from steadygrad.tasks.corpus import read_corpus
from tests.unit.tasks.tiny import decode


@pytest.fixture(scope="module")
def task():
    return load_task("char-lm")


@pytest.fixture(scope="module")
def model(task):
    torch.manual_seed(0)
    return task.make_model()


def test_windows_do_not_overlap_and_targets_are_one_later():
    windows = WindowSamples(torch.arange(13, dtype=torch.uint8), context=4)
    inputs, targets = windows.batch(torch.tensor([2, 0]))
    assert len(windows) == 3
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()


@pytest.mark.parametrize(("length", "count"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_every_window_has_its_last_target(length, count):
    windows = WindowSamples(torch.arange(length, dtype=torch.uint8), context=4)
    assert len(windows) == count
    assert windows.batch(torch.tensor([count - 1]))[1][0, -1] == 4 * count


@pytest.mark.parametrize("length", [0, 3, 4])
def test_a_text_shorter_than_one_window_has_none(length):
    assert len(WindowSamples(torch.zeros(length, dtype=torch.uint8), context=4)) == 0


def test_spread_takes_windows_from_all_over_the_text():
    windows = WindowSamples(torch.arange(41, dtype=torch.uint8), context=4)
    assert windows.spread(5).starts.tolist() == [0, 8, 16, 24, 32]
    assert windows.spread(100).starts.tolist() == windows.starts.tolist()


def test_samples_are_the_librarys_text_in_order(task):
    text = "".join(text for _, text in read_corpus().train)
    inputs, targets = task.train.batch(torch.tensor([0, 1000]))
    assert inputs.shape == targets.shape == (2, 64)
    for row, start in enumerate((0, 64_000)):
        expected = text[start : start + 65]
        assert expected.isascii()
        assert decode(bytes(inputs[row].tolist())) == expected[:-1]
        assert decode(bytes(targets[row].tolist())) == expected[1:]


def test_the_validation_text_comes_from_held_out_files(task):
    held_out = "".join(text for _, text in read_corpus().valid)
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
    assert task.provenance["sha256"] == read_corpus().sha256
    assert "Python" in task.provenance["corpus"]
    assert task.provenance["skipped"] == "none"


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
    model = CharTransformer(7, context=5, width=8, layers=1, heads=2).double()
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


def test_sizes_are_arguments(tmp_path):
    for i in range(60):
        (tmp_path / f"m{i}.py").write_text("value = 1234567890\n" * 20)
    task = char_lm(context=16, width=32, layers=3, heads=2, valid_sequences=10, folder=tmp_path)
    model = task.make_model()
    assert len(model.blocks) == 3
    assert model.positions.weight.shape == (16, 32)
    assert task.train.batch(torch.tensor([0]))[0].shape == (1, 16)
    assert len(task.valid) == 10


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"heads": 0}, "`heads`"),
        ({"context": 2.5}, "`context`"),
        ({"valid_sequences": 0}, "`valid_sequences`"),
    ],
)
def test_bad_sizes_are_refused(wrong, found):
    with pytest.raises(InputError, match=found):
        char_lm(**wrong)


def test_weights_are_not_shared(model):
    assert model.head.weight is not model.tokens.weight
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())
