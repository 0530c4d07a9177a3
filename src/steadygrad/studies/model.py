"""A task's model while its weights stand still: losses, gradients, evaluation, noise."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.order import Order, generators_kept, seed_everything
from steadygrad.tasks import (
    Samples,
    Task,
    check_losses,
    check_model,
    evaluating,
    guarded,
    mean_loss,
    to_device,
)

if TYPE_CHECKING:
    from steadygrad.noise import NoiseScale

# Most samples in one forward pass of an evaluation.
EVALUATION_SIZE = 128


class TaskModel:
    """A task's model on the processes that share every batch; see :class:`Trainer`.

    Attributes:
        wrapped: The model, so that its backward pass averages gradients over all ranks.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        dtype: str,
        context: DistributedContext,
        micro_batch_size: int | None,
    ) -> None:
        if task.batch_size % context.size:
            raise InputError(
                f"The batch size should be a multiple of the {context.size} processes. Found "
                f"batch_size = {task.batch_size}. Remedy: another --nproc-per-node."
            )
        self.task, self.seed, self.context = task, seed, context
        self.micro_batch_size = micro_batch_size or task.micro_batch_size or len(task.train)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.scaler: Any = None
        self.seed_everything("init", 0)
        self.model = context.together(self._make_model)
        self.wrapped = context.wrap(self.model)

    def _make_model(self) -> nn.Module:
        with guarded("Task.make_model"):
            model = check_model(self.task.make_model())
            dtype = torch.float64 if self.dtype is torch.float64 else None
            return model.to(self.context.device, dtype)

    def seed_everything(self, *names: object) -> None:
        """Seeds Python's, numpy's and torch's generators for one trial."""
        seed_everything(self.seed, *names)

    def _batch(self, indices: Tensor) -> Any:
        with guarded("Task.train.batch"):
            return to_device(self.task.train.batch(indices), self.model)

    def _autocast(self) -> torch.autocast:
        enabled = self.dtype in (torch.float16, torch.bfloat16)
        dtype = self.dtype if enabled else None
        return torch.autocast(self.context.device.type, dtype=dtype, enabled=enabled)

    def losses(self, batch: Any, count: int) -> Tensor:
        """Per-sample losses of a batch on this rank, with shape ``(count,)``."""
        with guarded("Task.per_sample_loss"), self._autocast():
            losses: Any = self.task.per_sample_loss(self.wrapped, batch)
        # Only checks that cost no wait for the device.
        if not isinstance(losses, Tensor) or losses.shape != (count,):
            check_losses(losses, count)
        return losses  # type: ignore[no-any-return]

    def backward(
        self, indices: Tensor, ready: Iterator[Any] | None = None, *, exchange: bool = True
    ) -> Tensor:
        """Adds a global batch's gradients to ``.grad``, times the loss scale; takes no step.

        Its micro-batches on this rank may be ``ready``; else they are made here.

        Returns:
            The mean loss of this rank's samples, shape ``()``.
        """
        share = self.context.share(indices)
        micros = torch.split(share, self.micro_batch_size)
        parts = []
        for number, micro in enumerate(micros, start=1):
            batch = self._batch(micro) if ready is None else to_device(next(ready), self.model)
            # Ranks exchange gradients only with the last micro-batch of a step.
            with self.context.averaging(self.wrapped, exchange and number == len(micros)):
                loss = self.losses(batch, len(micro)).mean() * (len(micro) / len(share))
                with guarded("The backward pass of Task.per_sample_loss"):
                    self.scaler.scale(loss).backward()
            parts.append(loss.detach())
        return sum(parts[1:], parts[0])

    def _validation_loss(self) -> float:
        """The task's own evaluation, or the mean loss over its validation samples."""
        with generators_kept(self.context.device), self._autocast(), torch.no_grad():
            self.seed_everything("evaluate")
            if self.task.evaluate is not None:
                with guarded("Task.evaluate"), evaluating(self.model):
                    return float(self.task.evaluate(self.model, self.task.valid))
            # What cannot be shared equally is evaluated on every rank: a sharded model needs as
            # many forward passes of each.
            count, world = len(self.task.valid), self.context.size
            shared, rest = torch.arange(count).split([count - count % world, count % world])
            (total,) = self.context.sum([self._summed(self.context.share(shared))])
            return (total + self._summed(rest)) / count

    def first_losses(self) -> tuple[float, ...]:
        """Mean losses of some samples at the present weights: they show a task that has changed."""
        task, size = self.task, self.micro_batch_size
        counts = min(task.batch_size // self.context.size, size), min(size, EVALUATION_SIZE)
        lengths = len(task.train), len(task.valid)
        places = [torch.arange(n) * m // n for n, m in zip(counts, lengths, strict=True)]
        with generators_kept(self.context.device), self._autocast():
            self.seed_everything("first")
            found = [self.losses(self._batch(places[0]), counts[0]).detach().mean().item()]
            if task.evaluate is None:
                found.append(self._summed(places[1]) / counts[1])
        return tuple(self.context.gather(found)[0])

    def _summed(self, indices: Tensor) -> float:
        """The sum of the losses of some validation samples."""
        if not len(indices):
            return 0.0
        size = min(self.micro_batch_size, EVALUATION_SIZE)
        samples = _Some(self.task.valid, indices)
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
        """Measures gradients on samples from the start of an order, ``parts`` batches each time.

        Yields:
            After each of ``steps`` measurements, the samples used so far.
        """
        world, scale = self.context.size, self.scaler.get_scale()
        size = min(self.task.batch_size // world, self.micro_batch_size)
        count = self.task.batch_size * parts // (size * world)
        per_step = count * size * world
        for step in range(steps):
            self.context.poll()
            indices = order.take(step * per_step, per_step)
            for micro in torch.split(self.context.share(indices), size):
                with noise.microbatch(size, loss_scale=scale):
                    loss = self.losses(self._batch(micro), size).mean()
                    with guarded("The backward pass of Task.per_sample_loss"):
                        (loss * (scale / count)).backward()
            noise.step()
            self.model.zero_grad()
            yield (step + 1) * per_step


@dataclass
class _Some:
    """Some of a task's samples."""

    samples: Samples
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Tensor) -> Any:
        return self.samples.batch(self.indices[indices])
