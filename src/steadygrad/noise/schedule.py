"""Batch sizes by samples seen, as trainers read them, and the learning rates that go with them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from steadygrad._checks import InputError, check_choice, check_count, check_number

__all__ = ["LR_RULES", "BatchSizeSchedule", "Stage", "learning_rate"]

# Power of the batch size that the learning rate follows.
LR_RULES = {"sqrt": 0.5, "linear": 1.0, "constant": 0.0}

_SUFFIXES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def learning_rate(lr: float, batch_size: float, base: float, rule: str = "sqrt") -> float:
    r"""The learning rate that matches a new batch size: :math:`\eta\,(B / B_0)^p`.

    Args:
        lr: Learning rate :math:`\eta` tuned at ``base``.
        batch_size: New batch size :math:`B`, in samples.
        base: Batch size :math:`B_0`, in samples.
        rule: ``"sqrt"`` (:math:`p = 1/2`, for Adam and its kin), ``"linear"`` (:math:`p = 1`, for
            SGD well below the noise scale) or ``"constant"`` (:math:`p = 0`).

    Raises:
        InputError: If there is no such rule.

    References:
        | Accurate, Large Minibatch SGD (Goyal et al., 2017), https://arxiv.org/abs/1706.02677
        | On the SDEs and Scaling Rules for Adaptive Gradient Algorithms (Malladi et al., 2022),
        | https://arxiv.org/abs/2205.10287
    """
    power = LR_RULES[check_choice("rule", rule, LR_RULES)]
    return float(lr * (batch_size / base) ** power)


class Stage(NamedTuple):
    """One stretch of training at one batch size.

    Attributes:
        from_samples: Samples seen when it begins.
        batch_size: Samples a step.
        lr: Learning rate that goes with it, if known.
    """

    from_samples: int
    batch_size: int
    lr: float | None = None


class BatchSizeSchedule:
    """Batch sizes by samples seen.

    Args:
        stages: Stages, or mappings with their fields, in order; the first begins at 0.

    Attributes:
        stages: The stages.

    Raises:
        InputError: If there is none, the first does not begin at 0, they are out of order, or a
            batch size or learning rate is not a positive number.
    """

    def __init__(self, stages: Iterable[Stage | Mapping[str, Any]]) -> None:
        try:
            self.stages = [s if isinstance(s, Stage) else Stage(**s) for s in stages]
        except TypeError as error:
            raise InputError(
                "Parameter `stages` should be a list of stages with `from_samples`, `batch_size` "
                f"and perhaps `lr`. Found another ({error}). Remedy: a Stage, or a dict, for each."
            ) from error
        starts = [check_count("from_samples", s.from_samples, low=0) for s in self.stages]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise InputError(
                "Parameter `stages` should begin at 0 and be in rising order. Found beginnings "
                f"{starts}. Remedy: sort them by `from_samples`, and let the first begin at 0."
            )
        for stage in self.stages:
            check_count("batch_size", stage.batch_size)
            if stage.lr is not None:
                check_number("lr", stage.lr, low=0, low_open=True)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def batch_size(self, samples: int) -> int:
        """The batch size after a number of samples."""
        check_count("samples", samples, low=0)
        return [s for s in self.stages if s.from_samples <= samples][-1].batch_size

    def to_json(self) -> str:
        """A JSON list of the stages' fields, of which a schedule can be made again."""
        return json.dumps([stage._asdict() for stage in self.stages], indent=2)

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

        The callback takes integer factors from stage to stage only, and multiplies the learning
        rate by the square root of each growth itself.

        Args:
            tokens_per_sample: Sequence length.
        """
        check_count("tokens_per_sample", tokens_per_sample)
        # It refuses one batch size twice in a row.
        before = [None, *(s.batch_size for s in self.stages)]
        kept = [s for s, size in zip(self.stages, before, strict=False) if s.batch_size != size]
        sizes = [s.batch_size * tokens_per_sample for s in kept]
        starts = ", ".join(f"Duration.tokens({s.from_samples * tokens_per_sample})" for s in kept)
        call = f"    batch_sizes={sizes},\n    schedule=[{starts}],"
        return f"BatchSizeSchedulerCallback(\n{call}\n)"


def _short(number: int) -> str:
    """The number with a suffix where that is exact: 4000 is 4K, 4096 stays as it is."""
    for size, suffix in _SUFFIXES:
        if number >= size and number % size == 0:
            return f"{number // size}{suffix}"
    return str(number)
