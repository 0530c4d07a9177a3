"""One training loop for everything that the studies train and measure."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.formulas.batch_size import learning_rate
from steadygrad.studies.checkpoint import State, full_state, load_full_state
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.order import Order, seed_for
from steadygrad.tasks import (
    Samples,
    Task,
    TaskError,
    batches,
    check_losses,
    evaluating,
    guarded,
    is_out_of_memory,
    mean_loss,
    to_device,
)

if TYPE_CHECKING:
    from steadygrad.noise import NoiseScale

__all__ = ["DTYPES", "Diverged", "Rate", "Scaling", "Trainer"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# Steps between two looks at the losses where a look makes an accelerator wait.
LOOK_EVERY = 16
# Most samples in one forward pass of an evaluation.
EVALUATION_SIZE = 128
# Samples of a run whose learning rate does not decay.
ENDLESS = 1 << 62
# Options of the optimizer that follow the batch size.
OPTIONS = ("lr", "betas", "weight_decay")

Scaling = Callable[[nn.Module], Any]


class Diverged(InputError):
    """The training or validation loss is not finite."""


@dataclass(frozen=True)
class Rate:
    """A learning rate relative to the task's own.

    Attributes:
        batch_size: Batch size that the task's rule scales the rate to; None: the task's own.
        factor: What the scaled rate is multiplied by.
        warmup_samples: Samples over which the rate rises from the task's own.
        total: Samples of the whole run, for a task whose rate decays; 0: it does not.
    """

    batch_size: int | None = None
    factor: float = 1.0
    warmup_samples: int = 0
    total: int = 0


class Trainer:
    """A model that can be put into any state and trained from there.

    Args:
        task: What to train.
        seed: The study's seed.
        dtype: One of ``DTYPES``; float16 and bfloat16 by autocast, float64 throughout.
        context: The processes that share every batch.
        micro_batch_size: Most samples in one forward pass of one process. Default: the task's;
            without one, a whole batch.
        keep_half_life: Whether Adam's second moment and the weight decay keep their half-life in
            samples at every batch size.
        scaling: Makes the gradient scaler of a model, and may be exchanged before a restart.
            Default: torch's, in float16 only.

    Raises:
        InputError: If the batch cannot be shared equally, or the task's code cannot be used.
    """

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        dtype: str,
        context: DistributedContext,
        micro_batch_size: int | None = None,
        keep_half_life: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        if task.batch_size % context.size:
            raise InputError(
                f"The batch size should be a multiple of the {context.size} processes. Found "
                f"batch_size = {task.batch_size}. Remedy: another --nproc-per-node."
            )
        self.task, self.seed, self.context, self.scaling = task, seed, context, scaling
        self.micro_batch_size = micro_batch_size or task.micro_batch_size or len(task.train)
        self.keep_half_life = keep_half_life
        self.dtype = DTYPES[dtype]
        self.scaler: Any = None
        self._look_every = 1 if context.device.type == "cpu" else LOOK_EVERY
        self._losses: list[Tensor] = []
        self._looked_at: list[float] = []
        self.seed_everything("init", 0)
        self.model = context.together(self._make_model)
        self.wrapped = context.wrap(self.model)
        context.together(self._fresh_optimizer)
        self.steps = 0

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
        dtype = torch.float64 if self.dtype is torch.float64 else None
        return model.to(self.context.device, dtype)

    def _fresh_optimizer(self, state: State | None = None) -> None:
        with guarded("Task.make_optimizer"):
            found: Any = self.task.optimizer(self.model, self.task.lr)
        if not isinstance(found, Optimizer):
            raise TaskError(
                "Task.make_optimizer should return a torch.optim.Optimizer. Found "
                f"{type(found).__name__}. Remedy: end the function with `return optimizer`."
            )
        self.optimizer = found
        if hasattr(self.scaler, "remove"):
            self.scaler.remove()  # its hooks would scale for the next one too
        self.scaler = (self.scaling or self._torch_scaler)(self.model)
        # Before a state is loaded, whose options are those of its moment.
        self._options = [
            {name: copy.deepcopy(group[name]) for name in OPTIONS if name in group}
            for group in self.optimizer.param_groups
        ]
        if state is not None:
            load_full_state(self, state)
        self.set_rate(Rate())
        self.model.zero_grad()
        self.model.train()

    def _torch_scaler(self, model: nn.Module) -> torch.amp.GradScaler:
        enabled = self.dtype is torch.float16
        return torch.amp.GradScaler(self.context.device.type, enabled=enabled)

    def seed_everything(self, *names: object) -> None:
        """Seeds Python's, numpy's and torch's generators for one trial."""
        seed = seed_for(self.seed, *names)
        random.seed(seed)
        torch.manual_seed(seed)
        numpy = _numpy_random()
        if numpy is not None:
            numpy.seed(seed & 0xFFFFFFFF)

    def restart(self, repeat: int = 0) -> None:
        """Goes back to a freshly initialised model; each repeat has weights of its own."""
        self.seed_everything("init", repeat)
        fresh = self.context.together(self._make_model)
        load_full_state(self, State(full_state(fresh), {}, {}), model_only=True)
        del fresh
        self._fresh_optimizer()
        self.steps = 0
        self._losses.clear()
        self._looked_at.clear()

    def load(self, state: State) -> None:
        """Goes on from a state, at the task's own learning rate."""
        load_full_state(self, state, model_only=True)
        self._fresh_optimizer(state)
        self.steps = state.steps
        self._losses.clear()
        self._looked_at.clear()

    def state(self, samples: int) -> State:
        """A copy of the training's state in the host's memory."""
        return State.of(self, samples)

    def set_rate(self, rate: Rate, seen: float = 0) -> None:
        """Sets the optimizer's learning rate.

        Args:
            rate: The learning rate.
            seen: Samples of the run so far.
        """
        size, task = rate.batch_size or self.task.batch_size, self.task
        multiple = size / task.batch_size
        factor = rate.factor * learning_rate(1.0, size, task.batch_size, task.lr_rule)
        if seen < rate.warmup_samples:
            factor = 1.0 + (factor - 1.0) * seen / rate.warmup_samples
        course = task.lr_factor(seen, rate.total or ENDLESS)
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            _assign(group, "lr", options["lr"] * factor * course)
            if self.keep_half_life and multiple != 1:
                keep_half_life(group, options, multiple, factor)

    def losses(self, batch: Any, count: int) -> Tensor:
        """Per-sample losses of a batch on this rank, with shape ``(count,)``."""
        with guarded("Task.per_sample_loss"), self._autocast():
            losses: Any = self.task.per_sample_loss(self.wrapped, batch)
        # Only checks that cost no wait for the device.
        if not isinstance(losses, Tensor) or losses.shape != (count,):
            check_losses(losses, count)
        return losses  # type: ignore[no-any-return]

    def try_once(self) -> None:
        """Evaluates, trains and saves once: a broken task shows before the study begins.

        Raises:
            InputError: If the losses are not one finite number for each sample, or the optimizer's
                state cannot be saved.
        """
        together, size = self.context.together, self.task.batch_size // self.context.size
        together(lambda: self._check_losses(min(size, self.micro_batch_size)))
        value = together(self.evaluate)
        if not math.isfinite(value):
            raise Diverged(
                f"The evaluation of the untrained model should be finite. Found {value}. "
                "Remedy: look for NaN in the validation data."
            )
        self.fit_micro_batch(self.task.batch_size)
        self.step(torch.arange(self.task.batch_size))
        self.look()
        together(lambda: self.state(0).check())
        self.restart()

    def _check_losses(self, count: int) -> None:
        """Checks the losses of as many samples as fit into memory, up to a number."""
        while True:
            try:
                check_losses(self.losses(self._batch(torch.arange(count)), count), count)
                return
            except TaskError as error:
                if not is_out_of_memory(error) or count == 1:
                    raise
            self.free_memory()
            count //= 2

    def fit_micro_batch(self, largest: int) -> None:
        """Finds micro-batches that fit into memory, by halves; the model's buffers may change.

        Args:
            largest: Samples of the largest batch of the study.
        """
        most = self.task.micro_batch_size or largest
        self.micro_batch_size = min(most, -(-largest // self.context.size))
        # All ranks take the size that fits on each of them.
        while not all(self.context.gather(self.context.together(self._fits))):
            self.micro_batch_size //= 2

    def _fits(self) -> bool:
        """Whether one micro-batch fits into this rank's memory."""
        size = self.micro_batch_size
        indices = torch.arange(size * self.context.size) % len(self.task.train)
        try:
            # Without an exchange: a rank without memory would leave the others waiting.
            self._accumulate(indices, exchange=self.context.sharding == "fsdp2")
        except TaskError as error:
            if not is_out_of_memory(error) or size == 1:
                raise
            return False
        finally:
            self.free_memory()
        return True

    def free_memory(self) -> None:
        """Gives cached memory back to the device."""
        self.model.zero_grad()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()

    def _batch(self, indices: Tensor) -> Any:
        with guarded("Task.train.batch"):
            return to_device(self.task.train.batch(indices), self.model)

    def _accumulate(
        self, indices: Tensor, ready: Iterator[Any] | None = None, *, exchange: bool = True
    ) -> Tensor:
        """Adds up the gradients of a global batch.

        Args:
            indices: Sample numbers of the whole batch, shape ``(n,)``.
            ready: Batches for this rank's micro-batches, in order. Default: made here.
            exchange: Whether the ranks average their gradients.

        Returns:
            The mean loss of this rank's samples, shape ``()``.
        """
        share = self.context.share(indices)
        micros = torch.split(share, self.micro_batch_size)
        total: Tensor | None = None
        for number, micro in enumerate(micros):
            batch = self._batch(micro) if ready is None else to_device(next(ready), self.model)
            with self._synchronised(exchange and number == len(micros) - 1):
                loss = self.losses(batch, len(micro)).mean() * (len(micro) / len(share))
                with guarded("The backward pass of Task.per_sample_loss"):
                    self.scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Ranks exchange gradients only with the last micro-batch of a step."""
        if self.context.sharding == "fsdp2":
            self.wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
        alone = last or self.context.sharding != "ddp"
        with nullcontext() if alone else self.wrapped.no_sync():  # type: ignore[operator]
            yield

    def step(self, indices: Tensor, ready: Iterator[Any] | None = None) -> None:
        """One optimizer step on a global batch; nothing here waits for an accelerator."""
        self._losses.append(self._accumulate(indices, ready))
        with guarded("A step of the optimizer"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps += 1

    def backward(self, indices: Tensor) -> None:
        """Adds a global batch's gradients to ``.grad``, times the loss scale; takes no step."""
        self._accumulate(indices)

    def look(self) -> None:
        """Reads the losses since the last look, and asks whether to stop.

        Raises:
            Diverged: If one of them is not finite.
            StudyInterrupted: If the study has to stop.
        """
        pending = torch.stack(self._losses).tolist() if self._losses else []
        self._losses.clear()
        for value in self.context.poll(pending):
            if not math.isfinite(value):
                raise Diverged(
                    f"The training loss should stay finite. Found {value} within {self.steps} "
                    f"steps. Remedy: a lower Task.lr than {self.task.lr:g}, or look for NaN in "
                    "the data."
                )
            self._looked_at.append(value)

    def take_losses(self) -> list[float]:
        """The training losses of the steps since the last call."""
        self.look()
        taken, self._looked_at = self._looked_at, []
        return taken

    def run(
        self,
        order: Order,
        start: int,
        stop: int,
        batch_size: int,
        *,
        rate: Rate | None = None,
        seen: int | None = None,
    ) -> Iterator[int]:
        """Trains over the positions ``start`` to ``stop`` of an order.

        Args:
            order: The order.
            start: First position.
            stop: Position after the last.
            batch_size: Samples of each step; what is left after the last whole batch is left out.
            rate: Learning rate. Default: the task's own.
            seen: Samples that the run has seen at ``start``. Default: ``start``.

        Yields:
            After each step, the position reached.
        """
        rate, offset = rate or Rate(), (start if seen is None else seen) - start
        places = range(start, stop - batch_size + 1, batch_size)
        workers = self.task.loader_workers
        ready = self._ahead(order, places, batch_size, workers) if workers else None
        for number, position in enumerate(places, start=1):
            # Halfway through the batch: a linear factor is then its mean over the batch.
            self.set_rate(rate, position + offset + batch_size / 2)
            self.step(order.take(position, batch_size), ready)
            if number % self._look_every == 0:
                self.look()
            yield position + batch_size
        self.look()

    def _ahead(self, order: Order, places: range, size: int, workers: int) -> Iterator[Any]:
        """This rank's micro-batches, made by worker processes while the model trains."""
        shares = (self.context.share(order.take(place, size)) for place in places)
        micros = [micro for share in shares for micro in torch.split(share, self.micro_batch_size)]
        return iter(batches(self.task.train, micros, self.context.device, workers))

    def evaluate(self) -> float:
        """The task's own evaluation, or the mean loss over its validation samples."""
        self.look()
        with _generators_kept(self.context.device), self._autocast(), torch.no_grad():
            self.seed_everything("evaluate")
            if self.task.evaluate is None:
                return self._evaluate()
            with guarded("Task.evaluate"), evaluating(self.model):
                return float(self.task.evaluate(self.model, self.task.valid))

    def _evaluate(self) -> float:
        """The mean loss over the validation samples, each rank's share by itself."""
        count, world = len(self.task.valid), self.context.size
        # What cannot be shared equally is evaluated on every rank: a sharded model needs as many
        # forward passes of each.
        shared = count - count % world
        share = self.context.share(torch.arange(shared))
        total = sum(self.context.sum([self._summed(share)])) if len(share) else 0.0
        if shared < count:
            total += self._summed(torch.arange(shared, count))
        return total / count

    def _summed(self, indices: Tensor) -> float:
        """The sum of the losses of some validation samples."""
        size, samples = min(self.micro_batch_size, EVALUATION_SIZE), self.task.valid
        if len(indices) < len(samples):
            samples = _Some(samples, indices)
        with guarded("Task.per_sample_loss on Task.valid"):
            mean = mean_loss(self.task, self.model, samples, micro_batch_size=size)
        return mean * len(indices)

    @contextmanager
    def noise_scale(self) -> Iterator["NoiseScale"]:
        """An estimator that averages all measurements; its hooks are gone afterwards."""
        # Here, because only `advise` measures it.
        from steadygrad.noise import NoiseScale

        # The weights stand still while they are measured.
        noise = NoiseScale(self.wrapped, decay=1.0, drift=False)
        try:
            yield noise
        finally:
            noise.remove()

    def measure(self, noise: "NoiseScale", order: Order, steps: int, parts: int) -> Iterator[int]:
        """Measures gradients at fixed weights, on samples from the start of an order.

        Args:
            noise: The estimator.
            order: The order.
            steps: Measurements, each on ``parts`` batches of the task's size.
            parts: See ``steps``.

        Yields:
            After each measurement, the samples used so far.
        """
        world, scale = self.context.size, self.scaler.get_scale()
        size = min(self.task.batch_size // world, self.micro_batch_size)
        per_step = self.task.batch_size * parts // (size * world) * size * world
        count = per_step // (size * world)
        for step in range(steps):
            self.look()
            indices = order.take(step * per_step, per_step)
            for micro in torch.split(self.context.share(indices), size):
                with noise.microbatch(size, loss_scale=scale):
                    loss = self.losses(self._batch(micro), size).mean()
                    with guarded("The backward pass of Task.per_sample_loss"):
                        (loss * (scale / count)).backward()
            noise.step()
            self.model.zero_grad()
            yield (step + 1) * per_step

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        enabled = self.dtype in (torch.float16, torch.bfloat16)
        dtype = self.dtype if enabled else None
        with torch.autocast(self.context.device.type, dtype=dtype, enabled=enabled):
            yield


@dataclass
class _Some:
    """Some of a task's samples."""

    samples: Samples
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Tensor) -> Any:
        return self.samples.batch(self.indices[indices])


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Puts Python's, numpy's and torch's generators back into their states."""
    devices, python = [device] if device.type == "cuda" else [], random.getstate()
    numpy = _numpy_random()
    state = None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(state)


def _numpy_random() -> Any:
    """The module ``numpy.random``; None where numpy is not installed."""
    try:
        import numpy as np
    except ModuleNotFoundError:
        return None
    return np.random


def keep_half_life(
    group: dict[str, Any], options: dict[str, Any], multiple: float, factor: float
) -> None:
    r"""Keeps the half-life of Adam's second moment and of the weight decay in samples.

    A step of ``multiple`` times the batch forgets as much as ``multiple`` steps:
    :math:`\beta_2^k`, and :math:`(1 - \eta\lambda)^k \approx 1 - (f\eta)(\lambda k / f)`.

    References:
        | Small Batch Size Training for Language Models (Marek et al., 2025)
        | https://arxiv.org/abs/2507.07101
    """
    if "betas" in options:
        beta1, beta2 = options["betas"]
        group["betas"] = (beta1, beta2**multiple)
    if "weight_decay" in options and factor > 0:
        group["weight_decay"] = options["weight_decay"] * multiple / factor


def _assign(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
