"""Tasks from models and data sets of Hugging Face, random and tiny. Nothing is downloaded."""

import copy
from functools import partial

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from steadygrad._checks import InputError
from steadygrad.tasks import Task, TaskError, mean_loss
from steadygrad.tasks.task import token_losses

transformers = pytest.importorskip("transformers", reason="of the dependency group hf")
datasets = pytest.importorskip("datasets", reason="of the dependency group hf")

WORDS = 50
LONG = torch.randint(1, WORDS, (12, 8), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = [{"input_ids": row} for row in LONG]
RAGGED = [{"input_ids": row[: 3 + i % 5]} for i, row in enumerate(LONG)]
MASKED = [
    {"input_ids": row, "labels": [w if i % 3 == 0 else -100 for i, w in enumerate(row)]}
    for row in LONG
]
LABELLED = [{"input_ids": row, "label": i % 3} for i, row in enumerate(LONG)]
OBJECTIVES = {
    "GPT2LMHeadModel": "causal-lm",
    "BertForMaskedLM": "masked-lm",
    "BertForSequenceClassification": "classification",
}


def model_of(kind):
    """A model of transformers, with one layer, and three classes where it has any."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(
        **sizes, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    if "GPT2" in kind:
        sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return getattr(transformers, kind)(config)


def made(rows, *, kind="GPT2LMHeadModel", model=None, **options):
    """A task of copies of a model."""
    model = model or model_of(kind)
    defaults = {"valid": rows, "lr": 0.1, "batch_size": 2, "objective": OBJECTIVES[kind]}
    return Task.from_hf(partial(copy.deepcopy, model), rows, **defaults | options)


def pad(items):
    """As ``DataCollatorForLanguageModeling``, whose batches are no dict."""
    words = pad_sequence([torch.tensor(item["input_ids"]) for item in items], batch_first=True)
    labels, mask = words.masked_fill(words == 0, -100), (words > 0).long()
    return transformers.BatchEncoding(
        {"input_ids": words, "labels": labels, "attention_mask": mask}
    )


@pytest.mark.parametrize(
    ("kind", "rows", "collator"),
    [
        ("GPT2LMHeadModel", ROWS, None),
        ("GPT2LMHeadModel", RAGGED, pad),
        ("BertForMaskedLM", MASKED, None),
        ("BertForSequenceClassification", LABELLED, None),
    ],
)
def test_losses_are_those_of_the_model(kind, rows, collator):
    model = model_of(kind).eval()
    task = made(datasets.Dataset.from_list(rows), kind=kind, collator=collator)
    assert task.name == kind
    batch = task.train.batch(torch.arange(5))
    losses = task.per_sample_loss(model, batch)
    for i, loss in enumerate(losses):
        alone = task.train.batch(torch.tensor([i]))
        # One sum in float32, in another order.
        torch.testing.assert_close(loss, model(**alone).loss, rtol=1e-4, atol=1e-5)
    assert mean_loss(task, model) > 0


def test_a_sample_without_labels_has_no_loss_and_no_gradient():
    model, ids = model_of("GPT2LMHeadModel"), [1, 2, 3]
    rows = [{"input_ids": ids, "labels": [1, -100, -100]}, {"input_ids": ids, "labels": [5, 2, 3]}]
    task = made(rows, model=model)
    losses = task.per_sample_loss(model, task.train.batch(torch.arange(2)))
    assert losses[0].item() == 0.0
    assert losses[1].item() > 0.1
    losses[0].backward()
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_losses_are_in_float32_at_least(dtype, expected):
    logits, labels = torch.randn(1, 3, 7, dtype=dtype), torch.tensor([[1, 2, 3]])
    assert token_losses(logits, labels, "masked-lm")[0].dtype == expected


class Anything(transformers.GPT2LMHeadModel):
    """Its forward takes any column."""

    def forward(self, *args, **kwargs):
        assert kwargs.pop("word_ids").shape == (2, 2)
        return super().forward(*args, **kwargs)


PADDED = [
    {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]},
    {"input_ids": [5, 6, 4], "attention_mask": [1] * 3},
]


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "labels"),
    [
        (None, [{**row, "text": "a", "word_ids": [1, 2]} for row in ROWS], set(), LONG[:2]),
        (Anything, [{**row, "word_ids": [1, 2]} for row in ROWS], {"word_ids"}, LONG[:2]),
        (None, PADDED, {"attention_mask"}, [[1, 2, -100], [5, 6, 4]]),
    ],
)
def test_columns_are_those_that_the_model_takes(kind, rows, columns, labels):
    model = model_of("GPT2LMHeadModel")
    batch = made(rows, model=kind(model.config) if kind else model).train.batch(torch.arange(2))
    assert {*batch} == columns | {"input_ids", "labels"}
    assert batch["labels"].tolist() == labels


def test_a_collator_makes_the_batch_and_the_check_leaves_everything_as_it_was():
    """A collator that masks at random draws; the model was in training mode."""

    def collate(items):
        assert all(set(item) == {"input_ids"} for item in items)
        tokens = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(8) < 0.2, -100)}

    model = model_of("BertForMaskedLM").train()
    state = torch.get_rng_state()
    rows = [{**row, "text": "a text"} for row in ROWS]
    made(rows, kind="BertForMaskedLM", model=model, collator=collate)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "rows", "options", "found"),
    [
        ("BertForMaskedLM", MASKED, {"objective": "causal-lm"}, "objective 'causal-lm'"),
        ("GPT2LMHeadModel", MASKED, {"objective": "masked-lm"}, "objective 'masked-lm'"),
        ("GPT2LMHeadModel", ROWS, {"objective": "causal"}, "`objective`"),
        ("GPT2LMHeadModel", [{"text": "a"}] * 2, {}, "KeyError: 'input_ids'"),
        ("GPT2LMHeadModel", RAGGED, {}, "equal size"),
        ("BertForMaskedLM", ROWS, {}, "KeyError: 'labels'"),
        ("GPT2LMHeadModel", [], {"batch_size": 1}, "train"),
        ("GPT2LMHeadModel", [{"input_ids": [WORDS, 1]}] * 3, {}, "IndexError"),
        ("GPT2LMHeadModel", [{"input_ids": [1, 2]}, [1, 2]], {}, "mapping.* list"),
        ("BertForSequenceClassification", [torch.arange(3)] * 2, {}, "mapping.* Tensor"),
    ],
)
def test_what_does_not_fit_is_refused(kind, rows, options, found):
    with pytest.raises(InputError, match=found) as caught:
        made(rows, kind=kind, **options)
    assert isinstance(caught.value, TaskError) == ("Error" in found or found == "equal size")
    assert "\n" not in str(caught.value)
