"""Chooses the number of micro-batches from noise scales, with hysteresis."""

import math
from collections.abc import Mapping
from typing import Any

from steadygrad._checks import InputError, check_count, check_number, check_type
from steadygrad.averages import check_state
from steadygrad.noise.estimate import NoiseEstimate

__all__ = ["BatchSizeController"]


class BatchSizeController:
    r"""Follows the noise scale with the gradient-accumulation count.

    The wanted batch size is ``factor`` times the noise scale. The count changes only when the
    data are clear about it:

    - the present batch size lies outside the estimate's interval times ``factor``, so an
      unresolved estimate can raise the batch (towards its lower end) but never lower it;
    - the wanted count differs by at least the share ``hysteresis``;
    - ``patience`` updates have passed since the last change.

    One change at most doubles or halves the count, as early estimates are the least certain.

    Args:
        samples_per_count: Samples that one micro-batch adds to a step, over all processes.
        count: Micro-batches a step to begin with.
        min_count: Fewest micro-batches a step. None: 2, the fewest that one process can measure
            from, or 1 if ``count`` is, which will do with several ranks or from single examples.
        max_count: Most micro-batches a step.
        factor: Batch size over noise scale. Smaller saves samples, larger saves steps.
        hysteresis: Least relative change worth making.
        patience: Updates between two changes.

    Attributes:
        count: Micro-batches a step, now.
    """

    def __init__(
        self,
        samples_per_count: int,
        *,
        count: int = 2,
        min_count: int | None = None,
        max_count: int = 1024,
        factor: float = 1.0,
        hysteresis: float = 0.25,
        patience: int = 2,
    ) -> None:
        self.samples_per_count = check_count("samples_per_count", samples_per_count)
        least = min(2, check_count("count", count)) if min_count is None else min_count
        self.min_count = check_count("min_count", least)
        self.max_count = check_count("max_count", max_count, low=least)
        self.factor = check_number("factor", factor, low=0, low_open=True)
        self.hysteresis = check_number("hysteresis", hysteresis, low=0)
        self.patience = check_count("patience", patience, low=0)
        self.count = check_count("count", count, low=least)
        if count > max_count:
            raise InputError(
                f"Parameter `count` should be at most {max_count}. Found {count}. Remedy: a larger "
                "`max_count`."
            )
        self._waited = self.patience

    @property
    def batch_size(self) -> int:
        """Samples a step, over all processes."""
        return self.count * self.samples_per_count

    def update(self, estimate: NoiseEstimate) -> int:
        """Takes in the whole model's estimate, the same on every process; waits for the device.

        Returns:
            The number of micro-batches for the next steps.

        Raises:
            InputError: If it is not an estimate; nothing changes.
        """
        check_type("estimate", estimate, NoiseEstimate, "hand in what `estimate()` returned")
        self._waited += 1
        goal = self._goal(estimate)
        if goal is None or self._waited <= self.patience:
            return self.count
        count = round(goal / self.samples_per_count)
        count = min(max(count, math.ceil(self.count / 2)), self.count * 2)
        count = min(max(count, self.min_count), self.max_count)
        if abs(count - self.count) >= max(1, self.hysteresis * self.count):
            self.count, self._waited = count, 0
        return self.count

    def _goal(self, estimate: NoiseEstimate) -> float | None:
        """The wanted batch size, or None while the data agree with the present one."""
        low, resolved = float(estimate.low) * self.factor, bool(estimate.resolved)
        # A negative noise estimate gives an upper end near zero. It is an artefact and must not
        # shrink the batch.
        high = float(estimate.high) * self.factor if resolved else math.inf
        if math.isnan(low) or low <= self.batch_size <= high:
            return None
        return float(estimate.value) * self.factor if resolved else low

    def state_dict(self) -> dict[str, Any]:
        """Count and waiting time."""
        return {"count": self.count, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts a saved count back, within this controller's bounds."""
        check_state("state_dict", state, self.state_dict())
        self.count = min(max(state["count"], self.min_count), self.max_count)
        self._waited = state["waited"]
