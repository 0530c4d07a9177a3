"""Tasks from models and data sets of Hugging Face, or that look like theirs.

The stand-ins run everywhere; models of the real ``transformers``, random and tiny, where the
dependency group ``hf`` is installed. Nothing is downloaded.
"""

import copy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from steadygrad._checks import InputError
from steadygrad.tasks import Task, TaskError, mean_loss
from steadygrad.tasks.hugging_face import token_losses

WORDS = 7


class StandIn(nn.Module):
    """Logits of a token are a row of a table, and the loss is the mean over what is labelled."""

    def __init__(self, objective="causal-lm"):
        super().__init__()
        self.objective = objective
        self.table = nn.Embedding(WORDS, 3 if objective == "classification" else WORDS)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.dropout(self.table(input_ids))
        if self.objective == "classification":
            logits = logits.mean(1)
        if labels is None:
            return SimpleNamespace(logits=logits, loss=None)
        of, labelled = logits, labels
        if self.objective == "causal-lm":
            of, labelled = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(of.flatten(0, -2), labelled.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


EVEN = [{"input_ids": [i % WORDS, (i + 1) % WORDS, (2 * i) % WORDS, 3]} for i in range(10)]
RAGGED = [{"input_ids": [(i + j) % (WORDS - 1) + 1 for j in range(2 + i % 3)]} for i in range(10)]
MASKED = [
    {**row, "labels": [-100, row["input_ids"][1], -100, 3 - i % 2]} for i, row in enumerate(EVEN)
]
LABELLED = [{**row, "label": i % 3} for i, row in enumerate(EVEN)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def made(model, dataset, **options):
    """Of copies of a model."""
    objective = getattr(model, "objective", "causal-lm")
    defaults = {"valid": dataset, "lr": 0.1, "batch_size": 2, "objective": objective}
    return Task.from_hf(partial(copy.deepcopy, model), dataset, **defaults | options)


def pad(items):
    """Pads with word 0, as ``DataCollatorForLanguageModeling`` with a tokenizer."""
    batch = pad_sequence([torch.tensor(item["input_ids"]) for item in items], batch_first=True)
    return {"input_ids": batch, "labels": batch.masked_fill(batch == 0, -100)}


def cross_entropy(logits, label):
    """-log softmax, written out in float64."""
    return (torch.logsumexp(logits.double(), 0) - logits.double()[label]).item()


def next_tokens(table, row):
    return [cross_entropy(table[a], b) for a, b in pairwise(row["input_ids"])]


def labelled_tokens(table, row):
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    return [cross_entropy(table[a], b) for a, b in pairs if b != -100]


def label(table, row):
    return [cross_entropy(table[row["input_ids"]].mean(0), row["label"])]


@pytest.mark.parametrize(
    ("objective", "rows", "collator", "by_hand"),
    [
        ("causal-lm", RAGGED, pad, next_tokens),
        ("masked-lm", MASKED, None, labelled_tokens),
        ("classification", LABELLED, None, label),
    ],
)
def test_losses_are_the_mean_over_a_samples_own_labels(objective, rows, collator, by_hand):
    model = StandIn(objective).eval()
    task = made(model, rows, collator=collator)
    losses = task.per_sample_loss(model, task.train.batch(torch.arange(3))).tolist()
    expected = [by_hand(model.table.weight.detach(), row) for row in rows[:3]]
    # float32 logits and logarithms.
    assert losses == pytest.approx([sum(each) / len(each) for each in expected], rel=1e-5)


def real(kind):
    """A model of transformers, with one layer, and three classes where it has any."""
    transformers = pytest.importorskip("transformers", reason="of the dependency group hf")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, num_labels=3)
    if "GPT2" in kind:
        sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
        config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes)
    return getattr(transformers, kind)(config)


def encoded(items):
    """As a collator of transformers, whose batches are no dict."""
    transformers = pytest.importorskip("transformers")
    batch = pad(items)
    return transformers.BatchEncoding({**batch, "attention_mask": (batch["labels"] > 0).long()})


LONG = torch.randint(1, 50, (12, 8), generator=torch.Generator().manual_seed(0)).tolist()
SOME = [[word if i % 3 == 0 else -100 for i, word in enumerate(row)] for row in LONG]
RAGGED_LONG = [row[: 3 + i % 5] for i, row in enumerate(LONG)]
LABELS = [i % 3 for i in range(12)]
# Of each case a model, its objective, columns of the data and the collator.
REAL = {
    "causal": ("GPT2LMHeadModel", "causal-lm", {"input_ids": LONG, "text": ["a"] * 12}, None),
    "ragged": ("GPT2LMHeadModel", "causal-lm", {"input_ids": RAGGED_LONG}, encoded),
    "masked": ("BertForMaskedLM", "masked-lm", {"input_ids": LONG, "labels": SOME}, None),
    "classes": (
        "BertForSequenceClassification", "classification",
        {"input_ids": LONG, "label": LABELS}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REAL)
def test_losses_of_real_models_average_to_their_own(case):
    kind, objective, columns, collator = REAL[case]
    model = real(kind).eval()
    rows = pytest.importorskip("datasets").Dataset.from_dict(columns)
    task = made(model, rows, objective=objective, collator=collator)
    assert task.name == kind
    batch = task.train.batch(torch.arange(5))
    labels = batch["labels"][:, 1:] if "GPT2" in kind else batch["labels"]
    weights = (labels != -100).view(5, -1).sum(1)
    losses = task.per_sample_loss(model, batch)
    # One sum in float32, in another order.
    mean = (losses * weights).sum() / weights.sum()
    torch.testing.assert_close(mean, model(**batch).loss, rtol=1e-5, atol=1e-6)
    alone = [task.per_sample_loss(model, task.train.batch(torch.tensor([i]))) for i in range(5)]
    torch.testing.assert_close(losses, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert mean_loss(task, model) > 0


def test_formats_of_a_data_set_have_the_same_batches():
    datasets = pytest.importorskip("datasets", reason="of the dependency group hf")
    rows = datasets.Dataset.from_dict({"input_ids": LONG})
    model = real("GPT2LMHeadModel")
    for kind in (rows, rows.with_format("torch")):
        batch = made(model, kind).train.batch(torch.tensor([3, 1]))
        assert batch["input_ids"].tolist() == [LONG[3], LONG[1]]


def test_a_sample_without_labels_has_no_loss_and_no_gradient():
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, -100, -100]},
        {"input_ids": [1, 2, 3], "labels": [5, 2, 3]},
    ]
    model = StandIn().eval()
    task = made(model, rows)
    losses = task.per_sample_loss(model, task.train.batch(torch.arange(2)))
    assert losses[0].item() == 0.0
    assert losses[1].item() > 0.1
    losses[0].backward()
    assert not model.table.weight.grad.any()


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_losses_are_in_float32_at_least(dtype, expected):
    logits, labels = torch.randn(1, 3, WORDS, dtype=dtype), torch.tensor([[1, 2, 3]])
    assert token_losses(logits, labels, "masked-lm")[0].dtype == expected


def test_defaults_and_fields():
    state = torch.get_rng_state()
    task = Task.from_hf(StandIn, EVEN, valid=EVEN, objective="causal-lm", lr=0.1, batch_size=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert (task.name, task.sample, task.make_model) == ("StandIn", "sequence", StandIn)
    assert task.make_optimizer is torch.optim.AdamW
    assert task.tokens_per_sample is None
    task = made(StandIn(), EVEN, name="mine", tokens_per_sample=4, lr_decay="cosine")
    assert (task.name, task.tokens_per_sample, task.lr_decay) == ("mine", 4, "cosine")


class Anything(StandIn):
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
        (StandIn, [{**row, "text": "a", "word_ids": [1, 2]} for row in EVEN], set(), None),
        (Anything, [{**row, "word_ids": [1, 2]} for row in EVEN], {"word_ids"}, None),
        (StandIn, PADDED, {"attention_mask"}, [[1, 2, -100], [5, 6, 4]]),
    ],
)
def test_columns_are_those_that_the_model_takes(kind, rows, columns, labels):
    batch = made(kind(), rows).train.batch(torch.arange(2))
    assert {*batch} == columns | {"input_ids", "labels"}
    assert batch["labels"].tolist() == (labels or [row["input_ids"] for row in EVEN[:2]])


def test_a_collator_makes_the_batch_and_the_check_leaves_everything_as_it_was():
    """A collator that masks at random draws; the model was in training mode."""

    def collate(items):
        assert all(set(item) == {"input_ids"} for item in items)
        tokens = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(4) < 0.2, -100)}

    model = StandIn("masked-lm")
    state = torch.get_rng_state()
    made(model, [{**row, "text": "a text"} for row in EVEN], collator=collate)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("objective", "rows", "options", "found"),
    [
        ("masked-lm", EVEN, {"objective": "causal-lm"}, "objective 'causal-lm'"),
        ("causal-lm", MASKED, {"objective": "masked-lm"}, "objective 'masked-lm'"),
        ("causal-lm", EVEN, {"objective": "causal"}, "`objective`"),
        ("causal-lm", [{"text": "a"}] * 2, {}, "KeyError: 'input_ids'"),
        ("causal-lm", RAGGED, {}, "equal size"),
        ("masked-lm", EVEN, {}, "KeyError: 'labels'"),
        ("causal-lm", [], {"batch_size": 1}, "train"),
        ("causal-lm", [{"input_ids": [WORDS, 1]}] * 3, {}, "IndexError"),
        ("causal-lm", [{"input_ids": [1, 2]}, [1, 2]], {}, "mapping.* list"),
        ("classification", [torch.arange(3)] * 2, {}, "mapping.* Tensor"),
        ("causal-lm", ["text"] * 2, {}, "mapping.* str"),
    ],
)
def test_what_does_not_fit_is_refused(objective, rows, options, found):
    with pytest.raises(InputError, match=found) as caught:
        made(StandIn(objective), rows, **options)
    assert isinstance(caught.value, TaskError) == ("Error" in found or found == "equal size")
    assert "\n" not in str(caught.value)
