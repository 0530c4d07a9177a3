"""Batch sizes by samples seen, as trainers read them, and the learning rates that go with them."""

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from steadygrad._checks import InputError, check_choice, check_count, check_number

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


class BatchSizeSchedule:
    """Batch sizes by samples seen.

    Args:
        stages: Mappings, in order, with ``from_samples`` (samples seen when the stage begins; the
            first begins at 0), ``batch_size`` (samples a step) and perhaps ``lr`` (the learning
            rate that goes with it).

    Attributes:
        stages: The stages, each a dict of the three; ``lr`` is None where it is not known.

    Raises:
        InputError: If there is none, the first does not begin at 0, they are out of order, or a
            batch size or learning rate is not a positive number.
    """

    def __init__(self, stages: Iterable[Mapping[str, Any]]) -> None:
        try:
            self.stages = [_stage(**stage) for stage in stages]
        except TypeError as error:
            raise InputError(
                "Parameter `stages` should be a list of dicts with `from_samples`, `batch_size` "
                f"and perhaps `lr`. Found another ({error}). Remedy: such a dict for each stage."
            ) from error
        starts = [stage["from_samples"] for stage in self.stages]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise InputError(
                "Parameter `stages` should begin at 0 and be in rising order. Found beginnings "
                f"{starts}. Remedy: sort them by `from_samples`, and let the first begin at 0."
            )

    def batch_size(self, samples: int) -> int:
        """The batch size after a number of samples."""
        check_count("samples", samples, low=0)
        return [s["batch_size"] for s in self.stages if s["from_samples"] <= samples][-1]  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """A JSON list of the stages' fields, of which a schedule can be made again."""
        return json.dumps(self.stages, indent=2)

    def to_megatron(self, tokens_per_sample: int = 1) -> str:
        """The text that Megatron's ``--step-batch-size-schedule`` takes, as ``0:768 250B:1536``.

        Args:
            tokens_per_sample: Sequence length: Megatron counts thresholds in tokens if
                ``--seq-length`` is given. 1 leaves them in samples.
        """
        check_count("tokens_per_sample", tokens_per_sample)
        return " ".join(
            f"{_short(s['from_samples'] * tokens_per_sample)}:{s['batch_size']}"
            for s in self.stages
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
        kept = [next(same) for _, same in groupby(self.stages, key=lambda s: s["batch_size"])]
        sizes = [s["batch_size"] * tokens_per_sample for s in kept]
        places = (s["from_samples"] * tokens_per_sample for s in kept)
        starts = ", ".join(f"Duration.tokens({place})" for place in places)
        call = f"    batch_sizes={sizes},\n    schedule=[{starts}],"
        return f"BatchSizeSchedulerCallback(\n{call}\n)"


def _stage(from_samples: int, batch_size: int, lr: float | None = None) -> dict[str, Any]:
    check_count("from_samples", from_samples, low=0)
    check_count("batch_size", batch_size)
    if lr is not None:
        check_number("lr", lr, low=0, low_open=True)
    return {"from_samples": from_samples, "batch_size": batch_size, "lr": lr}


def _short(number: int) -> str:
    """The number with a suffix where that is exact: 4000 is 4K, 4096 stays as it is."""
    for size, suffix in _SUFFIXES:
        if number >= size and number % size == 0:
            return f"{number // size}{suffix}"
    return str(number)
