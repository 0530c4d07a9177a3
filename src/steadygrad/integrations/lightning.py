"""Callbacks and a precision plugin for Lightning's ``Trainer``."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad._checks import InputError, check_type
from steadygrad.formulas.schedule import BatchSizeSchedule
from steadygrad.integrations.batches import rows_of
from steadygrad.integrations.extras import MissingExtraError
from steadygrad.integrations.metrics import noise_metrics
from steadygrad.integrations.windows import check_micro_batch
from steadygrad.noise import NoiseScale
from steadygrad.scale import LayerwiseGradScaler

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise MissingExtraError("lightning", "lightning") from error

__all__ = ["BatchSizeCallback", "LayerwisePrecision", "NoiseScaleCallback"]


class NoiseScaleCallback(Callback):
    """Measures the noise scale before gradients are clipped, and logs it.

    .. code-block:: python

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[NoiseScaleCallback()])

    The numbers are logged by ``log_dict`` as ``steadygrad/noise_scale/...``, every
    ``log_every_n_steps``. The measurements are in Lightning's checkpoints. A window with one
    micro-batch on one process, as at an epoch's end, is not measured.

    Args:
        samples: Number of samples of a micro-batch. Default: the rows of its first tensor.
        **options: Of :class:`NoiseScale`.

    Attributes:
        noise: The estimator, once training has begun; None before.

    Raises:
        InputError: When training begins with manual optimization, DeepSpeed or FSDP1.
    """

    def __init__(self, samples: Callable[[Any], int] = rows_of, **options: Any) -> None:
        self.noise: NoiseScale | None = None
        self._samples_of, self._options = samples, options
        self._loaded: Mapping[str, Any] | None = None
        self._samples: int | None = None
        self._batch_idx = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hooks the estimator to the model as it is trained: wrapped, and on its device."""
        check_support(trainer, pl_module)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        noise = NoiseScale(trainer.strategy.model, **{"scaler": scaler, **self._options})
        state = self._loaded if self.noise is None else self.noise.state_dict()
        if state is not None:
            noise.load_state_dict(state)
        self.noise, self._loaded = noise, None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Counts the micro-batch's samples."""
        self._samples, self._batch_idx = self._samples_of(batch), batch_idx

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Tells of the backward pass, if its window has two parts at least."""
        factor = trainer.accumulate_grad_batches
        start = self._batch_idx // factor * factor
        if min(factor, trainer.num_training_batches - start) * trainer.world_size < 2:
            check_parts(trainer)
            self._samples = None
        if self.noise is not None and self._samples is not None:
            # Lightning has divided the loss so, in short windows too.
            self.noise.samples(self._samples, weight=1 / factor)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Measures the step."""
        if self.noise is None or self._samples is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        # A layer-wise scaler knows what it has taken out; torch's is asked for what it had put in.
        unscaled = isinstance(scaler, torch.amp.GradScaler) and not fused
        self.noise.step(grad_scale=1.0 if unscaled else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Logs the numbers where Lightning logs its own."""
        every, loop = trainer.log_every_n_steps, trainer.fit_loop
        if self.noise is None or loop._should_accumulate() or not every:
            return
        if trainer.global_step % every == 0:
            pl_module.log_dict(noise_metrics(self.noise))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the hooks off the model; the estimate stays."""
        if self.noise is not None:
            self.noise.remove()

    def state_dict(self) -> dict[str, Any]:
        """The measurements."""
        return {} if self.noise is None else {"noise": self.noise.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the measurements until training begins."""
        self._loaded, self.noise = state_dict.get("noise"), None


class BatchSizeCallback(Callback):
    """Sets ``trainer.accumulate_grad_batches`` by samples seen, where no window is cut.

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
        """Refuses a trainer that accumulates in its own way."""
        check_support(trainer, pl_module)
        trainer.accumulate_grad_batches = self._factor

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Changes the factor where a window begins at one of its multiples."""
        wanted = self._wanted(self._seen)
        if batch_idx % self._factor == 0 and batch_idx % wanted == 0:
            self._factor = wanted
        trainer.accumulate_grad_batches = self._factor

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
        """Goes on after them."""
        self._seen, self._factor = int(state_dict["seen"]), int(state_dict["factor"])


class LayerwisePrecision(MixedPrecision):
    """Mixed precision in float16 with a loss scale for each layer.

    .. code-block:: python

        scaler = partial(LayerwiseGradScaler, layer_scales={"model.blocks.*": 2**8})
        trainer = Trainer(plugins=[LayerwisePrecision(scaler)])     # without `precision`

    Args:
        scaler: A function from the LightningModule to a gradient scaler.
        device: Device type of autocast.
    """

    def __init__(
        self, scaler: Callable[[nn.Module], Any] = LayerwiseGradScaler, device: str = "cuda"
    ) -> None:
        # This one stands in until there is a model on its device.
        super().__init__("16-mixed", device, scaler=torch.amp.GradScaler(device, enabled=False))
        self._make: Callable[[nn.Module], Any] | None = scaler

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Makes the scaler."""
        if self._make is not None:
            inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
            self.scaler = self._make(inner)
            self._make = None
        return super().connect(model, optimizers, lr_schedulers)


def check_parts(trainer: Trainer) -> None:
    """Refuses steps of one micro-batch, where neither a schedule nor an epoch's end makes them.

    Raises:
        InputError: If no step has two.
    """
    parts = trainer.accumulate_grad_batches * trainer.world_size
    scheduled = any(isinstance(callback, BatchSizeCallback) for callback in trainer.callbacks)
    if parts < 2 and not scheduled:
        raise InputError(
            f"Expected at least two micro-batches a step over all processes. Found {parts}. "
            "Remedy: accumulate_grad_batches=2 and batches half as large."
        )


def check_support(trainer: Trainer, pl_module: LightningModule) -> None:
    """Refuses loops whose gradients or windows are not Lightning's own.

    Raises:
        InputError: For manual optimization, DeepSpeed and FSDP1.
    """
    if not pl_module.automatic_optimization:
        raise InputError(
            "Expected automatic optimization. Found manual optimization. Remedy: NoiseScale "
            "itself, as in a loop written by hand."
        )
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        raise InputError(
            "Expected a strategy that leaves gradients with their parameters. Found "
            f"{type(trainer.strategy).__name__}. Remedy: 'ddp', or ModelParallelStrategy with "
            "fully_shard."
        )
