"""The task: model, data, loss and optimizer of a training that a study runs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError, check_choice, check_count, check_number, shown
from steadygrad.formulas.batch_size import PLAIN_LR_RULES
from steadygrad.tasks.guard import TaskError, reason
from steadygrad.tasks.samples import Samples

__all__ = ["Task"]

OPTIMIZER_TAKES = ("parameters", "named_parameters", "model")
LR_DECAYS = ("none", "linear", "cosine")
# A name stands in titles and sentences.
LONGEST_NAME = 200


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
        samples_per_second: Training speed of the whole machine on CPU, in samples a second, as the
            author measured it with two cores. A plan uses the smaller of this and a quick
            measurement; None: the measurement alone.
        provenance: Where the data come from, for the record: ``{"corpus": ..., "sha256": ...}``.
        micro_batch_size: Most samples in one forward pass on one device, in training, measuring
            and evaluation. Larger batches are accumulated. None: a study finds what fits.
        tokens_per_sample: Tokens in one sample, for the schedules of trainers that count tokens;
            None: not a language model.
        optimizer_takes: First argument of ``make_optimizer``: ``"parameters"`` (a list),
            ``"named_parameters"`` (a list of pairs of name and parameter) or ``"model"``.
        warmup_samples: Samples over which the learning rate rises linearly from zero to its peak.
        lr_decay: How the learning rate falls after the warm-up, to zero at the end of the run:
            ``"none"`` (it does not), ``"linear"`` or ``"cosine"``.
        loader_workers: Processes that make batches ahead of the training; 0: none, the training
            process makes its own.

    Raises:
        InputError: If a field has the wrong type or is out of range, the data are empty, or the
            batch is larger than the training data.
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
    provenance: Mapping[str, str] = field(default_factory=dict)
    micro_batch_size: int | None = None
    tokens_per_sample: int | None = None
    optimizer_takes: str = "parameters"
    warmup_samples: int = 0
    lr_decay: str = "none"
    loader_workers: int = 0

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        _check_text("sample", self.sample)
        for name in ("make_model", "per_sample_loss", "make_optimizer"):
            _check_callable(name, getattr(self, name))
        if self.evaluate is not None:
            _check_callable("evaluate", self.evaluate)
        _check_samples("train", self.train)
        _check_samples("valid", self.valid)
        check_number("lr", self.lr, low=0, low_open=True)
        check_count("batch_size", self.batch_size)
        if self.batch_size > len(self.train):
            raise InputError(
                f"Parameter `batch_size` should be at most len(train) = {len(self.train)}. Found "
                f"`batch_size = {self.batch_size}`: the batch is larger than the data. "
                "Remedy: a smaller batch_size or more training samples."
            )
        check_choice("lr_rule", self.lr_rule, PLAIN_LR_RULES)
        if self.samples_per_second is not None:
            check_number("samples_per_second", self.samples_per_second, low=0, low_open=True)
        _check_provenance(self.provenance)
        for name in ("micro_batch_size", "tokens_per_sample"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_choice("optimizer_takes", self.optimizer_takes, OPTIMIZER_TAKES)
        check_count("warmup_samples", self.warmup_samples, low=0)
        check_choice("lr_decay", self.lr_decay, LR_DECAYS)
        check_count("loader_workers", self.loader_workers, low=0)

    @classmethod
    def from_dataloader(cls, loader: Any, **options: Any) -> "Task":
        """Makes a task from a loader; see :func:`steadygrad.tasks.adapters.from_dataloader`."""
        from steadygrad.tasks.adapters import from_dataloader

        return from_dataloader(loader, **options)

    @classmethod
    def from_hf(cls, model: nn.Module | None, dataset: Any, **options: Any) -> "Task":
        """Makes a Hugging Face task; see :func:`steadygrad.tasks.adapters.from_hf`."""
        from steadygrad.tasks.adapters import from_hf

        return from_hf(model, dataset, **options)

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Makes the optimizer of a model.

        Args:
            model: A model that ``make_model`` made.
            lr: The learning rate.

        Returns:
            What ``make_optimizer`` returns for the argument that ``optimizer_takes`` names.

        Raises:
            TaskError: If it raises.
        """
        takes = self.optimizer_takes
        # Lists: a factory may go through them once for each of its groups.
        given = model if takes == "model" else list(getattr(model, takes)())
        try:
            return self.make_optimizer(given, lr)
        except Exception as error:
            others = " or ".join(repr(kind) for kind in sorted({*OPTIMIZER_TAKES} - {takes}))
            raise TaskError(
                f"Task.make_optimizer should run without an error for optimizer_takes={takes!r}. "
                f"Found {reason(error)}. Remedy: optimizer_takes={others}, if it is written for "
                "that; --debug shows the traceback."
            ) from error

    def lr_factor(self, samples_seen: float, total: int) -> float:
        r"""Computes the fraction of the peak learning rate at one point of a run.

        With :math:`s` samples seen of :math:`T`, a warm-up over :math:`W` and
        :math:`p = (s - W) / (T - W)`, clipped to [0, 1], it is :math:`\min(1, s / W)` times 1,
        :math:`1 - p` (linear) or :math:`(1 + \cos \pi p) / 2` (cosine).

        At :math:`s = 0` the warm-up's factor is zero. The middle of a step's batch is the fair
        choice of :math:`s`: there linear factors equal their mean over the batch, whatever its
        size.

        Args:
            samples_seen: Samples seen, from the start of the run.
            total: Samples in the whole run.

        Returns:
            A factor in [0, 1].
        """
        check_number("samples_seen", samples_seen, low=0)
        check_count("total", total)
        warmup = self.warmup_samples
        rise = min(1.0, samples_seen / warmup) if warmup else 1.0
        if self.lr_decay == "none" or samples_seen <= warmup:
            return rise
        progress = min(1.0, (samples_seen - warmup) / (total - warmup)) if total > warmup else 1.0
        return 1 - progress if self.lr_decay == "linear" else (1 + math.cos(math.pi * progress)) / 2


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_NAME:
        raise InputError(
            f"Parameter `{name}` should be a non-empty str of at most {LONGEST_NAME} characters. "
            f"Found `{name} = {shown(value)}`. Remedy: a word, for the report to use."
        )


def _check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise InputError(
            f"Parameter `{name}` should be callable. Found {type(value).__name__}. "
            "Remedy: pass the function itself, not what it returns."
        )


def _check_samples(name: str, value: Any) -> None:
    if not isinstance(value, Samples):
        raise InputError(
            f"Parameter `{name}` should have __len__() and batch(indices). Found "
            f"{type(value).__name__}. Remedy: wrap tensors in steadygrad.tasks.TensorSamples."
        )
    if len(value) == 0:
        raise InputError(
            f"Parameter `{name}` should hold at least one sample. Found an empty data set. "
            "Remedy: check where the task reads its data from."
        )


def _check_provenance(value: Any) -> None:
    texts = isinstance(value, Mapping) and all(
        isinstance(text, str) for item in value.items() for text in item
    )
    if not texts:
        raise InputError(
            "Parameter `provenance` should map str to str. "
            f"Found `provenance = {value!r}`. Remedy: convert the values with str."
        )
