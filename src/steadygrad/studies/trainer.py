"""One training loop for everything that the studies train and measure."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from steadygrad._checks import InputError
from steadygrad.studies.course import Order, Rate, RateSetter, generators_kept, has_second_moment
from steadygrad.studies.distributed import DistributedContext, StateDict, on_host
from steadygrad.studies.schema import seed_for
from steadygrad.tasks import (
    Task,
    TaskError,
    batches,
    check,
    guarded,
    is_out_of_memory,
    mean_loss,
    start,
    to_device,
)
from steadygrad.tasks.task import EVALUATION_SIZE

# Steps between two reads of the losses on an accelerator, where a read synchronises.
LOOK_EVERY = 16

T = TypeVar("T")


class Diverged(InputError):
    """The training or validation loss is not finite."""


class Trainer:
    """A task's model that can be put into any state, and measured or trained from there.

    It computes in float16 or bfloat16 by autocast, in float64 throughout. ``keep_half_life`` is
    that of :class:`RateSetter`. Where losses need not be ``finite``, training goes on after one
    that is not. ``scaling`` makes the gradient scaler of a model, and may be exchanged before a
    restart. Default: torch's, in float16 only.

    Attributes:
        micro_batch_size: The most samples in one forward pass of a process. Default: the task's;
            without one, a whole batch.
        wrapped: The model, so that its backward pass averages gradients over all ranks.
        dependent: Whether a sample's loss depends on the rest of its batch; no batch is cut then.
        second_moment: Whether the second of two betas is a second moment's decay.
        start_digest: SHA-256 of the checkpoint that runs begin from; empty without one.
    """

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        dtype: str,
        context: DistributedContext,
        keep_half_life: bool = False,
        finite: bool = True,
        scaling: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        if task.batch_size % context.size:
            raise InputError(
                f"The batch size should be a multiple of the {context.size} processes. Found "
                f"batch_size = {task.batch_size}. Remedy: another --nproc-per-node."
            )
        self.task, self.seed, self.context = task, seed, context
        self.micro_batch_size = task.micro_batch_size or len(task.train)
        self.dtype: torch.dtype = getattr(torch, dtype)
        half = self.dtype is torch.float16
        self.scaling = scaling or (
            lambda model: torch.amp.GradScaler(context.device.type, enabled=half)
        )
        self._keep_half_life, self._finite = keep_half_life, finite
        self.dependent = self.second_moment = False
        self.scaler: Any = None
        self.model = context.together(lambda: self._make_anew(0))
        self._own_maker, self.start_digest = task.make_optimizer, ""
        self._start = context.together(self._read_start)
        self.wrapped = context.wrap(self.model)
        make, what = partial(task.optimizer, self.model), "Task.make_optimizer"
        context.together(lambda: check.check_optimizer_maker(make, self.model, task.lr, what))
        context.together(lambda: self._begin({}))
        if self._start and (saved := self._start[1]):
            by_name = context.sharding == "fsdp2"
            fit = partial(start.fitting_optimizer, saved, self.model, self.optimizer)
            self._start = self._start[0], context.together(lambda: fit(by_name=by_name))

    def _make_anew(self, repeat: int) -> nn.Module:
        self.seed_everything("init", repeat)
        with guarded("Task.make_model"):
            model = check.check_model(self.task.make_model(), scaled=self.dtype is torch.float16)
            dtype = torch.float64 if self.dtype is torch.float64 else None
            return model.to(self.context.device, dtype)

    def _read_start(self) -> tuple[StateDict, StateDict] | None:
        """Loads the weights that runs begin from; the optimizer's state, if any, is as saved."""
        if self.task.start is None:
            return None
        weights, optimizer = start.read_start(self.task.start)
        weights = start.fitting_weights(weights, self.model)
        self.start_digest = start.digest_of(self.task.start)
        with guarded("The load_state_dict of the model"):
            self.model.load_state_dict(weights)
        return weights, optimizer or {}

    def _begin(self, saved: StateDict) -> None:
        """Begins with a new optimizer; ``saved`` is its state, empty for none."""
        self._renew_optimizer()
        if hasattr(self.scaler, "remove"):
            self.scaler.remove()  # its hooks would scale for the next one too
        self.scaler = self.scaling(self.model)
        self.model.zero_grad()  # where there are gradients, torch makes no sharded states
        if saved:
            self.context.load_optimizer(self.model, self.optimizer, saved)
        self.set_rate(Rate())
        self.model.train()
        self.steps = 0
        # Of steps whose losses were not read yet, and of those that were.
        self._losses: list[Tensor] = []
        self._looked_at: list[float] = []

    def _renew_optimizer(self) -> None:
        make = partial(self.task.optimizer, self.model)
        self.optimizer = check.optimizer_of(make, self.task.lr, "Task.make_optimizer")
        self.set_rate = RateSetter(self.optimizer, self.task, self._keep_half_life)

    def restart(self, repeat: int = 0) -> None:
        """Goes back to a fresh model, each repeat with weights of its own, or to ``Task.start``."""
        if self._start is None:
            fresh = self.context.together(lambda: self._make_anew(repeat))
            weights, saved = on_host(fresh.state_dict()), dict[str, Any]()
            del fresh
        else:
            weights, saved = self._start
            # A study may have put another optimizer in its place, which begins without a state.
            saved = saved if self.task.make_optimizer is self._own_maker else {}
        self.context.load_model(self.model, weights)
        self._begin(saved)

    def seed_everything(self, *names: object) -> None:
        """Seeds Python's, numpy's and torch's generators for one trial."""
        seed = seed_for(self.seed, *names)
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    def check_task(self) -> None:
        """Evaluates and trains once: a broken task is refused before the study begins."""
        together, size = self.context.together, self.task.batch_size
        before = check.fingerprints(self.model)
        self.fit_micro_batch(size)
        self._find_company()
        if self.dependent:
            self.fit_micro_batch(size)  # refused where that cuts the batch
        together(self._check_evaluation)
        self.check_rate()
        self.look()
        self.second_moment = together(
            lambda: has_second_moment(self.optimizer, needed=self._keep_half_life)
        )
        if self._start is None:
            after = check.fingerprints(self.model)
            make = partial(self._make_anew, 0)
            together(lambda: check.check_model_maker(make, before, after))
        elif saved := self._start[1]:
            # The step began without the checkpoint's state, and made one of its own; on the host,
            # as the device has no room for two.
            made = together(lambda: on_host(self.context.states(self.model, self.optimizer)[1]))
            together(lambda: start.check_optimizer_state(saved["state"], made["state"]))
            self.restart()
            self.backward(torch.arange(size))
            with guarded("A step of the optimizer, with Task.start's state,"):
                self.scaler.step(self.optimizer)
        self.restart()

    def check_rate(self) -> None:
        """Takes a step; refuses an optimizer whose steps are alike at two rates."""
        self.scaler.update(1.0)  # so that no step overflows
        begin = on_host(self.context.states(self.model, self.optimizer)[0])
        size = self.task.batch_size

        def weights(steps: int, factor: float = 1.0) -> list[Any]:
            # Not a new scaler: for its hooks a compiled model would be compiled anew.
            self.context.load_model(self.model, begin)
            self._renew_optimizer()
            self._losses.clear()
            self.seed_everything("rates")
            for number in range(steps):
                self.set_rate(Rate(factor=factor), self.task.warmup_samples + size * number)
                self.step(torch.arange(size))
            marks, named = check.fingerprints(self.model), self.model.named_parameters()
            return [marks.get(name) for name, p in named if p.requires_grad]

        # The first step of some moves no weight. 8: in 16 bits 2 may be rounded away.
        for steps in (1, 3):
            begun, other, own = weights(0), weights(steps, 8.0), weights(steps)
            if any(self.context.gather(own != other)):
                return
        if any(self.context.gather(own != begun)):
            self.set_rate.check("steps alike at two rates")

    def _find_company(self) -> None:
        """Finds out whether the losses of a batch's samples depend on one another."""
        total = len(self.task.train)
        types = {self.dtype, *(p.dtype for p in self.model.parameters() if p.is_floating_point())}
        eps = max(torch.finfo(dtype).eps for dtype in types)

        def losses(indices: Tensor, seed: int) -> tuple[Tensor, Any]:
            self.seed_everything("company", seed)
            batch = self.batch(indices)
            # A nested tensor has none.
            shapes = tree_map(lambda x: getattr(x, "is_nested", True) or x.shape, batch)
            return self.losses(batch, len(indices)), shapes

        size = min(max(2, self.micro_batch_size), total)
        found = check.losses_depend_on_company(losses, self.model, size, total, eps)
        self.dependent = any(self.context.gather(found))

    def _check_evaluation(self) -> None:
        before = check.fingerprints(self.model)
        value, after = self.evaluate(), check.fingerprints(self.model)
        if self._finite and not math.isfinite(value):
            raise Diverged(
                f"The evaluation of the untrained model should be finite. Found {value}. "
                "Remedy: look for NaN in the validation data."
            )
        for name, _ in self.model.named_parameters():
            if before.get(name) != after.get(name):
                raise TaskError(
                    f"Task.evaluate should leave the model as it is. Found changes of {name!r}. "
                    "Remedy: no training in Task.evaluate; weights that it replaces are put back."
                )

    def fit_micro_batch(self, largest: int) -> None:
        """Finds micro-batches of a batch of ``largest`` samples that fit into memory, by halves.

        Losses and gradients are checked; the model's buffers may change.
        """
        context = self.context

        def work() -> None:
            count = self.micro_batch_size
            indices = torch.arange(count * context.size) % len(self.task.train)
            losses = self.losses(self.batch(context.share(indices)), count)
            check.check_losses(losses, count, finite=self._finite)
            del losses
            # Without an exchange: a rank without memory would leave the others waiting.
            self.backward(indices, exchange=context.sharding == "fsdp2")
            check.check_gradients(self.optimizer, self.model, "Task.make_optimizer")

        share = -(-largest // context.size)
        self.micro_batch_size = min(self.task.micro_batch_size or share, share)
        while True:
            if self.dependent and self.micro_batch_size < share:
                raise InputError(
                    f"Batches of {share} samples, whose losses depend on one another, should not "
                    f"be cut. Found micro_batch_size = {self.micro_batch_size}. Remedy: no "
                    "Task.micro_batch_size; a smaller --budget or more memory where they do not "
                    "fit."
                )
            # All ranks take the size that fits on each of them.
            if all(context.gather(context.together(lambda: self._fits(work)))):
                return
            self.micro_batch_size //= 2

    def by_halves(self, work: Callable[[], T]) -> T:
        """Does something; a single rank halves its micro-batch where memory runs out."""
        if self.context.size > 1 or self.dependent:
            return work()
        found: list[T] = []
        while not self._fits(lambda: found.append(work())):
            self.micro_batch_size //= 2
        return found[0]

    def _fits(self, work: Callable[[], object]) -> bool:
        """Whether the micro-batches of some work fit into this rank's memory."""
        try:
            work()
        except TaskError as error:
            if not is_out_of_memory(error) or self.micro_batch_size == 1:
                raise
            return False
        finally:
            self.model.zero_grad()
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    def batch(self, indices: Tensor) -> Any:
        """Training samples, on the model's device."""
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
            check.check_losses(losses, count)
        return losses  # type: ignore[no-any-return]

    def backward(
        self, indices: Tensor, ready: Iterator[Any] | None = None, *, exchange: bool = True
    ) -> Tensor:
        """Adds a global batch's gradients to ``.grad``, times the loss scale; takes no step.

        Its micro-batches on this rank may be ``ready``; else they are made here. The mean loss of
        this rank's samples, with shape ``()``, is returned.
        """
        share = self.context.share(indices)
        micros = torch.split(share, self.micro_batch_size)
        parts = []
        for number, micro in enumerate(micros, start=1):
            batch = self.batch(micro) if ready is None else to_device(next(ready), self.model)
            # Ranks exchange gradients only with the last micro-batch of a step.
            with self.context.averaging(self.wrapped, exchange and number == len(micros)):
                loss = self.losses(batch, len(micro)).mean() * (len(micro) / len(share))
                with guarded("The backward pass of Task.per_sample_loss"):
                    self.scaler.scale(loss).backward()
            parts.append(loss.detach())
        return sum(parts[1:], parts[0])

    def step(self, indices: Tensor, ready: Iterator[Any] | None = None) -> None:
        """One optimizer step on a global batch; nothing here waits for an accelerator."""
        self._losses.append(self.backward(indices, ready))
        with guarded("A step of the optimizer"):
            self.scaler.step(self.optimizer)
        self.set_rate.check()
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps += 1

    def look(self) -> list[float]:
        """For each step since the last restart, its loss averaged over the ranks; all finite."""
        pending = torch.stack(self._losses).tolist() if self._losses else []
        self._losses.clear()
        for value in self.context.poll(pending):
            if self._finite and not math.isfinite(value):
                half = "--dtype bfloat16 or float32, " if self.dtype is torch.float16 else ""
                raise Diverged(
                    f"The training loss should stay finite. Found {value} within {self.steps} "
                    f"steps. Remedy: {half}a lower Task.lr than {self.task.lr:g}, data without NaN."
                )
            self._looked_at.append(value)
        return self._looked_at

    def run(
        self, order: Order, start: int, stop: int, batch_size: int, *, rate: Rate | None = None
    ) -> Iterator[int]:
        """Trains over the positions ``start`` to ``stop`` of an order; yields where each step ends.

        Batches are whole. The default ``rate`` is the task's own.
        """
        rate, places = rate or Rate(), range(start, stop - batch_size + 1, batch_size)
        ready = self._ahead(order, places) if self.task.loader_workers else None
        for number, position in enumerate(places, start=1):
            # Halfway through the batch: a linear factor is then its mean over the batch.
            self.set_rate(rate, position + batch_size / 2)
            self.step(order.take(position, batch_size), ready)
            if number % (1 if self.context.device.type == "cpu" else LOOK_EVERY) == 0:
                self.look()
            yield position + batch_size
        self.look()

    def _ahead(self, order: Order, places: range) -> Iterator[Any]:
        """This rank's micro-batches, made by worker processes while the model trains."""
        # Lazily: a measurement of the speed does not know how many steps it will take.
        shares = (self.context.share(order.take(place, places.step)) for place in places)
        micros = (micro for share in shares for micro in torch.split(share, self.micro_batch_size))
        device, workers = self.context.device, self.task.loader_workers
        return iter(batches(self.task.train, micros, device, workers))

    def evaluate(self) -> float:
        """The validation loss: by the task's own evaluation, or the mean over its samples."""
        self.look()
        with generators_kept(self.context.device), self._autocast(), torch.no_grad():
            self.seed_everything("evaluate")
            if self.task.evaluate is not None:
                with guarded("Task.evaluate"), check.evaluating(self.model):
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
            found = [self.losses(self.batch(places[0]), counts[0]).detach().mean().item()]
            if task.evaluate is None:
                found.append(self._summed(places[1]) / counts[1])
        return tuple(self.context.gather(found)[0])

    def _summed(self, indices: Tensor) -> float:
        """The sum of the losses of some validation samples."""
        if not len(indices):
            return 0.0
        size = min(self.micro_batch_size, EVALUATION_SIZE)
        with guarded("Task.per_sample_loss on Task.valid"):
            mean = mean_loss(self.task, self.model, indices=indices, micro_batch_size=size)
        return mean * len(indices)
