"""Hugging Face's ``Trainer`` with a noise scale, balanced losses and a batch-size schedule.

Callbacks see a step's gradients only after they were clipped, and no inputs: hence a mixin.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_type
from steadygrad.balance import LossBalancer
from steadygrad.integrations import MissingExtraError
from steadygrad.integrations.metrics import balancer_metrics, noise_metrics, optimizer_metrics
from steadygrad.integrations.windows import StepWatch, Window, rows_of, windows
from steadygrad.noise import NoiseScale
from steadygrad.noise.schedule import BatchSizeSchedule
from steadygrad.trace import Trace
from steadygrad.watch import Finding

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise MissingExtraError("transformers", "transformers") from error

IGNORED = -100
STATE_NAME = "steadygrad-state.pt"


class ScheduledTrainer(Trainer):
    """Sets a Trainer's ``gradient_accumulation_steps`` by a schedule, if there is one."""

    _batch_sizes: BatchSizeSchedule | None = None
    # The windows of all steps of a training, and the one after them.
    _plan: list[Window]

    @property
    def _micro_batch_size(self) -> int:
        """Samples of one micro-batch, on all processes together."""
        accumulation = int(self.args.gradient_accumulation_steps)
        return int(self.get_total_train_batch_size(self.args)) // accumulation

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Replaces the Trainer's numbers of epochs, steps and samples by those of the schedule."""
        values: tuple[Any, ...] = super().set_initial_training_values(args, dataloader)
        if self._batch_sizes is None:
            return values
        batches = len(dataloader) if has_length(dataloader) else None
        walk = partial(windows, self._batch_sizes, self._micro_batch_size, batches)
        steps = args.max_steps
        if steps <= 0:
            # The Trainer refuses num_train_epochs for a dataset without a length.
            end = args.num_train_epochs * (batches or 1)
            inside = takewhile(lambda w: w.epoch * (batches or 1) + w.start < end, walk())
            steps = sum(1 for _ in inside)
        self._plan = [*islice(walk(), steps + 1)]
        micros = sum(window.length for window in self._plan[:steps])
        samples = micros * self._micro_batch_size
        # An upper bound: the Trainer shortens the window with this number, which no epoch reaches.
        most = (batches or steps) + 1
        epochs = values[0] if batches is None else self._plan[steps - 1].epoch + 1
        return (epochs, most, values[2], samples, values[4], batches or micros, steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        start: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        if self._batch_sizes is None:
            return start
        window = self._next_window()
        return window.epoch, 0 if self.args.ignore_data_skip else window.start

    def _next_window(self) -> Window:
        window = self._plan[min(self.state.global_step, len(self._plan) - 1)]
        self.args.gradient_accumulation_steps = window.factor
        return window

    def get_batch_samples(self, batches: Any, num_batches: int, device: Any) -> Any:
        if self._batch_sizes is not None:
            num_batches = self._next_window().factor
        return super().get_batch_samples(batches, num_batches, device)


class SteadygradMixin(ScheduledTrainer):
    """Mixin for ``transformers.Trainer``; write it first among the bases.

    .. code-block:: python

        class MyTrainer(SteadygradMixin, Trainer):
            pass

        trainer = MyTrainer(model, args, train_dataset=data, noise_scale=True)

    Gradients are measured at the end of a window's last ``training_step``: complete, not clipped,
    and still scaled in float16. Micro-batches weigh as the Trainer takes them to weigh: by their
    labels where it divides by ``num_items_in_batch``, alike where it divides by their number, as
    with ``loss_is_scaled_for_ga = False``. A window with one micro-batch on one process, as at an
    epoch's end, is not measured.

    The tools' numbers are added to the Trainer's own logs as ``steadygrad/...``, and their states
    to its checkpoints.

    Args:
        noise_scale: Whether to measure the noise scale, or options of :class:`NoiseScale`;
            ``samples`` among them is a function from a micro-batch's inputs to the number of its
            samples. Default: the rows of its first tensor.
        batch_sizes: Batch sizes by samples seen, reached by ``gradient_accumulation_steps``, which
            need not be given. The learning rates in it are left to the Trainer's scheduler.
        balancer: Balances the losses of :meth:`compute_losses`, which must then be written.
        grad_scaler: A function from the model to a gradient scaler, as ``LayerwiseGradScaler``, to
            be used with ``fp16=True``.
        gradient_watch: Whether to warn of the module that first made a step's gradients non-finite;
            waits for the device once a step.

    Attributes:
        noise: The estimator of the newest training, from its first ``training_step`` on; None
            before.
        findings: Causes that ``gradient_watch`` found, oldest first.

    Raises:
        InputError: If an argument is wrong, or the Trainer trains in a way that is not supported.
    """

    noise: NoiseScale | None = None

    def __init__(
        self,
        *args: Any,
        noise_scale: bool | Mapping[str, Any] = True,
        batch_sizes: BatchSizeSchedule | None = None,
        balancer: LossBalancer | None = None,
        grad_scaler: Callable[[nn.Module], Any] | None = None,
        gradient_watch: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(noise_scale, bool):
            check_type("noise_scale", noise_scale, dict, "options of NoiseScale, as {'every': 10}")
        options = {} if isinstance(noise_scale, bool) else dict(noise_scale)
        self._samples: Callable[[Any], int] | int = options.pop("samples", rows_of)
        self._noise_options = None if noise_scale is False else options
        self.balancer, self._grad_scaler = balancer, grad_scaler
        # The model whose layers the gradient scaler knows.
        self._scaled: nn.Module | None = None
        self._loaded: dict[str, Any] = {}
        self._watches, self.findings = gradient_watch, list[Finding]()
        self._watch: StepWatch | None = None
        super().__init__(*args, **kwargs)
        self._check_support()
        self._batch_sizes = batch_sizes
        if batch_sizes is not None:
            first = next(windows(batch_sizes, self._micro_batch_size))
            self.args.gradient_accumulation_steps = first.factor

    def compute_losses(
        self, model: nn.Module, inputs: Mapping[str, Any], fork: Callable[[Any], dict[str, Any]]
    ) -> tuple[dict[str, Tensor], Any]:
        """Computes the losses to be balanced; to be written where there is a ``balancer``.

        Args:
            model: The model as it is called in training.
            inputs: A micro-batch.
            fork: Copies the model's output once for each loss: :meth:`LossBalancer.fork`.

        Returns:
            The losses by name, each a mean over the micro-batch and made from its own copy; and the
            model's outputs.
        """
        raise NotImplementedError("compute_losses() makes the losses that `balancer` balances.")

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # The Trainer comes here again with another model, or with a smaller batch.
        self.noise, self._watch, self._loaded = None, None, {}
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._remove_hooks()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Adds up balanced losses; without a balancer it is the Trainer's own."""
        if (balancer := self.balancer) is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        scaler = self.accelerator.scaler

        def fork(y: Any) -> dict[str, Any]:
            return balancer.fork(y, grad_scale=scaler, accumulation_steps=steps)

        losses, outputs = self.compute_losses(model, inputs, fork)
        loss = torch.stack([*losses.values()]).sum()
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Measures the gradients of a micro-batch, and the window's once it is over."""
        noise = self._noise_of(model)
        if self._watches and self._watch is None:
            self._watch = StepWatch(model, self.findings)
        if noise is not None:
            count = self._samples(inputs) if callable(self._samples) else self._samples
            noise.samples(count, weight=self._weight(inputs, num_items_in_batch))
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        for tool in (noise, self._watch):
            if tool is not None and self.accelerator.sync_gradients:
                tool.step()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            # Accelerate's wrapper has no such count.
            logs = logs | optimizer_metrics([getattr(self.optimizer, "optimizer", None)])
            if self.noise is not None:
                logs |= noise_metrics(self.noise)
            if self.balancer is not None:
                logs |= balancer_metrics(self.balancer)
            if self._batch_sizes is not None:
                logs["steadygrad/batch_size"] = self.get_total_train_batch_size(self.args)
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Makes the gradient scaler too, before Accelerate wraps the optimizer with it."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._grad_scaler is not None and not self.args.fp16:
            raise InputError("Expected fp16=True with `grad_scaler`. Found False. Remedy: set it.")
        if self._grad_scaler is not None and self._scaled is not self.model:
            getattr(self.accelerator.scaler, "remove", lambda: None)()
            self.accelerator.scaler, self._scaled = self._grad_scaler(self.model), self.model
            # Accelerate leaves float16 alone on CPUs; elsewhere it is set already.
            self.accelerator.native_amp = True
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        tools = {"noise": self.noise, "balancer": self.balancer}
        states = {name: tool.state_dict() for name, tool in tools.items() if tool is not None}
        if states and self.args.should_save:
            path = Path(output_dir, STATE_NAME)
            torch.save(states, part := path.with_suffix(".part"))
            os.replace(part, path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not (path := Path(checkpoint, STATE_NAME)).is_file():
            return
        try:
            self._loaded = dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            raise InputError(
                f"Expected states of steadygrad's tools in {str(path)!r}. Found a file that cannot "
                f"be read ({type(error).__name__}). Remedy: another checkpoint, or delete the file."
            ) from error
        if self.balancer is not None and "balancer" in self._loaded:
            self.balancer.load_state_dict(self._loaded.pop("balancer"))

    def _remove_hooks(self) -> None:
        if self.noise is not None:
            self.noise.remove()
        if self._watch is not None:
            self._watch.close()

    def _check_support(self) -> None:
        if self.is_deepspeed_enabled:
            raise InputError(
                "Expected a Trainer without DeepSpeed, which partitions gradients. Found it "
                "enabled. Remedy: FSDP2, or DDP."
            )
        if self.args.n_gpu > 1:
            raise InputError(
                "Expected one device a process. Found torch.nn.DataParallel over "
                f"{self.args.n_gpu}. Remedy: start with torchrun --nproc-per-node."
            )
        if self.balancer is not None:
            # Each loss is a mean over its micro-batch: the Trainer divides by their number.
            self.loss_is_scaled_for_ga = False

    def _noise_of(self, model: nn.Module) -> NoiseScale | None:
        """The estimator, where this window can be measured: it has two parts at least."""
        if self._noise_options is None:
            return None
        if self.noise is None:
            # Not before: DDP and FSDP2 wrap the model when training begins.
            options = {"scaler": self.accelerator.scaler, **self._noise_options}
            self.noise = NoiseScale(model, **options)
            if "noise" in self._loaded:
                self.noise.load_state_dict(self._loaded.pop("noise"))
        processes = self.accelerator.num_processes
        if self._batch_sizes is None and self.args.gradient_accumulation_steps * processes < 2:
            raise InputError(
                "Expected at least two micro-batches a step over all processes. Found 1. Remedy: "
                "gradient_accumulation_steps=2 and half of per_device_train_batch_size, or "
                "noise_scale=False."
            )
        return self.noise if self.current_gradient_accumulation_steps * processes > 1 else None

    def _weight(self, inputs: Mapping[str, Any], num_items: Any) -> Tensor | float | None:
        """Factor between a micro-batch's mean loss and the loss that is differentiated."""
        if num_items is None or self.loss_is_scaled_for_ga is False:
            return None
        spread = self.args.average_tokens_across_devices
        ranks = self.accelerator.num_processes // self.get_tp_size() if spread else 1
        labels = torch.as_tensor(inputs.get("shift_labels", inputs["labels"]))
        if "shift_labels" not in inputs and self._shifts_labels:
            labels = labels[..., 1:]
        weight: Tensor | float = labels.ne(IGNORED).sum().to(self.args.device) * ranks / num_items
        return weight

    @property
    def _shifts_labels(self) -> bool:
        """Whether the loss ignores the first label of each row."""
        # GPT2LMHeadModel and its like shift, though transformers 5.23 counts as if they did not.
        model = self.accelerator.unwrap_model(self.model)
        unknown = getattr(model, "loss_type", "") is None and self.compute_loss_func is None
        lm_head = type(model).__name__.endswith("LMHeadModel")
        return bool(self._loss_shifts_labels) or (unknown and lm_head)


class TraceCallback(TrainerCallback):
    """Traces a training for ``steadygrad diff``: ``callbacks=[TraceCallback("runs/a")]``.

    Args:
        folder: Where the traces go.
        **options: Of :class:`Trace`. Default of ``start``: the step from which it is resumed.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        self._folder, self._options = folder, options
        self.trace: Trace | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        options = {"start": state.global_step, **self._options}
        self.trace = Trace(given["model"], given["optimizer"], self._folder, **options)

    def on_step_end(self, *_: Any, **given: Any) -> None:
        if self.trace is not None:
            self.trace.step()

    def on_train_end(self, *_: Any, **given: Any) -> None:
        if self.trace is not None:
            self.trace.close()
