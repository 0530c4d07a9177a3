"""Batch sizes by samples seen, in Hugging Face's ``Trainer``."""

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from steadygrad._checks import check_type
from steadygrad.formulas.schedule import BatchSizeSchedule
from steadygrad.integrations.extras import MissingExtraError
from steadygrad.integrations.windows import Window, windows

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise MissingExtraError("transformers", "transformers") from error

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

__all__ = ["ScheduledTrainer"]


class ScheduledTrainer(Trainer):
    """Sets a Trainer's ``gradient_accumulation_steps`` by a schedule, if there is one."""

    _batch_sizes: BatchSizeSchedule | None = None
    _windows: Iterator[Window]
    _epoch_batches: int | None
    # Micro-batches that the newest step accumulated.
    _taken: int

    def _follow(self, schedule: BatchSizeSchedule | None) -> None:
        """Sets the first stage's number of micro-batches, and follows the schedule from there."""
        if schedule is None:
            return
        remedy = "BatchSizeSchedule([...])"
        self._batch_sizes = check_type("batch_sizes", schedule, BatchSizeSchedule, remedy)
        self._set_factor(next(self._schedule(None)))
        self.add_callback(_NextWindow(self))

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Replaces the Trainer's numbers of epochs, steps and samples by those of the schedule."""
        values: tuple[Any, ...] = super().set_initial_training_values(args, dataloader)
        if self._batch_sizes is None:
            return values
        batches = len(dataloader) if has_length(dataloader) else None
        self._epoch_batches = batches
        walk = self._schedule(batches)
        if args.max_steps > 0:
            taken = [next(walk) for _ in range(args.max_steps)]
        else:
            # The Trainer refuses num_train_epochs for a dataset without a length.
            end = args.num_train_epochs * (batches or 1)
            taken = [*takewhile(lambda w: w.epoch * (batches or 1) + w.start < end, walk)]
        micros = sum(window.length for window in taken)
        samples = micros * self._micro_batch_size
        # An upper bound: the Trainer shortens the window with this number, which no epoch reaches.
        most = (batches or args.max_steps) + 1
        epochs = values[0] if batches is None else taken[-1].epoch + 1
        in_epoch = micros if batches is None else batches
        return (epochs, most, values[2], samples, values[4], in_epoch, len(taken))

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        if self._batch_sizes is None:
            return found
        self._windows = self._schedule(self._epoch_batches)
        for _ in range(self.state.global_step):
            next(self._windows)
        window = self._next_window()
        return window.epoch, 0 if self.args.ignore_data_skip else window.start

    @property
    def _micro_batch_size(self) -> int:
        """Samples of one micro-batch, on all processes together."""
        return int(self.get_total_train_batch_size(self.args)) // self._factor

    @property
    def _factor(self) -> int:
        return int(self.args.gradient_accumulation_steps)

    def _schedule(self, epoch_batches: int | None) -> Iterator[Window]:
        assert self._batch_sizes is not None
        return windows(self._batch_sizes, self._micro_batch_size, epoch_batches)

    def _next_window(self) -> Window:
        assert self._windows is not None
        window = next(self._windows)
        self._set_factor(window)
        return window

    def _set_factor(self, window: Window) -> None:
        self._taken = self._factor
        self.args.gradient_accumulation_steps = window.factor


class _NextWindow(TrainerCallback):
    """Sets the number of micro-batches of the next step."""

    def __init__(self, trainer: ScheduledTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Sets the next window's number."""
        self._trainer._next_window()
