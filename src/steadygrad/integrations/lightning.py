"""Callbacks and a precision plugin for Lightning's ``Trainer``."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_type
from steadygrad.formulas.schedule import BatchSizeSchedule
from steadygrad.integrations.batches import rows_of
from steadygrad.integrations.extras import MissingExtraError
from steadygrad.integrations.lightning_precision import LayerwisePrecision
from steadygrad.integrations.metrics import noise_metrics
from steadygrad.integrations.options import check_noise_options, sample_counter
from steadygrad.integrations.step_watch import BatchWatch
from steadygrad.integrations.windows import check_micro_batch, check_parts
from steadygrad.noise import NoiseScale
from steadygrad.watch import Finding

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise MissingExtraError("lightning", "lightning") from error

__all__ = [
    "BatchSizeCallback",
    "GradientWatchCallback",
    "LayerwisePrecision",
    "NoiseScaleCallback",
]


class NoiseScaleCallback(Callback):
    """Measures the noise scale before gradients are clipped, and logs it.

    .. code-block:: python

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[NoiseScaleCallback()])

    The numbers are logged by ``log_dict`` as ``steadygrad/noise_scale/...``, every
    ``log_every_n_steps``. The measurements are in Lightning's checkpoints. A window with one
    backward pass on one process, as at an epoch's end, is left out.

    Args:
        samples: Number of samples of a micro-batch. Default: the rows of its first tensor.
        **options: Of :class:`NoiseScale`.

    Attributes:
        noise: The estimator, once training has begun; None before.
        left_out: Number of windows left out.

    Raises:
        InputError: When training begins with manual optimization, DeepSpeed or FSDP1.
    """

    def __init__(self, samples: Callable[[Any], int] | int = rows_of, **options: Any) -> None:
        check_noise_options(options, own=["samples"])
        self.noise: NoiseScale | None = None
        self.left_out = 0
        self._samples_of, self._options = sample_counter(samples), options
        # The hooked module, and measurements from a checkpoint that wait for training to begin.
        self._module: weakref.ref[LightningModule] | None = None
        self._loaded: Mapping[str, Any] | None = None
        # Samples of the micro-batch under way, and backward passes of the window under way.
        self._samples = self._passes = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hooks the estimator to the model as it is trained: wrapped, and on its device."""
        check_support(trainer, pl_module)
        if self._module is not None and self._module() is not pl_module:
            self.noise, self.left_out = None, 0
        self._module = weakref.ref(pl_module)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        noise = NoiseScale(trainer.strategy.model, **{"scaler": scaler, **self._options})
        state = self.state_dict()
        if state:
            noise.load_state_dict(state["noise"])
        self.noise, self._passes = noise, 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Counts the micro-batch's samples."""
        self._samples = self._samples_of(batch)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Tells of the backward pass."""
        if self.noise is not None:
            # Lightning has divided the loss so, in short windows too.
            self.noise.samples(self._samples, weight=1 / trainer.accumulate_grad_batches)
            self._passes += 1

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Measures the step."""
        if self.noise is None:
            return
        passes, self._passes = self._passes, 0
        if passes * trainer.world_size < 2:
            self._leave_out(trainer, self.noise)
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        # LayerwiseGradScaler knows which scales are left in .grad; torch's GradScaler does not.
        unscaled = isinstance(scaler, torch.amp.GradScaler) and not fused
        self.noise.step(grad_scale=1.0 if unscaled else None)

    def _leave_out(self, trainer: Trainer, noise: NoiseScale) -> None:
        if not any(isinstance(callback, BatchSizeCallback) for callback in trainer.callbacks):
            planned = trainer.accumulate_grad_batches * trainer.world_size
            check_parts(planned, "accumulate_grad_batches=2 and batches half as large")
        self.left_out += 1
        noise.drop_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Logs the numbers where Lightning logs its own."""
        every, loop = trainer.log_every_n_steps, trainer.fit_loop
        if self.noise is None or loop._should_accumulate() or not every:
            return
        if trainer.global_step % every == 0:
            # For a key that is missing Lightning logs the previous value again.
            pl_module.log_dict(noise_metrics(self.noise, all_numbers=True))

    def on_train_end(self, *_: Any) -> None:
        """Takes the hooks off the model; the estimate stays."""
        if self.noise is not None:
            self.noise.remove()

    on_exception = on_train_end

    def state_dict(self) -> dict[str, Any]:
        """The measurements."""
        noise = self._loaded if self.noise is None else self.noise.state_dict()
        return {} if noise is None else {"noise": noise, "left_out": self.left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the measurements until training begins."""
        self.on_train_end()
        self._loaded, self.noise = state_dict.get("noise"), None
        self.left_out = int(state_dict.get("left_out", 0))


class GradientWatchCallback(Callback):
    """Warns of the module, weight, batch or loss that first made a step's gradients non-finite.

    .. code-block:: python

        trainer = Trainer(callbacks=[GradientWatchCallback()])

    It checks the gradients before they are clipped, and waits for the device once a step.
    Consecutive steps with non-finite gradients give one finding. Under a gradient scaler, an
    overflow of its scale is one as well.

    Attributes:
        watch: The :class:`GradientWatch`, once training has begun; None before. Its ``batches``
            are micro-batches of this ``fit``.
        findings: Causes so far, oldest first.

    Raises:
        InputError: When training begins, as :class:`NoiseScaleCallback`.
    """

    def __init__(self) -> None:
        self.watch: BatchWatch | None = None
        self.findings: list[Finding] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hooks the watch to the model as it is trained."""
        check_support(trainer, pl_module)
        self.watch = BatchWatch(trainer.strategy.model, self.findings)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins a pass."""
        if self.watch is not None:
            self.watch.begin_batch(batch)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Looks at the step's gradients."""
        if self.watch is not None:
            self.watch.step()

    def on_train_end(self, *_: Any) -> None:
        """Takes the hooks off the model; the findings stay."""
        if self.watch is not None:
            self.watch.close()

    on_exception = on_train_end


class BatchSizeCallback(Callback):
    """Sets ``trainer.accumulate_grad_batches`` by samples seen, between two windows.

    Args:
        schedule: Batch sizes by samples seen; the learning rates in it are not used.
        batch_size: Samples of one micro-batch, on all devices together.

    Raises:
        InputError: If a stage's batch size is not an integer multiple of ``batch_size``; or, when
            training begins, as :class:`NoiseScaleCallback`.
    """

    def __init__(self, schedule: BatchSizeSchedule, batch_size: int) -> None:
        check_type("schedule", schedule, BatchSizeSchedule, "BatchSizeSchedule([...])")
        check_micro_batch(schedule, batch_size)
        self._schedule, self._batch_size = schedule, batch_size
        self._seen, self._factor = 0, self._wanted(0)

    def _wanted(self, seen: int) -> int:
        return self._schedule.batch_size(seen * self._batch_size) // self._batch_size

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the first factor before schedulers of learning rates are made."""
        trainer.accumulate_grad_batches = self._factor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that Lightning accumulates the gradients, and sets the factor again."""
        check_support(trainer, pl_module)
        trainer.accumulate_grad_batches = self._factor

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Sets a new factor at the first window that begins at one of its multiples."""
        if not self._seen:
            self._check_rows(rows_of(batch) * trainer.world_size)
        wanted = self._wanted(self._seen)
        if batch_idx % self._factor == 0 and batch_idx % wanted == 0:
            self._factor = wanted
        trainer.accumulate_grad_batches = self._factor

    def _check_rows(self, rows: int) -> None:
        if rows != self._batch_size:
            warnings.warn(
                f"Expected micro-batches of {self._batch_size} samples on all devices together, as "
                f"`batch_size` says. Found {rows} rows in the first. Remedy: batch_size={rows}, "
                "if rows are samples.",
                stacklevel=2,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Counts the micro-batch, and logs the batch size of a step."""
        self._seen += 1
        if not trainer.fit_loop._should_accumulate():
            pl_module.log("steadygrad/batch_size", float(self._factor * self._batch_size))

    def state_dict(self) -> dict[str, Any]:
        """Micro-batches so far, and the factor."""
        return {"seen": self._seen, "factor": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts them back."""
        self._seen, self._factor = int(state_dict["seen"]), int(state_dict["factor"])


def check_support(trainer: Trainer, pl_module: LightningModule) -> None:
    """Checks that Lightning accumulates the gradients and keeps them with their parameters.

    Raises:
        InputError: For manual optimization, DeepSpeed and FSDP1.
    """
    if not pl_module.automatic_optimization:
        raise InputError(
            "Expected automatic optimization. Found manual optimization. Remedy: use NoiseScale "
            "or GradientWatch directly, as in a plain training loop."
        )
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        raise InputError(
            "Expected a strategy that leaves gradients with their parameters. Found "
            f"{type(trainer.strategy).__name__}. Remedy: 'ddp', or ModelParallelStrategy with "
            "fully_shard."
        )
