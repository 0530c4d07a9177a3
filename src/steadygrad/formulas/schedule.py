"""A batch-size schedule, in the forms that training programs read."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from steadygrad._checks import InputError, check_count, check_number, check_type

__all__ = ["BatchSizeSchedule", "Stage"]

_SUFFIXES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))

_OLMO_CORE = """\
BatchSizeSchedulerCallback(
    batch_sizes={sizes},
    schedule=[{starts}],
)"""

# Lightning's own class counts epochs, in which a run of one epoch has no room for a schedule.
_LIGHTNING = """\
class BatchSizes(GradientAccumulationScheduler):
    def on_train_batch_start(self, trainer, *_):
        factor = self.get_accumulate_grad_batches(trainer.global_step)
        trainer.accumulate_grad_batches = factor

callback = BatchSizes({steps})"""

_HUGGING_FACE = """\
class BatchSizes(TrainerCallback):
    steps = {steps}

    def on_train_begin(self, args, state, control, **kwargs):
        start = max(step for step in self.steps if step <= state.global_step)
        args.gradient_accumulation_steps = self.steps[start]

    on_step_end = on_train_begin"""


@dataclass(frozen=True)
class Stage:
    """One stretch of training at one batch size.

    Attributes:
        from_samples: Samples seen when it begins.
        batch_size: Samples a step.
        lr: Learning rate that goes with it, if known.
    """

    from_samples: int
    batch_size: int
    lr: float | None = None


def _stage(fields: Mapping[str, Any]) -> Stage:
    try:
        return Stage(**fields)
    except TypeError:
        raise InputError(
            "Expected a stage with `from_samples`, `batch_size` and perhaps `lr`. Found "
            f"{fields!r}. Remedy: a Stage, or a dict with these names."
        ) from None


class BatchSizeSchedule:
    """Batch sizes by samples seen.

    Args:
        stages: Stages, or mappings with their fields, in order; the first begins at 0.

    Raises:
        InputError: If there is none, the first does not begin at 0, they are out of order, or a
            batch size or learning rate is not a positive number.
    """

    def __init__(self, stages: Iterable[Stage | Mapping[str, Any]]) -> None:
        remedy = "a list of stages, or `from_json` for text"
        check_type("stages", stages, Iterable, remedy)  # type: ignore[type-abstract]
        self.stages = [s if isinstance(s, Stage) else _stage(s) for s in stages]
        starts = [check_count("from_samples", s.from_samples, low=0) for s in self.stages]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise InputError(
                "Expected stages that begin at 0 and in rising order. Found beginnings "
                f"{starts}. Remedy: sort them by `from_samples`, and let the first begin at 0."
            )
        for stage in self.stages:
            check_count("batch_size", stage.batch_size)
            if stage.lr is not None:
                check_number("lr", stage.lr, low=0, low_open=True)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchSizeSchedule) and self.stages == other.stages

    __hash__ = None  # type: ignore[assignment]

    def batch_size(self, samples: int) -> int:
        """The batch size after a number of samples."""
        check_count("samples", samples, low=0)
        return [s for s in self.stages if s.from_samples <= samples][-1].batch_size

    def to_json(self) -> str:
        """A JSON list of stages."""
        return json.dumps([asdict(stage) for stage in self.stages], indent=2)

    @classmethod
    def from_json(cls, text: str) -> "BatchSizeSchedule":
        """Reads the text of :meth:`to_json`."""
        try:
            return cls(json.loads(text))
        except json.JSONDecodeError as error:
            raise InputError(
                f"Expected a JSON list of stages. Found {text[:40]!r}: {error}. "
                "Remedy: hand in what `to_json` returned."
            ) from error

    def to_csv(self) -> str:
        """CSV text with a header line; an unknown learning rate is empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["from_samples", "batch_size", "lr"])
        writer.writerows([s.from_samples, s.batch_size, s.lr] for s in self.stages)
        return out.getvalue()

    def to_megatron(self, tokens_per_sample: int = 1) -> str:
        """The text that Megatron's ``--step-batch-size-schedule`` takes, as ``0:768 250B:1536``.

        Args:
            tokens_per_sample: Sequence length: Megatron counts thresholds in tokens if
                ``--seq-length`` is given. 1 leaves them in samples.
        """
        check_count("tokens_per_sample", tokens_per_sample)
        return " ".join(
            f"{_short(s.from_samples * tokens_per_sample)}:{s.batch_size}" for s in self.stages
        )

    def to_olmo_core(self, tokens_per_sample: int) -> str:
        """The call of OLMo-core's ``BatchSizeSchedulerCallback``; all numbers are tokens.

        The callback multiplies the learning rate by the square root of each growth itself.

        Args:
            tokens_per_sample: Sequence length.

        Raises:
            InputError: If one batch size is not an integer multiple of its neighbour.
        """
        check_count("tokens_per_sample", tokens_per_sample)
        kept = [s for i, s in enumerate(self.stages) if not i or s.batch_size != self._size(i - 1)]
        for before, after in pairwise(kept):
            low, high = sorted((before.batch_size, after.batch_size))
            _check_factor(high, low, "stages that grow by integer factors")
        sizes = [s.batch_size * tokens_per_sample for s in kept]
        starts = ", ".join(f"Duration.tokens({s.from_samples * tokens_per_sample})" for s in kept)
        return _OLMO_CORE.format(sizes=sizes, starts=starts)

    def to_lightning(self, batch_size: int) -> str:
        """A ``GradientAccumulationScheduler`` for Lightning that counts optimizer steps.

        A stage begins at the first micro-batch from its start on at which no window is cut.

        Args:
            batch_size: Samples of one micro-batch, on all devices together.

        Raises:
            InputError: If a stage's batch size is not an integer multiple of ``batch_size``.
        """
        return _LIGHTNING.format(steps=self._accumulation(batch_size))

    def to_hugging_face(self, batch_size: int) -> str:
        """A ``TrainerCallback`` that sets ``gradient_accumulation_steps`` by optimizer step.

        Stages begin as in :meth:`to_lightning`. ``TrainingArguments`` needs ``max_steps`` and the
        first stage's ``gradient_accumulation_steps``.

        Args:
            batch_size: Samples of one micro-batch, on all devices together.

        Raises:
            InputError: If a stage's batch size is not an integer multiple of ``batch_size``.
        """
        return _HUGGING_FACE.format(steps=self._accumulation(batch_size))

    def _size(self, stage: int) -> int:
        return self.stages[stage].batch_size

    def _accumulation(self, batch_size: int) -> dict[int, int]:
        """Micro-batches of a step, by the optimizer step from which they hold."""
        check_count("batch_size", batch_size)
        found: dict[int, int] = {}
        steps = done = factor = 0
        for stage in self.stages:
            _check_factor(stage.batch_size, batch_size, "batch sizes that are its multiples")
            before, factor = factor or 1, stage.batch_size // batch_size
            # Trainers end a window where the batches so far are a multiple of the factor.
            unit = math.lcm(before, factor)
            start = max(done, math.ceil(stage.from_samples / batch_size))
            start = math.ceil(start / unit) * unit
            steps, done = steps + (start - done) // before, start
            found[steps] = factor
        return found


def _check_factor(size: int, base: int, expected: str) -> None:
    if size % base:
        raise InputError(
            f"Expected {expected}. Found {size} and {base}. Remedy: round the stages, for "
            "example to powers of two."
        )


def _short(number: int) -> str:
    """The number with a suffix where that is exact: 4000 is 4K, 4096 stays as it is."""
    for size, suffix in _SUFFIXES:
        if number >= size and number % size == 0:
            return f"{number // size}{suffix}"
    return str(number)
