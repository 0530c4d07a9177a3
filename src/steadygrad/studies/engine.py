"""One training loop for all that the studies train and measure."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.formulas.batch_size import learning_rate
from steadygrad.noise import NoiseScale
from steadygrad.studies.order import Order, seed_for
from steadygrad.studies.ranks import Ranks
from steadygrad.tasks import Task, TaskError, check_losses, guarded, mean_loss, place

__all__ = ["DTYPES", "Diverged", "Engine", "Scaling", "State"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

Scaling = Callable[[nn.Module], Any]


class Diverged(InputError):
    """The training loss is not finite."""


@dataclass
class State:
    """All that training goes on from: a nest of tensors and plain values.

    Attributes:
        model: The model's ``state_dict``.
        optimizer: The optimizer's ``state_dict``.
        scaler: The gradient scaler's ``state_dict``; empty unless training in float16.
        samples: Samples seen.
        steps: Optimizer steps taken.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    samples: int = 0
    steps: int = 0


class Engine:
    """A model that can be put into any state and trained from there.

    Args:
        task: What to train.
        seed: The study's seed.
        dtype: One of ``DTYPES``; float16 and bfloat16 by autocast, float64 throughout.
        ranks: The processes that share every batch; their device is the model's.
        scaling: Makes the gradient scaler of a model, and may be exchanged before a restart;
            None: torch's, used in float16 only.

    Raises:
        InputError: If the batch cannot be shared equally, or the model's losses cannot be used.
    """

    def __init__(
        self, task: Task, *, seed: int, dtype: str, ranks: Ranks, scaling: Scaling | None = None
    ) -> None:
        if task.batch_size % ranks.size:
            raise InputError(
                f"The batch size should be a multiple of the {ranks.size} processes. Found "
                f"batch_size = {task.batch_size}. Remedy: another --nproc-per-node."
            )
        self.task, self.seed, self.ranks, self.scaling = task, seed, ranks, scaling
        self.scaler: Any = None
        self.dtype = DTYPES[dtype]
        self.seed_everything("init")
        self.model = ranks.together(self._make_model)
        if self.dtype is torch.float64:
            self.model.double()
        self.wrapped = ranks.wrap(self.model)
        self._initial = copy.deepcopy(self.model.state_dict())
        ranks.together(self.restart)

    def _make_model(self) -> nn.Module:
        with guarded("Task.make_model"):
            model: Any = self.task.make_model()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"Task.make_model should return a torch.nn.Module. Found {type(model).__name__}. "
                "Remedy: end the function with `return model`."
            )
        if any(is_lazy(p) for p in model.parameters()):
            raise TaskError(
                "Task.make_model should return a model whose parameters have shapes. Found lazy "
                "ones. Remedy: run one batch through the model before it is returned."
            )
        return model.to(self.ranks.device)

    def _make_optimizer(self) -> Optimizer:
        with guarded("Task.make_optimizer"):
            found: Any = self.task.make_optimizer(self.model.parameters(), self.task.lr)
        if not isinstance(found, Optimizer):
            raise TaskError(
                "Task.make_optimizer should return a torch.optim.Optimizer. Found "
                f"{type(found).__name__}. Remedy: end the function with `return optimizer`."
            )
        return found

    def seed_everything(self, *names: object) -> None:
        """Seeds torch's generators for one unit of work."""
        torch.manual_seed(seed_for(self.seed, *names))

    def restart(self) -> None:
        """Goes back to the freshly initialised model."""
        self.model.load_state_dict(self._initial)
        self._fresh_optimizer(1.0)
        self.steps = 0

    def load(self, state: State, multiple: int = 1) -> None:
        """Goes on from a state, at the learning rate of ``multiple`` times the batch size."""
        self.model.load_state_dict(state.model)
        self._fresh_optimizer(learning_rate(1.0, multiple, 1, self.task.lr_rule), state)
        self.steps = state.steps

    def _fresh_optimizer(self, factor: float, state: State | None = None) -> None:
        self.optimizer = self._make_optimizer()
        if hasattr(self.scaler, "remove"):
            self.scaler.remove()  # its hooks would scale for the next one too
        self.scaler = (self.scaling or self._torch_scaler)(self.model)
        if state is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state.optimizer))
            self.scaler.load_state_dict(copy.deepcopy(state.scaler))
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        self.model.zero_grad()
        self.model.train()

    def _torch_scaler(self, model: nn.Module) -> torch.amp.GradScaler:
        enabled = self.dtype is torch.float16
        return torch.amp.GradScaler(self.ranks.device.type, enabled=enabled)

    def state(self, samples: int) -> State:
        """A copy of where training is now."""
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict())
        return State(*copy.deepcopy(parts), samples=samples, steps=self.steps)

    def losses(self, indices: Tensor) -> Tensor:
        """Per-sample losses of a batch on this rank, with shape ``(n,)``."""
        with guarded("Task.train.batch"):
            batch = place(self.task.train.batch(indices), self.model)
        with guarded("Task.per_sample_loss"), self._autocast():
            losses: Any = self.task.per_sample_loss(self.wrapped, batch)
        # Only what costs no wait for the device.
        if not isinstance(losses, Tensor) or losses.shape != indices.shape:
            check_losses(losses, len(indices))
        return losses  # type: ignore[no-any-return]

    def try_once(self) -> None:
        """Evaluates and trains on one batch: a broken task shows before the study begins.

        Raises:
            InputError: If the losses are not one finite number for each sample.
        """
        size = self.task.batch_size // self.ranks.size
        self.ranks.together(lambda: check_losses(self.losses(torch.arange(size)), size))
        value = self.ranks.together(self.evaluate)
        if not math.isfinite(value):
            raise Diverged(
                f"The evaluation of the untrained model should be finite. Found {value}. "
                "Remedy: look for NaN in the validation data."
            )
        self.step(torch.arange(self.task.batch_size))
        self.restart()

    def step(self, indices: Tensor) -> float:
        """One optimizer step on a global batch.

        Args:
            indices: Sample numbers of the whole batch, shape ``(n,)``.

        Returns:
            The batch's mean loss before the step.

        Raises:
            Diverged: If it is not finite; the weights are as before.
            Halt: If the study has to stop; the weights are as before.
        """
        loss = self.losses(self.ranks.share(indices)).mean()
        value = self.ranks.poll(float(loss.detach()))
        if not math.isfinite(value):
            raise Diverged(
                f"The training loss should stay finite. Found {value} after {self.steps} steps. "
                f"Remedy: a lower Task.lr than {self.task.lr:g}, or look for NaN in the data."
            )
        with guarded("The backward pass of Task.per_sample_loss"):
            self.scaler.scale(loss).backward()
        with guarded("A step of the optimizer"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps += 1
        return value

    def run(
        self, order: Order, start: int, stop: int, batch_size: int
    ) -> Iterator[tuple[int, float]]:
        """Trains over the positions ``start`` to ``stop`` of an order.

        Yields:
            After each step, the position reached and the step's loss.
        """
        for position in range(start, stop, batch_size):
            size = min(batch_size, stop - position)
            yield position + size, self.step(order.take(position, size))

    def evaluate(self) -> float:
        """The task's own evaluation, or the mean loss over its validation samples."""
        self.ranks.poll()
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._autocast(), torch.no_grad():
            self.seed_everything("evaluate")
            if self.task.evaluate is None:
                with guarded("Task.per_sample_loss on Task.valid"):
                    return mean_loss(self.task, self.model)
            modes = [(module, module.training) for module in self.model.modules()]
            with guarded("Task.evaluate"):
                value = float(self.task.evaluate(self.model, self.task.valid))
        for module, mode in modes:
            module.training = mode
        return value

    @contextmanager
    def noise_scale(self) -> Iterator[NoiseScale]:
        """An estimator that averages all it is given; its hooks are gone afterwards."""
        # The weights stand still while they are measured.
        noise = NoiseScale(self.wrapped, decay=1.0, drift=False)
        try:
            yield noise
        finally:
            noise.remove()

    def measure(
        self, noise: NoiseScale, order: Order, steps: int, micro_batches: int
    ) -> Iterator[int]:
        """Measures gradients at fixed weights, on samples from the start of an order.

        Args:
            noise: Measures.
            order: Whose samples.
            steps: Measurements, each on ``micro_batches`` batches of the task's size.
            micro_batches: See ``steps``.

        Yields:
            After each measurement, the samples used so far.
        """
        size, scale = self.task.batch_size, self.scaler.get_scale()
        # Whole micro-batches go to the ranks; where their number does not divide into ranks, there
        # are a few more of them than a single process takes.
        count = -(-micro_batches // self.ranks.size)
        per_step = size * count * self.ranks.size
        for step in range(steps):
            self.ranks.poll()
            indices = order.take(step * per_step, per_step)
            for micro in torch.split(self.ranks.share(indices), size):
                with noise.microbatch(size, loss_scale=scale):
                    (self.losses(micro).mean() * (scale / count)).backward()
            noise.step()
            self.model.zero_grad()
            yield (step + 1) * per_step

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        enabled = self.dtype in (torch.float16, torch.bfloat16)
        dtype = self.dtype if enabled else None
        with torch.autocast(self.ranks.device.type, dtype=dtype, enabled=enabled):
            yield
