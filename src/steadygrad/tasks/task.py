"""The task: model, data, loss and optimizer of a training that a study runs."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from steadygrad._checks import InputError, check_choice, check_count, check_number, check_type
from steadygrad.noise.schedule import LR_RULES
from steadygrad.numerics import wide
from steadygrad.tasks.check import check_losses, check_model, evaluating, guarded
from steadygrad.tasks.samples import CollatedSamples, Samples, read_loader, to_device
from steadygrad.tasks.start import files_of

LR_DECAYS = ("none", "linear", "cosine")
OPTIMIZER_TAKES = ("parameters", "named_parameters", "model")
# Most samples in one forward pass of an evaluation, where nothing says how many fit.
EVALUATION_SIZE = 128
# Models of Hugging Face are recognised by their fields; no import.
OBJECTIVES = ("causal-lm", "masked-lm", "classification")
IGNORED = -100
LABELS = ("labels", "label", "label_ids")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and how it is trained.

    Args:
        name: What reports call the task.
        sample: What one sample is called, singular: ``"sequence"``, ``"image"``.
        make_model: Makes a freshly initialised model; the caller seeds torch's generator.
        train: The training samples.
        valid: The samples held out for evaluation.
        per_sample_loss: ``(model, batch) -> losses`` with shape ``(n,)``: one loss for each of the
            batch's ``n`` samples, not their mean.
        make_optimizer: ``(parameters, lr) -> optimizer``.
        lr: The peak learning rate, tuned for ``batch_size``.
        batch_size: The smallest batch, in samples, that a study trains at.
        lr_rule: How the learning rate follows the batch size: ``"sqrt"`` (Adam-like optimizers),
            ``"linear"`` (SGD) or ``"constant"``.
        evaluate: ``(model, samples) -> loss`` to be minimised; None: the mean per-sample loss.
        samples_per_second: Training speed of the whole machine on CPU, measured with two cores. A
            plan uses the smaller of this and a quick measurement; None: the measurement alone.
        provenance: Where the data come from, for the record: ``{"corpus": ..., "sha256": ...}``.
        micro_batch_size: Most samples in one forward pass on one device, in training, measuring
            and evaluation. Larger batches are accumulated. None: a study finds what fits.
        tokens_per_sample: Tokens in one sample, for schedules in tokens; None: no language model.
        optimizer_takes: First argument of ``make_optimizer``: ``"parameters"`` (a list),
            ``"named_parameters"`` (a list of pairs of name and parameter) or ``"model"``.
        warmup_samples: Samples over which the learning rate rises linearly from zero to its peak.
        lr_decay: How the learning rate falls after the warm-up, to zero at the end of the run:
            ``"none"`` (it does not), ``"linear"`` or ``"cosine"``.
        loader_workers: Processes that make batches ahead of the training; 0: none.
        start: Checkpoint that every run begins from, in place of fresh weights: a file or folder of
            torch, safetensors, Hugging Face's Trainer or Accelerate. With the optimizer's state, if
            it is there; learning rate, betas and weight decay stay the task's.
        proxy: Makes a smaller model, which ``advise`` trains where the run is too long to be tried.

    Raises:
        InputError: If a field has the wrong type or is out of range, or the data are empty.
    """

    name: str
    sample: str
    make_model: Callable[[], nn.Module]
    train: Samples
    valid: Samples
    per_sample_loss: Callable[[nn.Module, Any], Tensor]
    make_optimizer: Callable[[Any, float], Optimizer]
    lr: float
    batch_size: int
    lr_rule: str = "sqrt"
    evaluate: Callable[[nn.Module, Samples], float] | None = None
    samples_per_second: float | None = None
    provenance: dict[str, str] = field(default_factory=dict)
    micro_batch_size: int | None = None
    tokens_per_sample: int | None = None
    optimizer_takes: str = "parameters"
    warmup_samples: int = 0
    lr_decay: str = "none"
    loader_workers: int = 0
    start: str | Path | None = None
    proxy: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        for name in ("name", "sample"):
            check_type(name, getattr(self, name), str, "a word, for the report")
        for name in ("train", "valid"):
            samples = getattr(self, name)
            if not isinstance(samples, Samples):
                raise InputError(
                    f"Parameter `{name}` should have __len__() and batch(indices). Found "
                    f"{type(samples).__name__}. Remedy: wrap tensors in TensorSamples."
                )
            check_count(f"len({name})", len(samples), remedy="look where the task reads its data")
        check_number("lr", self.lr, low=0, low_open=True)
        high = len(self.train)
        check_number("batch_size", check_count("batch_size", self.batch_size), high=high)
        check_choice("lr_rule", self.lr_rule, LR_RULES)
        if self.samples_per_second is not None:
            check_number("samples_per_second", self.samples_per_second, low=0, low_open=True)
        check_type("provenance", self.provenance, dict, "a dict of texts")
        for text in (part for item in self.provenance.items() for part in item):
            check_type("provenance", text, str, "texts for its keys and values")
        for name in ("micro_batch_size", "tokens_per_sample"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_choice("optimizer_takes", self.optimizer_takes, OPTIMIZER_TAKES)
        check_count("warmup_samples", self.warmup_samples, low=0)
        check_choice("lr_decay", self.lr_decay, LR_DECAYS)
        check_count("loader_workers", self.loader_workers, low=0)
        if self.start is not None:
            files_of(self.start)

    @classmethod
    def from_dataloader(
        cls,
        loader: DataLoader[Any],
        *,
        valid: DataLoader[Any] | Samples,
        max_samples: int = 10_000,
        **fields: Any,
    ) -> "Task":
        """Makes a task from the data loader of a training loop.

        Its sampler says which samples there are, a study in which order. A stream is read once, and
        kept in memory.

        Args:
            loader: Makes batches of single samples.
            valid: Loader of the held-out samples, or ``Samples``.
            max_samples: Most samples read from a stream; a longer one is cut.
            **fields: Further fields of the task. By default ``make_optimizer`` is AdamW,
                ``batch_size`` the loader's, and ``loader_workers`` its ``num_workers``.

        Raises:
            InputError: If a value is out of range, or the loader's batches are ready ones.
        """
        check_count("max_samples", max_samples)
        train, own = read_loader("loader", loader, max_samples)
        held_out, _ = read_loader("valid", valid, max_samples)
        defaults = {"name": "my-model", "sample": "sample", "make_optimizer": AdamW, **own}
        return cls(train=train, valid=held_out, **{**defaults, **fields})

    @classmethod
    def from_hf(
        cls,
        make_model: Callable[[], nn.Module],
        dataset: Any,
        *,
        valid: Any,
        objective: str,
        collator: Callable[[list[Any]], Any] | None = None,
        **fields: Any,
    ) -> "Task":
        """Makes a task from a Hugging Face model and a tokenized data set.

        A sample's loss is the mean cross-entropy, in nats, over its tokens whose label is not -100;
        0 where it has none.

        Args:
            make_model: Makes a model; of one to be fine-tuned, a copy.
            dataset: A ``datasets.Dataset``, or a sequence of mappings from column to value. Columns
                that the model's ``forward`` does not take are left out.
            valid: Data set of the held-out samples.
            objective: ``"causal-lm"``, ``"masked-lm"`` or ``"classification"``.
            collator: ``(list of mappings) -> batch`` with ``labels``, such as a
                ``DataCollatorForLanguageModeling``, which pads as well; None: columns of one length
                are stacked, and a causal model without labels learns its own ``input_ids``.
            **fields: Further fields of the task. By default ``make_optimizer`` is AdamW, ``name``
                the model's class and ``sample`` ``"sequence"``.

        Raises:
            InputError: If the objective is not known, or its loss is not the model's own.
        """
        check_choice("objective", objective, OBJECTIVES)
        with guarded("make_model"), torch.random.fork_rng(devices=[]):
            model = check_model(make_model())
        collate = partial(collate_columns, columns_of(model), objective, collator)
        train, held_out = (CollatedSamples(x, range(len(x)), collate) for x in (dataset, valid))
        defaults = {
            "name": type(model).__name__,
            "sample": "sequence",
            "per_sample_loss": partial(objective_losses, objective=objective),
            "make_optimizer": AdamW,
        }
        data = {"make_model": make_model, "train": train, "valid": held_out}
        task = cls(**{**defaults, **data, **fields})
        check_own_loss(train, model, objective)
        return task

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Makes the optimizer of a model; an error of ``make_optimizer`` is a TaskError."""
        takes = self.optimizer_takes
        # Lists: a factory may go through them once for each of its groups.
        first = model if takes == "model" else list(getattr(model, takes)())
        with guarded(f"Task.make_optimizer, with optimizer_takes={takes!r},"):
            return self.make_optimizer(first, lr)

    def lr_factor(self, samples_seen: float, total: int) -> float:
        r"""The fraction of the peak learning rate after ``samples_seen`` of ``total`` samples.

        With :math:`s` samples seen of :math:`T`, a warm-up over :math:`W` and
        :math:`p = (s - W) / (T - W)`, clipped to [0, 1], it is :math:`\min(1, s / W)` times 1,
        :math:`1 - p` (linear) or :math:`(1 + \cos \pi p) / 2` (cosine).

        The middle of a step's batch is the fair choice of :math:`s`: there linear factors equal
        their mean over the batch, whatever its size.
        """
        warmup = self.warmup_samples
        rise = min(1.0, samples_seen / warmup) if warmup else 1.0
        if self.lr_decay == "none" or samples_seen <= warmup:
            return rise
        progress = min(1.0, (samples_seen - warmup) / (total - warmup)) if total > warmup else 1.0
        return 1 - progress if self.lr_decay == "linear" else (1 + math.cos(math.pi * progress)) / 2


def mean_loss(
    task: Task,
    model: nn.Module,
    samples: Samples | None = None,
    *,
    micro_batch_size: int | None = None,
    indices: Tensor | None = None,
) -> float:
    """Evaluates a model by its mean per-sample loss, in evaluation mode and without gradients.

    Args:
        task: Says the per-sample loss.
        model: The model; every module's training mode is put back afterwards.
        samples: What to evaluate on. Default: ``task.valid``.
        micro_batch_size: Most samples in one forward pass. Default: the task's, or else 128.
        indices: Numbers of the samples, shape ``(n,)``. Default: all.

    Returns:
        The mean, summed in float64; it may be NaN or infinite when a loss is.
    """
    size = micro_batch_size or task.micro_batch_size or EVALUATION_SIZE
    samples = task.valid if samples is None else samples
    indices, total = torch.arange(len(samples)) if indices is None else indices, 0.0
    with torch.no_grad(), evaluating(model):
        for some in indices.split(size):
            losses = task.per_sample_loss(model, to_device(samples.batch(some), model))
            check_losses(losses, len(some), finite=False)
            # On the host: MPS has no float64.
            total += float(losses.cpu().double().sum())
    return total / len(indices)


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
    scores = logits.to(wide(logits.dtype)).flatten(0, -2)
    losses = F.cross_entropy(scores, labels.flatten(), ignore_index=IGNORED, reduction="none")
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
    """Collates some columns of ``n`` samples, as ``Task.from_hf`` says; none: of all."""
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
