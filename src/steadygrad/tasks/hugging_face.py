"""Batches and per-sample losses of Hugging Face models, recognised by their fields; no import."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.numerics import wide
from steadygrad.tasks.check import evaluating, guarded
from steadygrad.tasks.samples import Samples, to_device

OBJECTIVES = ("causal-lm", "masked-lm", "classification")
IGNORED = -100
LABELS = ("labels", "label", "label_ids")


def objective_losses(model: nn.Module, batch: Mapping[str, Any], *, objective: str) -> Tensor:
    """Mean cross-entropy of each sample over its labelled tokens, in nats, with shape ``(n,)``."""
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    losses, labelled = token_losses(logits, batch["labels"], objective)
    return losses.sum(1) / labelled.sum(1).clamp(min=1)


def token_losses(logits: Tensor, labels: Tensor, objective: str) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every label in float32 at least, and whether there is one: ``(n, tokens)``.

    Logits are ``(n, length, classes)`` and labels ``(n, length)``, of a classification without the
    length. Where a label is -100 the loss is 0. A causal model's logits are for the next token.
    """
    if objective == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.to(wide(logits.dtype)).flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return losses.view(len(labels), -1), (labels != IGNORED).view(len(labels), -1)


def check_own_loss(samples: Samples, model: nn.Module, objective: str) -> None:
    """Refuses an objective whose loss is not the model's own, on the first two samples."""
    seeded = torch.random.fork_rng(devices=[])
    with guarded("The model on the first samples"), seeded, torch.no_grad(), evaluating(model):
        batch = to_device(samples.batch(torch.arange(min(2, len(samples)))), model)
        output = model(**batch)
        losses, labelled = token_losses(output.logits, batch["labels"], objective)
    loss = getattr(output, "loss", None)
    if loss is None or not labelled.any():
        return
    mean = float(losses.sum() / labelled.sum())
    # A loss in bfloat16 has eight bits.
    tolerance = 1e-3 if torch.finfo(loss.dtype).bits >= 32 else 2e-2
    if not math.isclose(mean, float(loss), rel_tol=tolerance, abs_tol=1e-5):
        raise InputError(
            f"The cross-entropy of objective {objective!r} should be the model's own loss, "
            f"{float(loss):.6g} on the first samples. Found {mean:.6g}. Remedy: another objective, "
            "or Task.from_dataloader with a per_sample_loss of your own."
        )


def columns_of(model: nn.Module) -> frozenset[str]:
    """The columns that a model's ``forward`` takes; empty: any."""
    parameters = inspect.signature(model.forward).parameters.values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.kind not in open_ended]
    return frozenset([*names, *LABELS] if names else ())


def collate_columns(
    columns: frozenset[str], objective: str, collator: Callable[[list[Any]], Any] | None, rows: Any
) -> Any:
    """Collates some columns of ``n`` samples; none: of all.

    Without a collator columns of one length are stacked, and tokens without labels are those of a
    ``"causal-lm"``.
    """
    for kind in {type(row) for row in rows if not isinstance(row, Mapping)}:
        raise InputError(
            "A sample of the data set should be a mapping from column to value. Found "
            f"{kind.__name__}. Remedy: a list of dicts, or Task.from_dataloader."
        )
    rows = [{k: v for k, v in row.items() if k in columns or not columns} for row in rows]
    if collator:
        return collator(rows)
    batch = {
        "labels" if name in LABELS else name: torch.stack([torch.as_tensor(r[name]) for r in rows])
        for name in rows[0]
    }
    if "labels" not in batch and objective == "causal-lm":
        tokens = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(tokens))
        batch["labels"] = tokens.masked_fill(mask == 0, IGNORED)
    return batch
