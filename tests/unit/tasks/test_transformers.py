"""``Task.from_hf`` on models of the real ``transformers``, random and tiny: nothing is downloaded.

They run where the dependency group ``hf`` is installed. The stand-ins of ``test_from_hf`` run
everywhere.
"""

import copy
from functools import partial

import pytest
import torch

from steadygrad.tasks import Task, mean_loss, to_device

REASON = "the packages of the dependency group hf are large, and not those of the library"
transformers = pytest.importorskip("transformers", reason=REASON)
datasets = pytest.importorskip("datasets", reason=REASON)

WORDS = 50
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(kind, **options):
    return kind(transformers.BertConfig(**SIZES, intermediate_size=32, **options))


def rows(count=12, length=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, WORDS, (count, length), generator=generator).tolist()


def collate(items):
    """Pads to the longest, as ``DataCollatorForLanguageModeling`` with a tokenizer."""
    tokens = [torch.tensor(item["input_ids"]) for item in items]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return transformers.BatchEncoding(
        {
            "input_ids": padded,
            "attention_mask": (padded != 0).long(),
            "labels": padded.masked_fill(padded == 0, -100),
        }
    )


MASKED = [[word if i % 3 == 0 else -100 for i, word in enumerate(row)] for row in rows()]
CASES = {
    "causal": (gpt2, {"input_ids": rows(), "text": ["a"] * 12}, {}),
    "ragged": (
        gpt2,
        {"input_ids": [row[: 3 + i % 5] for i, row in enumerate(rows())]},
        {"collator": collate},
    ),
    "masked": (
        lambda: bert(transformers.BertForMaskedLM),
        {"input_ids": rows(), "labels": MASKED},
        {},
    ),
    "classes": (
        lambda: bert(transformers.BertForSequenceClassification, num_labels=3),
        {"input_ids": rows(), "label": [i % 3 for i in range(12)]},
        {},
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    make, columns, options = CASES[request.param]
    torch.manual_seed(0)
    model = make()
    dataset = datasets.Dataset.from_dict(columns)
    objectives = {"masked": "masked-lm", "classes": "classification"}
    options["objective"] = objectives.get(request.param, "causal-lm")
    options = {"valid": dataset, "lr": 1e-2, "batch_size": 4, **options}
    return model, Task.from_hf(partial(copy.deepcopy, model), dataset, **options)


def test_weighted_by_tokens_the_losses_average_to_the_models_own(case):
    model, task = case
    model.eval()
    batch = task.train.batch(torch.arange(5))
    labels = batch["labels"][:, 1:] if "GPT2" in task.name else batch["labels"]
    weights = (labels != -100).view(5, -1).sum(1)
    mean = (task.per_sample_loss(model, batch) * weights).sum() / weights.sum()
    # One sum in float32, in another order.
    torch.testing.assert_close(mean, model(**batch).loss, rtol=1e-5, atol=1e-6)


def test_a_sample_alone_has_the_loss_it_has_in_a_batch(case):
    model, task = case
    model.eval()
    together = task.per_sample_loss(model, task.train.batch(torch.arange(5)))
    alone = [task.per_sample_loss(model, task.train.batch(torch.tensor([i]))) for i in range(5)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_it_trains(case):
    _, task = case
    model = task.make_model()
    before = mean_loss(task, model)
    optimizer = task.optimizer(model, task.lr)
    model.train()
    for start in range(0, 160, 4):
        batch = to_device(task.train.batch(torch.arange(start, start + 4) % 12), model)
        task.per_sample_loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Twelve sequences are learnt by heart.
    assert mean_loss(task, model) < 0.7 * before


def causal(dataset):
    options = {"valid": dataset, "objective": "causal-lm", "lr": 1e-3, "batch_size": 2}
    return Task.from_hf(gpt2, dataset, **options)


def test_ties():
    dataset = datasets.Dataset.from_dict({"input_ids": rows()})
    task = causal(dataset)
    assert task.name == "GPT2LMHeadModel"
    model = task.make_model()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_formats_have_the_same_batches():
    dataset = datasets.Dataset.from_dict({"input_ids": rows()})
    kinds = (dataset, dataset.with_format("torch"))
    made = [causal(kind) for kind in kinds]
    batches = [task.train.batch(torch.tensor([3, 1]))["input_ids"].tolist() for task in made]
    assert batches == [[rows()[3], rows()[1]]] * 2
