"""Callbacks and a precision plugin for Lightning's ``Trainer``."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad._checks import InputError
from steadygrad.integrations import MissingExtraError
from steadygrad.integrations.metrics import noise_metrics
from steadygrad.integrations.windows import StepWatch, rows_of, windows
from steadygrad.noise import NoiseScale
from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.scale import LayerwiseGradScaler
from steadygrad.trace import Trace
from steadygrad.watch import Finding

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise MissingExtraError("lightning", "lightning") from error


def check_support(trainer: Trainer, module: LightningModule) -> None:
    """Checks that Lightning accumulates the gradients and keeps them with their parameters."""
    found = type(trainer.strategy).__name__
    remedy = "'ddp', or ModelParallelStrategy with fully_shard"
    if not module.automatic_optimization:
        found, remedy = "manual optimization", "NoiseScale or GradientWatch, as in a plain loop"
    elif not isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        return
    raise InputError(
        "Expected automatic optimization, and a strategy that leaves gradients with their "
        f"parameters. Found {found}. Remedy: {remedy}."
    )


class NoiseScaleCallback(Callback):
    """Measures the noise scale before gradients are clipped, and logs it.

    .. code-block:: python

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[NoiseScaleCallback()])

    The numbers are logged by ``log_dict`` as ``steadygrad/noise_scale/...``, every
    ``log_every_n_steps``. The measurements are in Lightning's checkpoints; a `fit` without one
    measures anew. A window with one backward pass on one process, as at an epoch's end, is left
    out.

    Args:
        samples: Number of samples of a micro-batch. Default: the rows of its first tensor.
        **options: Of :class:`NoiseScale`.

    Attributes:
        noise: The estimator, once training has begun; None before.

    Raises:
        InputError: When training begins with manual optimization, DeepSpeed or FSDP1, as the other
            callbacks do.
    """

    def __init__(self, samples: Callable[[Any], int] | int = rows_of, **options: Any) -> None:
        self.noise: NoiseScale | None = None
        self._count, self._options = samples, options
        # Measurements from a checkpoint, which wait for training to begin.
        self._loaded: Mapping[str, Any] | None = None
        # Samples of the micro-batch under way, and backward passes of the window under way.
        self._samples = self._passes = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Hooks the estimator to the model as it is trained: wrapped, and on its device."""
        check_support(trainer, module)
        grows = any(isinstance(callback, BatchSizeCallback) for callback in trainer.callbacks)
        if trainer.accumulate_grad_batches * trainer.world_size < 2 and not grows:
            raise InputError(
                "Expected at least two micro-batches a step over all processes. Found 1. Remedy: "
                "accumulate_grad_batches=2 and batches half as large."
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        noise = NoiseScale(trainer.strategy.model, **{"scaler": scaler, **self._options})
        if self._loaded is not None:
            noise.load_state_dict(self._loaded)
        self.noise, self._loaded, self._passes = noise, None, 0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, *_: Any) -> None:
        self._samples = self._count(batch) if callable(self._count) else self._count

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if self.noise is not None:
            # Lightning has divided the loss so, in short windows too.
            self.noise.samples(self._samples, weight=1 / trainer.accumulate_grad_batches)
            self._passes += 1

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        if self.noise is None:
            return
        passes, self._passes = self._passes, 0
        if passes * trainer.world_size < 2:
            self.noise.drop_step()
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        # LayerwiseGradScaler knows which scales are left in .grad; torch's GradScaler does not.
        unscaled = isinstance(scaler, torch.amp.GradScaler) and not fused
        self.noise.step(grad_scale=1.0 if unscaled else None)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        every, loop = trainer.log_every_n_steps, trainer.fit_loop
        if self.noise is None or loop._should_accumulate() or not every:
            return
        if trainer.global_step % every == 0:
            # For a key that is missing Lightning logs the previous value again.
            module.log_dict(noise_metrics(self.noise, all_numbers=True))

    def on_train_end(self, *_: Any) -> None:
        if self.noise is not None:
            self.noise.remove()

    on_exception = on_train_end

    def state_dict(self) -> dict[str, Any]:
        noise = self._loaded if self.noise is None else self.noise.state_dict()
        return {} if noise is None else {"noise": noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the measurements until training begins."""
        self._loaded, self.noise = state_dict.get("noise"), None


class BatchWatch(StepWatch):
    """A watch whose passes begin with :meth:`begin_batch`: Lightning may not call the module."""

    def begin(self, inputs: Any) -> None:
        """Ends the pass when the model is called without gradients, to be evaluated."""
        if not torch.is_grad_enabled():
            super().begin(inputs)

    def begin_batch(self, batch: Any) -> None:
        super().begin(batch)


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
    """

    def __init__(self) -> None:
        self.watch: BatchWatch | None = None
        self.findings: list[Finding] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        check_support(trainer, module)
        self.watch = BatchWatch(trainer.strategy.model, self.findings)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, *_: Any) -> None:
        if self.watch is not None:
            self.watch.begin_batch(batch)

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.watch is not None:
            self.watch.step()

    def on_train_end(self, *_: Any) -> None:
        if self.watch is not None:
            self.watch.close()

    on_exception = on_train_end


class BatchTrace(Trace):
    """A trace whose passes begin with :meth:`begin_batch`: Lightning may not call the module."""

    def begin(self, inputs: Any) -> None:
        """Ends the pass when the model is called without gradients, to be evaluated."""
        if not torch.is_grad_enabled():
            super().begin(inputs)

    def begin_batch(self, batch: Any) -> None:
        super().begin(((batch,), {}))


class TraceCallback(Callback):
    """Traces a training for ``steadygrad diff``: ``callbacks=[TraceCallback("runs/a")]``.

    What the model is given is the batch; another optimizer than the first is not traced.

    Args:
        folder: Where the traces go.
        **options: Of :class:`Trace`, but ``rounding``. Default of ``start``: the step from which it
            is resumed.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        self._folder, self._options = folder, options
        self.trace: BatchTrace | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        check_support(trainer, module)
        options = {"start": trainer.global_step, **self._options}
        model, optimizer = trainer.strategy.model, trainer.optimizers[0]
        self.trace = BatchTrace(model, optimizer, self._folder, **options)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, *_: Any) -> None:
        if self.trace is not None:
            self.trace.begin_batch(batch)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.trace is not None and not trainer.fit_loop._should_accumulate():
            self.trace.step()

    def on_train_end(self, *_: Any) -> None:
        if self.trace is not None:
            self.trace.close()

    on_exception = on_train_end


class BatchSizeCallback(Callback):
    """Sets ``trainer.accumulate_grad_batches`` by samples seen, between two windows.

    Args:
        schedule: Batch sizes by samples seen; the learning rates in it are not used.
        batch_size: Samples of one micro-batch, on all devices together.

    Raises:
        InputError: If a stage's batch size is not an integer multiple of ``batch_size``.
    """

    def __init__(self, schedule: BatchSizeSchedule, batch_size: int) -> None:
        self._schedule, self._batch_size = schedule, batch_size
        self._seen, self._factor = 0, next(windows(schedule, batch_size)).factor

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Sets the first factor before schedulers of learning rates are made."""
        check_support(trainer, module)
        trainer.accumulate_grad_batches = self._factor

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Sets a new factor at the first window that begins at one of its multiples."""
        wanted = self._schedule.batch_size(self._seen * self._batch_size) // self._batch_size
        if index % self._factor == 0 and index % wanted == 0:
            self._factor = wanted
        trainer.accumulate_grad_batches = self._factor

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._seen += 1
        if not trainer.fit_loop._should_accumulate():
            module.log("steadygrad/batch_size", float(self._factor * self._batch_size))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "factor": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen, self._factor = int(state_dict["seen"]), int(state_dict["factor"])


class LayerwisePrecision(MixedPrecision):
    """Mixed precision in float16 with a loss scale for each layer.

    .. code-block:: python

        scaler = partial(LayerwiseGradScaler, layer_scales={"model.blocks.*": 2**8})
        trainer = Trainer(plugins=[LayerwisePrecision(scaler)])     # without `precision`

    Args:
        scaler: A function from the LightningModule to a gradient scaler.
    """

    scaler: Any

    def __init__(self, scaler: Callable[[nn.Module], Any] = LayerwiseGradScaler) -> None:
        # Until there is a model, whose device autocast is for: a scaler that does nothing.
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", enabled=False))
        self._make = scaler
        self._model: nn.Module | None = None

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> Any:
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
        self.device: str = next((p.device.type for p in inner.parameters()), "cpu")
        if inner is not self._model:
            getattr(self.scaler, "remove", lambda: None)()
            self.scaler, self._model = self._make(inner), inner
        return super().connect(model, optimizers, lr_schedulers)
