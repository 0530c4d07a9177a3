"""One training loop for everything that the studies train and measure."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from steadygrad._checks import InputError
from steadygrad.studies.checkpoint import State, on_host
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.learning_rate import Rate, RateSetter, has_second_moment
from steadygrad.studies.model import TaskModel
from steadygrad.studies.order import Order
from steadygrad.tasks import (
    Task,
    TaskError,
    batches,
    check_losses,
    guarded,
    is_out_of_memory,
)
from steadygrad.tasks.losses import depend_on_company
from steadygrad.tasks.made import (
    check_gradients,
    check_model_maker,
    fingerprints,
    make_optimizer,
    optimizer_of,
)

# Steps between two reads of the losses on an accelerator, where a read synchronises.
LOOK_EVERY = 16

T = TypeVar("T")
Scaling = Callable[[nn.Module], Any]


class Diverged(InputError):
    """The training or validation loss is not finite."""


class Trainer(TaskModel):
    """A model that can be put into any state and trained from there.

    Args:
        task: What to train.
        seed: The study's seed.
        dtype: Name of a type; float16 and bfloat16 by autocast, float64 throughout.
        context: The processes that share every batch.
        micro_batch_size: Most samples in one forward pass of one process. Default: the task's;
            without one, a whole batch.
        keep_half_life: Whether Adam's second moment and the weight decay keep their half-life in
            samples at every batch size.
        finite: Whether a loss that is not finite ends the training.
        scaling: Makes the gradient scaler of a model, and may be exchanged before a restart.
            Default: torch's, in float16 only.

    Attributes:
        dependent: Whether a sample's loss depends on the rest of its batch; no batch is cut then.
        second_moment: Whether the second of two betas is a second moment's decay.
        steps: Optimizer steps taken.
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
        finite: bool = True,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(task, seed, dtype, context, micro_batch_size)
        self.scaling, self._keep_half_life, self._finite = scaling, keep_half_life, finite
        self.dependent = self.second_moment = False
        context.together(partial(self._begin, first=True))

    def _begin(self, state: State | None = None, *, first: bool = False) -> None:
        """Begins with a new optimizer, or continues with that of a state."""
        make, what = partial(self.task.optimizer, self.model), "Task.make_optimizer"
        if first:
            self.optimizer = make_optimizer(make, self.model, self.task.lr, what)
        else:
            self.optimizer = optimizer_of(make, self.task.lr, what)
        if hasattr(self.scaler, "remove"):
            self.scaler.remove()  # its hooks would scale for the next one too
        if self.scaling is not None:
            self.scaler = self.scaling(self.model)
        else:
            enabled = self.dtype is torch.float16
            self.scaler = torch.amp.GradScaler(self.context.device.type, enabled=enabled)
        self.set_rate = RateSetter(self.optimizer, self.task, self._keep_half_life)
        if state is not None:
            self.scaler.load_state_dict(copy.deepcopy(state.scaler))
            self.context.load_optimizer(self.model, self.optimizer, state.optimizer)
        self.set_rate(Rate())
        self.model.zero_grad()
        self.model.train()
        self.steps = state.steps if state else 0
        self._losses: list[Tensor] = []
        self._looked_at: list[float] = []

    def restart(self, repeat: int = 0) -> None:
        """Goes back to a freshly initialised model; each repeat has weights of its own."""
        fresh = self.context.together(lambda: self._make_anew(repeat))
        self.context.load_model(self.model, on_host(fresh.state_dict()))
        del fresh
        self._begin()

    def _make_anew(self, repeat: int) -> nn.Module:
        self.seed_everything("init", repeat)
        return self._make_model()

    def load(self, state: State) -> None:
        """Goes on from a state, at the task's own learning rate."""
        self.context.load_model(self.model, state.model)
        self._begin(state)

    def state(self, samples: int) -> State:
        """A copy of the training's state in the host's memory, after ``samples``."""
        model, optimizer = self.context.states(self.model, self.optimizer)
        model, optimizer, scaler = map(on_host, (model, optimizer, self.scaler.state_dict()))
        return State(model, optimizer, scaler, samples, self.steps)

    def try_once(self) -> None:
        """Evaluates, trains and saves once: a broken task is refused before the study begins."""
        together, before = self.context.together, fingerprints(self.model)
        count = together(self._check_losses)
        self._check_company(count)
        together(self._check_evaluation)
        self.fit_micro_batch(self.task.batch_size)
        # So that the step changes weights: its rate is not zero, and its scale does not overflow.
        self.set_rate(Rate(), self.task.warmup_samples)
        self.scaler.update(1.0)
        self.by_halves(lambda: self.step(torch.arange(self.task.batch_size)))
        self.look()
        self.second_moment = together(
            lambda: has_second_moment(self.optimizer, needed=self._keep_half_life)
        )
        together(lambda: self.load(self.state(0).reread()))
        after = fingerprints(self.model)
        together(lambda: check_model_maker(self._make_anew, before, after))
        self.restart()

    def _check_evaluation(self) -> None:
        before, value = fingerprints(self.model), self.evaluate()
        if self._finite and not math.isfinite(value):
            raise Diverged(
                f"The evaluation of the untrained model should be finite. Found {value}. "
                "Remedy: look for NaN in the validation data."
            )
        after = fingerprints(self.model)
        for name, _ in self.model.named_parameters():
            if before.get(name) != after.get(name):
                raise TaskError(
                    f"Task.evaluate should leave the model as it is. Found changes of {name!r}. "
                    "Remedy: no training in Task.evaluate; weights that it replaces are put back."
                )

    def _check_losses(self) -> int:
        """Checks the losses of as many samples of a batch as fit into memory; says how many."""
        count = min(self.task.batch_size // self.context.size, self.micro_batch_size)

        def check() -> None:
            losses = self.losses(self._batch(torch.arange(count)), count)
            check_losses(losses, count, finite=self._finite)

        while not self._fits(check, count):
            count //= 2
        return count

    def _check_company(self, count: int) -> None:
        """Finds out whether the losses of a batch's samples depend on one another."""
        total, found = len(self.task.train), list[bool]()
        types = {self.dtype, *(p.dtype for p in self.model.parameters() if p.is_floating_point())}
        eps = max(torch.finfo(dtype).eps for dtype in types)

        def losses(indices: Tensor, seed: int) -> tuple[Tensor, Any]:
            self.seed_everything("company", seed)
            batch = self._batch(indices)
            # A nested tensor has none.
            shapes = tree_map(lambda x: getattr(x, "is_nested", True) or x.shape, batch)
            return self.losses(batch, len(indices)), shapes

        def compare() -> None:
            size = min(max(2, count), total)
            found.append(depend_on_company(losses, self.model, size, total, eps))

        # Where two do not fit it is not known.
        self.context.together(lambda: self._fits(compare, 2))
        self.dependent = any(map(any, self.context.gather(found)))

    def fit_micro_batch(self, largest: int) -> None:
        """Finds micro-batches of a batch of ``largest`` samples that fit into memory, by halves.

        The model's buffers may change.
        """
        context = self.context

        def work() -> None:
            count = self.micro_batch_size * context.size
            indices = torch.arange(count) % len(self.task.train)
            # Without an exchange: a rank without memory would leave the others waiting.
            self.backward(indices, exchange=context.sharding == "fsdp2")
            check_gradients(self.optimizer, self.model, "Task.make_optimizer")

        share = -(-largest // context.size)
        self.micro_batch_size = min(self.task.micro_batch_size or largest, share)
        while True:
            if self.dependent and self.micro_batch_size < share:
                raise InputError(
                    f"Batches of {share} samples, whose losses depend on one another, should not "
                    f"be cut. Found micro_batch_size = {self.micro_batch_size}. Remedy: no "
                    "Task.micro_batch_size; a smaller --budget or more memory where they do not "
                    "fit."
                )
            # All ranks take the size that fits on each of them.
            fits = context.together(lambda: self._fits(work, self.micro_batch_size))
            if all(context.gather(fits)):
                return
            self.micro_batch_size //= 2

    def by_halves(self, work: Callable[[], T]) -> T:
        """Does something; a single rank halves its micro-batch where memory runs out."""
        while True:
            try:
                return work()
            except TaskError as error:
                whole = self.context.size > 1 or self.micro_batch_size == 1 or self.dependent
                if whole or not is_out_of_memory(error):
                    raise
            self._free_memory()
            self.micro_batch_size //= 2

    def _fits(self, work: Callable[[], object], size: int) -> bool:
        """Whether work on ``size`` samples at a time fits into this rank's memory."""
        try:
            work()
        except TaskError as error:
            if not is_out_of_memory(error) or size == 1:
                raise
            return False
        finally:
            self._free_memory()
        return True

    def _free_memory(self) -> None:
        self.model.zero_grad()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, indices: Tensor, ready: Iterator[Any] | None = None) -> None:
        """One optimizer step on a global batch; nothing here waits for an accelerator."""
        self._losses.append(self.backward(indices, ready))
        with guarded("A step of the optimizer"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps += 1

    def look(self) -> None:
        """Reads the losses since the last call, and asks whether to stop.

        Raises:
            Diverged: If one of them is not finite.
            StudyInterrupted: If the study has to stop.
        """
        pending = torch.stack(self._losses).tolist() if self._losses else []
        self._losses.clear()
        for value in self.context.poll(pending):
            if self._finite and not math.isfinite(value):
                raise Diverged(
                    f"The training loss should stay finite. Found {value} within {self.steps} "
                    f"steps. Remedy: a lower Task.lr than {self.task.lr:g}, data without NaN."
                )
            self._looked_at.append(value)

    def last_loss(self) -> float:
        """The mean training loss of the last step."""
        return float(self._losses[-1]) if self._losses else self._looked_at[-1]

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
        """Trains over the positions ``start`` to ``stop`` of an order, in whole batches.

        The default ``rate`` is the task's own. At ``start`` the run has ``seen`` so many samples;
        by default as many as ``start``.

        Yields:
            After each step, the position reached.
        """
        rate, offset = rate or Rate(), (start if seen is None else seen) - start
        places = range(start, stop - batch_size + 1, batch_size)
        ready = self._ahead(order, places) if self.task.loader_workers else None
        for number, position in enumerate(places, start=1):
            # Halfway through the batch: a linear factor is then its mean over the batch.
            self.set_rate(rate, position + offset + batch_size / 2)
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
        """The validation loss, after a read of the losses so far."""
        self.look()
        return self._validation_loss()
