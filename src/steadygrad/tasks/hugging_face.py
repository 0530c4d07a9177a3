"""Batches and per-sample losses of Hugging Face models, recognised by their fields; no import."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.tasks.guard import guarded
from steadygrad.tasks.losses import evaluating
from steadygrad.tasks.samples import to_device
from steadygrad.tasks.task import Task

__all__ = [
    "OBJECTIVES",
    "check_own_loss",
    "collate_columns",
    "columns_of",
    "objective_losses",
    "objective_of",
    "sequence_length",
    "stack_columns",
]

OBJECTIVES = ("causal-lm", "masked-lm", "classification")
ENDINGS = {
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "classification",
}
IGNORED = -100
LABELS = ("labels", "label", "label_ids")


def objective_of(model: nn.Module) -> str:
    """The objective that the name of a model's class says; empty: none."""
    name = type(model).__name__
    return next((found for ending, found in ENDINGS.items() if name.endswith(ending)), "")


def objective_losses(model: nn.Module, batch: Mapping[str, Any], *, objective: str) -> Tensor:
    """Mean cross-entropy of each sample over its labelled tokens, in nats, with shape ``(n,)``."""
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    losses, labelled = token_losses(logits, batch["labels"], objective)
    return losses.sum(1) / labelled.sum(1).clamp(min=1)


def token_losses(logits: Tensor, labels: Tensor, objective: str) -> tuple[Tensor, Tensor]:
    """Computes the cross-entropy of every label, in float32 at least.

    Args:
        logits: With shape ``(n, length, classes)``; of a classification, ``(n, classes)``.
        labels: With shape ``(n, length)`` or ``(n,)``; -100 is ignored.
        objective: One of ``OBJECTIVES``; a causal model's logits are for the next token.

    Returns:
        Losses, 0 where ignored, and whether there is a label, both with shape ``(n, tokens)``.
    """
    if objective == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(len(labels), -1), (labels != IGNORED).view(len(labels), -1)


def check_own_loss(task: Task, model: nn.Module, objective: str) -> None:
    """Compares a task's losses with the model's own mean loss, on the first two samples.

    Raises:
        InputError: If they differ by more than rounding.
    """
    seeded = torch.random.fork_rng(devices=[])
    with guarded("The model on the first samples"), seeded, torch.no_grad(), evaluating(model):
        batch = to_device(task.train.batch(torch.arange(min(2, len(task.train)))), model)
        found = model(**batch)
        losses, labelled = token_losses(found.logits, batch["labels"], objective)
    own = getattr(found, "loss", None)
    if own is None or not labelled.any():
        return
    mean = float(losses.sum() / labelled.sum())
    # A loss in bfloat16 has eight bits.
    tolerance = 1e-3 if torch.finfo(own.dtype).bits >= 32 else 2e-2
    if not math.isclose(mean, float(own), rel_tol=tolerance, abs_tol=1e-5):
        raise InputError(
            f"The cross-entropy of objective {objective!r} should be the model's own loss, "
            f"{float(own):.6g} on the first samples. Found {mean:.6g}. Remedy: another objective, "
            "or Task.from_dataloader with a per_sample_loss of your own."
        )


def sequence_length(rows: Any) -> int | None:
    """Length of the samples' ``input_ids``, if eight samples spread over all have one length."""
    count = min(8, len(rows))
    some = (_columns(rows[i * len(rows) // count]) for i in range(count))
    lengths = {len(row.get("input_ids", ())) for row in some}
    return (lengths.pop() or None) if len(lengths) == 1 else None


def _columns(row: Any) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    raise InputError(
        "A sample of the data set should be a mapping from column to value. Found "
        f"{type(row).__name__}. Remedy: a list of dicts, or Task.from_dataloader."
    )


def columns_of(model: nn.Module) -> frozenset[str]:
    """The columns that a model's ``forward`` takes; empty: any."""
    parameters = inspect.signature(model.forward).parameters.values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.kind not in open_ended]
    return frozenset([*names, *LABELS] if names else ())


def collate_columns(
    items: list[Any], *, collate: Callable[[list[Any]], Any], columns: frozenset[str]
) -> Any:
    """Collates some columns of ``n`` samples; none: of all."""
    rows = map(_columns, items)
    return collate([{k: v for k, v in row.items() if k in columns or not columns} for row in rows])


def stack_columns(items: list[dict[str, Any]], *, tokenizer: Any, objective: str) -> dict[str, Any]:
    """Stacks every column of ``n`` samples into a tensor.

    Args:
        items: The samples.
        tokenizer: Has ``pad(items, return_tensors="pt")``; None: samples must have one length.
        objective: With ``"causal-lm"`` the tokens of samples without labels are the labels.
    """
    name = next((name for name in LABELS if name in items[0]), None)
    labels = [] if name is None else [torch.as_tensor(item[name]) for item in items]
    inputs = [{k: v for k, v in item.items() if k != name} for item in items]
    if tokenizer is None:
        columns = {key: [torch.as_tensor(item[key]) for item in inputs] for key in inputs[0]}
        batch = {key: torch.stack(values) for key, values in columns.items()}
    else:
        batch = dict(tokenizer.pad(inputs, return_tensors="pt"))
    if labels and (tokenizer is None or labels[0].ndim == 0):
        batch["labels"] = torch.stack(labels)
    elif labels:
        side = getattr(tokenizer, "padding_side", "right")
        batch["labels"] = nn.utils.rnn.pad_sequence(
            labels, batch_first=True, padding_value=IGNORED, padding_side=side
        )
    elif objective == "causal-lm":
        tokens = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(tokens))
        batch["labels"] = tokens.masked_fill(mask == 0, IGNORED)
    return batch
