"""A batch-size schedule, in the forms that training programs read."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from steadygrad._checks import InputError, check_count, check_number, check_type

__all__ = ["BatchSizeSchedule", "Stage"]

_SUFFIXES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


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
        """The batch size after so many samples."""
        check_count("samples", samples, low=0)
        return [s for s in self.stages if s.from_samples <= samples][-1].batch_size

    def to_json(self) -> str:
        """A JSON list of stages."""
        return json.dumps([asdict(stage) for stage in self.stages], indent=2)

    @classmethod
    def from_json(cls, text: str) -> "BatchSizeSchedule":
        """Reads what :meth:`to_json` wrote."""
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
            tokens_per_sample: Sequence length: Megatron counts thresholds in tokens when it is
                told ``--seq-length``. 1 leaves them in samples.
        """
        check_count("tokens_per_sample", tokens_per_sample)
        return " ".join(
            f"{_short(s.from_samples * tokens_per_sample)}:{s.batch_size}" for s in self.stages
        )


def _short(number: int) -> str:
    """The number with a suffix where that is exact: 4000 is 4K, 4096 stays as it is."""
    for size, suffix in _SUFFIXES:
        if number >= size and number % size == 0:
            return f"{number // size}{suffix}"
    return str(number)
