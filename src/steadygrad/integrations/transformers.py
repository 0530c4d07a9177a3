"""Hugging Face's ``Trainer`` with a noise scale, balanced losses and a batch-size schedule.

Callbacks see a step's gradients only after they were clipped, and no inputs: hence a mixin.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_type
from steadygrad.balance import LossBalancer
from steadygrad.formulas.schedule import BatchSizeSchedule
from steadygrad.integrations.batches import IGNORED, labels_of, rows_of
from steadygrad.integrations.metrics import balancer_metrics, noise_metrics, optimizer_metrics
from steadygrad.integrations.options import check_noise_options, reads, sample_counter
from steadygrad.integrations.state_file import load_states, save_states
from steadygrad.integrations.step_watch import StepWatch
from steadygrad.integrations.trainer_schedule import ScheduledTrainer
from steadygrad.integrations.windows import check_parts
from steadygrad.noise import NoiseScale
from steadygrad.watch import Finding

__all__ = ["SteadygradMixin"]

STATE_NAME = "steadygrad-state.pt"


class SteadygradMixin(ScheduledTrainer):
    """Mixin for ``transformers.Trainer``; write it first among the bases.

    .. code-block:: python

        class MyTrainer(SteadygradMixin, Trainer):
            pass

        trainer = MyTrainer(model, args, train_dataset=data, noise_scale=True)

    Gradients are measured at the end of a window's last ``training_step``: complete, not clipped,
    and still scaled in float16. Micro-batches weigh as the Trainer weighs them: by their labels
    where it divides by ``num_items_in_batch``, alike where it divides by their number, or where a
    loss of your own does not read ``num_items_in_batch``. A window
    with one micro-batch on one process, as at an epoch's end, is not measured.

    The tools' numbers are added to the Trainer's own logs as ``steadygrad/...``, and their states
    to its checkpoints.

    Args:
        *args: The Trainer's.
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
        **kwargs: The Trainer's.

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
        if not isinstance(noise_scale, (bool, Mapping)):
            raise InputError(
                "Parameter `noise_scale` should be True, False or options of NoiseScale. Found "
                f"{noise_scale!r}. Remedy: such as {{'every': 10}}."
            )
        options = dict(noise_scale) if isinstance(noise_scale, Mapping) else {}
        check_noise_options(options, own=["scaler"])
        self._noise_options = options if noise_scale is not False else None
        self._samples_of = sample_counter(options.pop("samples", rows_of))
        if balancer is not None:
            check_type("balancer", balancer, LossBalancer, "LossBalancer({...})")
            self._check_losses()
        self.balancer, self._grad_scaler = balancer, grad_scaler
        # The model whose layers the gradient scaler knows.
        self._scaled: nn.Module | None = None
        self._loaded: dict[str, Any] = {}
        self._watches, self.findings = gradient_watch, list[Finding]()
        self._watch: StepWatch | None = None
        super().__init__(*args, **kwargs)
        self._check_support()
        self._follow(batch_sizes)

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
        raise NotImplementedError

    # What follows overrides the Trainer.

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
        if self.balancer is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        balancer = self.balancer
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
            noise.samples(self._samples_of(inputs), weight=self._weight(inputs, num_items_in_batch))
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if noise is not None and self.accelerator.sync_gradients:
            noise.step()
        if self._watch is not None and self.accelerator.sync_gradients:
            self._watch.step()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the tools' numbers to the training logs."""
        if "loss" in logs:
            logs = {**logs, **self._metrics()}
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Makes the gradient scaler too, before Accelerate wraps the optimizer with it."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
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
            save_states(Path(output_dir, STATE_NAME), states)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not Path(checkpoint, STATE_NAME).exists():
            return
        self._loaded = load_states(Path(checkpoint, STATE_NAME))
        if self.balancer is not None and "balancer" in self._loaded:
            self.balancer.load_state_dict(self._loaded.pop("balancer"))

    # And what follows is the mixin's own.
    def _remove_hooks(self) -> None:
        if self.noise is not None:
            self.noise.remove()
        if self._watch is not None:
            self._watch.close()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        before = cls.__mro__[: cls.__mro__.index(SteadygradMixin)]
        trainer = next((base for base in before if "_inner_training_loop" in vars(base)), None)
        if trainer is not None:
            raise InputError(
                f"Expected SteadygradMixin before {trainer.__name__} among the bases of "
                f"{cls.__name__}, whose methods it overrides. Found it after. Remedy: "
                f"class {cls.__name__}(SteadygradMixin, {trainer.__name__})."
            )

    def _check_losses(self) -> None:
        if type(self).compute_losses is SteadygradMixin.compute_losses:
            raise InputError(
                "Expected a Trainer with compute_losses(), whose losses `balancer` balances. Found "
                f"none in {type(self).__name__}. Remedy: write it, or leave `balancer` out."
            )

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
        if self._grad_scaler is not None and self.accelerator.mixed_precision != "fp16":
            raise InputError(
                "Parameter `grad_scaler` is for TrainingArguments(fp16=True). Found mixed "
                f"precision {self.accelerator.mixed_precision!r}. Remedy: fp16=True."
            )

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
        if self._batch_sizes is None:
            check_parts(
                self._factor * processes,
                "gradient_accumulation_steps=2 and half of per_device_train_batch_size, or "
                "noise_scale=False",
            )
        return self.noise if self.current_gradient_accumulation_steps * processes > 1 else None

    def _weight(self, inputs: Mapping[str, Any], num_items: Any) -> Tensor | float | None:
        """Factor between a micro-batch's mean loss and the loss that is differentiated."""
        if num_items is None or self.loss_is_scaled_for_ga is False:
            return None
        if self._ignores_items():
            # The Trainer leaves the loss as it is, taking it for one that was divided.
            return 1.0
        spread = self.args.average_tokens_across_devices
        ranks = self.accelerator.num_processes // self.get_tp_size() if spread else 1
        labelled = labels_of(inputs, self._shifts_labels).ne(IGNORED).sum()
        weight: Tensor | float = labelled.to(self.args.device) * ranks / num_items
        return weight

    def _ignores_items(self) -> bool:
        """Whether a loss of the user's own is a plain mean, whatever the window's labels are."""
        written = [vars(c)["compute_loss"] for c in type(self).__mro__ if "compute_loss" in vars(c)]
        written += [self.compute_loss_func] if self.compute_loss_func is not None else []
        return not all(reads(function, "num_items_in_batch") for function in written)

    @property
    def _shifts_labels(self) -> bool:
        """Whether the loss ignores the first label of each row."""
        # GPT2LMHeadModel and its like shift, though transformers 5.23 counts as if they did not.
        model = self.accelerator.unwrap_model(self.model)
        unknown = getattr(model, "loss_type", "") is None and self.compute_loss_func is None
        lm_head = type(model).__name__.endswith("LMHeadModel")
        return bool(self._loss_shifts_labels) or (unknown and lm_head)

    def _metrics(self) -> dict[str, float]:
        found = {} if self.noise is None else noise_metrics(self.noise)
        if self.balancer is not None:
            found |= balancer_metrics(self.balancer)
        if self._batch_sizes is not None:
            found["steadygrad/batch_size"] = self._taken * self._micro_batch_size
        # Accelerate's wrapper has no such count.
        return found | optimizer_metrics([getattr(self.optimizer, "optimizer", None)])
