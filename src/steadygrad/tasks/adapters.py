"""Tasks from the objects of a training script: a data loader, or a Hugging Face model."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from steadygrad._checks import InputError, check_choice, check_count
from steadygrad.tasks.guard import guarded
from steadygrad.tasks.hugging_face import (
    OBJECTIVES,
    check_own_loss,
    collate_columns,
    columns_of,
    objective_losses,
    objective_of,
    sequence_length,
    stack_columns,
)
from steadygrad.tasks.loader_samples import CollatedSamples, in_memory, read_loader
from steadygrad.tasks.samples import Samples
from steadygrad.tasks.task import Task

__all__ = ["from_dataloader", "from_hf"]


def from_dataloader(
    loader: Iterable[Any],
    *,
    valid: Iterable[Any] | Samples,
    per_sample_loss: Callable[[nn.Module, Any], Tensor],
    lr: float,
    model: nn.Module | None = None,
    make_model: Callable[[], nn.Module] | None = None,
    make_optimizer: Callable[[Any, float], Optimizer] = AdamW,
    batch_size: int | None = None,
    max_samples: int = 10_000,
    **fields: Any,
) -> Task:
    """Makes a task from the data loader of a training loop.

    Samples of a map-style data set are indexed, and collated by the loader's ``collate_fn``. The
    study draws them in its own random order. The loader's sampler says which samples there are: a
    sample that it draws twice counts twice. Streams (iterable-style data sets) and loaders of ready
    batches are read once, from their start, and kept in memory.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or any iterable of batches. Ready batches are
            nests of tensors whose leading dimension is that of the samples.
        valid: Loader of the held-out samples, or ``Samples``.
        per_sample_loss: ``(model, batch) -> losses`` with shape ``(n,)``; the batch is as the
            loader makes it, on the model's device.
        lr: The peak learning rate, tuned for ``batch_size``.
        model: The model, whose present weights every run starts from; they are copied.
        make_model: Makes a freshly initialised model; either this or ``model``.
        make_optimizer: ``(parameters, lr) -> optimizer``. Default: AdamW with torch's defaults.
        batch_size: The smallest batch, in samples, that a study trains at; None: the loader's.
        max_samples: Most samples read from a stream; a longer one is cut.
        **fields: Further fields of :class:`Task`. ``name`` is by default the model's class and
            ``loader_workers`` the loader's ``num_workers``.

    Returns:
        The task.

    Raises:
        InputError: If a value is out of range, or ready batches cannot be cut into samples.
    """
    check_count("max_samples", max_samples)
    train, size, provenance = read_loader("loader", loader, max_samples)
    defaults = {
        "name": "my-model" if model is None else type(model).__name__,
        "sample": "sample",
        "loader_workers": getattr(loader, "num_workers", 0),
        "provenance": provenance,
    }
    return Task(
        make_model=_maker(model, make_model),
        train=train,
        valid=read_loader("valid", valid, max_samples)[0],
        per_sample_loss=per_sample_loss,
        make_optimizer=make_optimizer,
        lr=lr,
        batch_size=size if batch_size is None else batch_size,  # type: ignore[arg-type]
        **{**defaults, **fields},
    )


def from_hf(
    model: nn.Module | None,
    dataset: Any,
    *,
    valid: Any,
    lr: float,
    batch_size: int,
    make_model: Callable[[], nn.Module] | None = None,
    objective: str | None = None,
    tokenizer: Any = None,
    collator: Callable[[list[Any]], Any] | None = None,
    make_optimizer: Callable[[Any, float], Optimizer] = AdamW,
    max_samples: int = 10_000,
    **fields: Any,
) -> Task:
    """Makes a task from a Hugging Face model and a tokenized data set.

    A sample's loss is the mean cross-entropy, in nats, over its tokens whose label is not -100; 0
    where it has none. On the first samples it is compared with the model's own loss.

    Args:
        model: The model, whose present weights every run starts from; they are copied. None: by
            ``make_model``.
        dataset: A ``datasets.Dataset``, or a sequence of mappings from column to value. Columns
            that the model's ``forward`` does not take are left out. Streams are read once, from
            their start, and kept in memory.
        valid: Data set of the held-out samples.
        lr: The peak learning rate, tuned for ``batch_size``.
        batch_size: The smallest batch, in samples, that a study trains at.
        make_model: Makes a freshly initialised model.
        objective: ``"causal-lm"``, ``"masked-lm"`` or ``"classification"``; None: by the name of
            the model's class.
        tokenizer: Pads samples of different lengths, by its method ``pad``.
        collator: ``(list of mappings) -> batch`` with ``labels``, such as a
            ``DataCollatorForLanguageModeling``; None: columns are padded by ``tokenizer`` and
            stacked, and a causal model without labels learns its own ``input_ids``.
        make_optimizer: ``(parameters, lr) -> optimizer``. Default: AdamW with torch's defaults.
        max_samples: Most samples read from a stream; a longer one is cut.
        **fields: Further fields of :class:`Task`. ``name`` is by default the model's class,
            ``sample`` ``"sequence"``, and ``tokens_per_sample`` of a language model the length of
            its samples, if they have one length.

    Returns:
        The task.

    Raises:
        InputError: If the objective is not known, or its loss is not the model's own.
    """
    check_count("max_samples", max_samples)
    make = _maker(model, make_model)
    with guarded("make_model"), torch.random.fork_rng(devices=[]):
        example = make() if model is None else model
    objective = check_choice("objective", objective or objective_of(example), OBJECTIVES)
    stack = partial(stack_columns, tokenizer=tokenizer, objective=objective)
    collate = partial(collate_columns, collate=collator or stack, columns=columns_of(example))
    rows = in_memory(dataset, max_samples)
    defaults = {
        "name": type(example).__name__,
        "sample": "sequence",
        "tokens_per_sample": None if objective == "classification" else sequence_length(rows),
    }
    task = Task(
        make_model=make,
        train=CollatedSamples(rows, collate),
        valid=CollatedSamples(in_memory(valid, max_samples), collate),
        per_sample_loss=partial(objective_losses, objective=objective),
        make_optimizer=make_optimizer,
        lr=lr,
        batch_size=batch_size,
        **{**defaults, **fields},
    )
    check_own_loss(task, example, objective)
    return task


def _maker(
    model: nn.Module | None, make_model: Callable[[], nn.Module] | None
) -> Callable[[], nn.Module]:
    if make_model is not None and model is None:
        return make_model
    if model is not None and make_model is None:
        with guarded("A copy of the model"):
            # A copy now: the caller may train the model later.
            return partial(copy.deepcopy, copy.deepcopy(model))
    raise InputError(
        "One of `model` and `make_model` should be given. Found "
        f"{'neither' if model is None else 'both'}. Remedy: `model` to start from its present "
        "weights, `make_model` to start afresh."
    )
