"""Tasks from models and data sets that look like Hugging Face's."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.tasks import Task, TaskError, mean_loss
from steadygrad.tasks.hugging_face import token_losses
from tests.unit.tasks.hf_like import (
    WORDS,
    TinyForMaskedLM,
    TinyForSequenceClassification,
    TinyLMHeadModel,
)

EVEN = [{"input_ids": [i % WORDS, (i + 1) % WORDS, (2 * i) % WORDS, 3]} for i in range(10)]
RAGGED = [{"input_ids": [(i + j) % (WORDS - 1) + 1 for j in range(2 + i % 3)]} for i in range(10)]
MASKED = [
    {**row, "labels": [-100, row["input_ids"][1], -100, 3 - i % 2]} for i, row in enumerate(EVEN)
]
LABELLED = [{**row, "label": i % 3} for i, row in enumerate(EVEN)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


OBJECTIVES = {
    TinyLMHeadModel: "causal-lm",
    TinyForMaskedLM: "masked-lm",
    TinyForSequenceClassification: "classification",
}


def made(model, dataset, **options):
    """Of copies of a model."""
    objective = OBJECTIVES.get(type(model), "causal-lm")
    options = {"valid": dataset, "lr": 0.1, "batch_size": 2, "objective": objective, **options}
    return Task.from_hf(partial(copy.deepcopy, model), dataset, **options)


def pad(items):
    """Pads with word 0, as ``DataCollatorForLanguageModeling`` with a tokenizer."""
    rows = [torch.tensor(item["input_ids"]) for item in items]
    batch, ones = (
        nn.utils.rnn.pad_sequence(x, batch_first=True)
        for x in (rows, [torch.ones_like(row) for row in rows])
    )
    return {"input_ids": batch, "labels": batch.masked_fill(ones == 0, -100)}


def cross_entropy(logits, label):
    """-log softmax, written out in float64."""
    return (torch.logsumexp(logits.double(), 0) - logits.double()[label]).item()


def losses_of(task, model, *indices):
    model.eval()
    return task.per_sample_loss(model, task.train.batch(torch.tensor(indices))).tolist()


def test_a_causal_models_losses_are_for_the_next_token():
    model = TinyLMHeadModel()
    table = model.table.weight.detach()
    expected = []
    for row in RAGGED[:3]:
        words = row["input_ids"]
        losses = [cross_entropy(table[a], b) for a, b in pairwise(words)]
        expected.append(sum(losses) / len(losses))
    task = made(model, RAGGED, collator=pad)
    # float32 logits and logarithms.
    assert losses_of(task, model, 0, 1, 2) == pytest.approx(expected, rel=1e-5)


def test_a_masked_models_losses_are_of_labelled_tokens():
    model = TinyForMaskedLM()
    table = model.table.weight.detach()
    expected = []
    for row in MASKED[:3]:
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        losses = [cross_entropy(table[a], b) for a, b in pairs if b != -100]
        assert len(losses) == 2
        expected.append(sum(losses) / 2)
    assert losses_of(made(model, MASKED), model, 0, 1, 2) == pytest.approx(expected, rel=1e-5)


def test_a_classifiers_losses_are_of_its_labels():
    model = TinyForSequenceClassification()
    table = model.table.weight.detach()
    expected = [
        cross_entropy(table[row["input_ids"]].mean(0), row["label"]) for row in LABELLED[:3]
    ]
    assert losses_of(made(model, LABELLED), model, 0, 1, 2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (TinyLMHeadModel, RAGGED),
        (TinyForMaskedLM, MASKED),
        (TinyForSequenceClassification, LABELLED),
    ],
)
def test_weighted_by_tokens_they_average_to_the_models_own_loss(kind, rows):
    model = kind().eval()
    task = made(model, rows, collator=pad if rows is RAGGED else None)
    batch = task.train.batch(torch.arange(5))
    labels = batch["labels"][:, 1:] if rows is RAGGED else batch["labels"]
    weights = (labels != -100).view(5, -1).sum(1)
    mean = (task.per_sample_loss(model, batch) * weights).sum() / weights.sum()
    torch.testing.assert_close(mean, model(**batch).loss)


def test_a_sample_without_labels_has_no_loss_and_no_gradient():
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, -100, -100]},
        {"input_ids": [1, 2, 3], "labels": [5, 2, 3]},
    ]
    model = TinyLMHeadModel().eval()
    task = made(model, rows)
    losses = task.per_sample_loss(model, task.train.batch(torch.arange(2)))
    assert losses[0].item() == 0.0
    assert losses[1].item() > 0.1
    losses[0].backward()
    assert not model.table.weight.grad.any()


def test_losses_are_in_float32_at_least():
    labels = torch.tensor([[1, 2, 3]])
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        losses, _ = token_losses(torch.randn(1, 3, WORDS, dtype=dtype), labels, "masked-lm")
        assert losses.dtype == expected


def test_defaults_and_fields():
    task = made(TinyLMHeadModel(), EVEN)
    assert (task.name, task.sample, task.tokens_per_sample) == ("TinyLMHeadModel", "sequence", None)
    assert type(task.make_optimizer([nn.Parameter(torch.ones(2))], 0.1)) is torch.optim.AdamW
    task = made(TinyLMHeadModel(), EVEN, name="mine", tokens_per_sample=4, lr_decay="cosine")
    assert (task.name, task.tokens_per_sample, task.lr_decay) == ("mine", 4, "cosine")


def test_columns_that_the_model_does_not_take_are_left_out():
    rows = [{**row, "text": "a text", "word_ids": [1, 2]} for row in EVEN]
    batch = made(TinyLMHeadModel(), rows).train.batch(torch.arange(2))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["labels"].tolist() == [row["input_ids"] for row in EVEN[:2]]


def test_a_forward_that_takes_anything_gets_all_columns():
    class AnyLMHeadModel(TinyLMHeadModel):
        def forward(self, *args, **kwargs):
            assert kwargs.pop("extra").shape == (2,)
            return super().forward(*args, **kwargs)

    model = AnyLMHeadModel()
    batch = made(model, [{**row, "extra": 1.0} for row in EVEN]).train.batch(torch.arange(2))
    assert set(batch) == {"input_ids", "extra", "labels"}


def test_padding_is_ignored():
    rows = [
        {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]},
        {"input_ids": [5, 6, 4], "attention_mask": [1] * 3},
    ]
    batch = made(TinyLMHeadModel(), rows).train.batch(torch.arange(2))
    assert batch["labels"].tolist() == [[1, 2, -100], [5, 6, 4]]


def test_a_collator_makes_the_batch():
    def collate(items):
        assert all(set(item) == {"input_ids"} for item in items)
        tokens = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 3, -100)}

    rows = [{**row, "text": "a text"} for row in EVEN]
    batch = made(TinyLMHeadModel(), rows, collator=collate).train.batch(torch.arange(3))
    assert (batch["labels"] == -100).any()


def test_random_numbers_are_left_alone():
    state = torch.get_rng_state()
    task = Task.from_hf(
        TinyLMHeadModel, EVEN, valid=EVEN, objective="causal-lm", lr=0.1, batch_size=2
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert task.make_model is TinyLMHeadModel


@pytest.mark.parametrize(
    ("model", "rows", "options", "found"),
    [
        (
            TinyForMaskedLM(),
            EVEN,
            {"objective": "causal-lm"},
            "should be the model's own loss.*another objective",
        ),
        (TinyLMHeadModel(), MASKED, {"objective": "masked-lm"}, "should be the model's own loss"),
        (TinyLMHeadModel(), EVEN, {"objective": "causal"}, "`objective`.*did you mean 'causal-lm'"),
        (
            TinyLMHeadModel(),
            [{"text": "a"}] * 2,
            {},
            "The model on the first samples.*KeyError: 'input_ids'",
        ),
        (TinyLMHeadModel(), RAGGED, {}, r"equal size, but got \[2\] at entry 0"),
        (TinyForMaskedLM(), EVEN, {}, "The model on the first samples.*KeyError: 'labels'"),
        (TinyLMHeadModel(), [], {"batch_size": 1}, r"`len\(train\)`"),
    ],
)
def test_what_does_not_fit_is_refused(model, rows, options, found):
    with pytest.raises(InputError, match=rf"{found}.*") as caught:
        made(model, rows, **options)
    assert "Remedy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_raises_is_one_line():
    rows = [{"input_ids": [WORDS, 1]}] * 3
    with pytest.raises(TaskError, match=r"The model on the first samples.*IndexError.*Remedy"):
        made(TinyLMHeadModel(), rows)


def test_the_check_leaves_everything_as_it_was():
    """A collator that masks at random draws; the model was in training mode."""

    def collate(items):
        tokens = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(4) < 0.2, -100)}

    model = TinyForMaskedLM()
    state = torch.get_rng_state()
    made(model, EVEN, collator=collate)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_it_trains():
    task = made(TinyLMHeadModel(), EVEN)
    model = task.make_model()
    before = mean_loss(task, model)
    optimizer = task.optimizer(model, task.lr)
    for start in range(0, 60, 2):
        batch = task.train.batch(torch.arange(start, start + 2) % 10)
        task.per_sample_loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Every word but one has a few followers: far below what it begins at.
    assert mean_loss(task, model) < 0.5 * before


@pytest.mark.parametrize("row", [[1, 2, 3], (1, 2), torch.arange(3), "text", 7], ids=repr)
@pytest.mark.parametrize("place", [0, 1, slice(None)], ids=str)
def test_rows_that_are_no_mappings_are_named(row, place):
    rows = [dict(each) for each in EVEN]
    rows[place] = [row] * len(rows) if isinstance(place, slice) else row
    for kind in (TinyLMHeadModel(), TinyForSequenceClassification()):
        with pytest.raises(InputError, match=rf"mapping.*Found {type(row).__name__}\. Remedy"):
            made(kind, rows)
