"""Counts of the steps that are skipped."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.numerics import HostCopy
from steadygrad.optim.checks import is_capturing
from steadygrad.optim.passes import tensor_of


class SkipMonitor:
    """Counter of skipped steps in a row, for which the host does not wait.

    On an accelerator the count of skipped steps is copied to the host now and then, and read
    one interval later: the warning comes after at most twice as many steps.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_a_row = self._steps = 0
        self._copied: HostCopy | None = None
        self._last = torch.nan

    def count(self, ok: Any, states: Iterable[Mapping[str, Any]], limit: int | None) -> None:
        """Counts a step if it was skipped, and warns at the limit; None: never."""
        ok = ok.numpy() if _is_plain(ok) and ok.device.type == "cpu" else ok
        on_host = not isinstance(ok, Tensor)
        if on_host and ok:
            self._in_a_row = 0
            return
        # Without a look-up by parameter: on accelerators this is done in every step.
        counts = {id(state["skipped"]): state["skipped"] for state in states}
        for count in counts.values():
            count.add_(tensor_of(~ok).to(count.device))
        if not (on_host or _is_plain(ok)) or limit is None or limit < 1 or is_capturing():
            return
        if on_host:
            self._in_a_row += 1
            is_due = self._in_a_row == limit
        else:
            self._steps += 1
            own = next((c for c in counts.values() if c.device == ok.device), None)
            is_time = self._steps % limit == 1 % limit
            is_due = is_time and own is not None and self._skips_of_an_interval(own) >= limit
        if is_due:
            warnings.warn(
                f"Expected finite gradients in {self._name}. Found none in {limit} steps in a row, "
                "which were skipped. Remedy: diagnostics() between backward and zero_grad names "
                f"the parameters; {self._name}.warn_after_skips says after how many steps to warn.",
                stacklevel=2,
            )

    def _skips_of_an_interval(self, skipped: Tensor) -> float:
        """Skipped steps of the last interval that the host knows; copies the count of this one."""
        # Without both counts the skips of an interval are unknown.
        before, self._last = self._last, torch.nan
        if self._copied is not None and self._copied.event.query():
            self._last = float(self._copied.numbers)
        self._copied = HostCopy(skipped)
        return self._last - before


def _is_plain(ok: Any) -> bool:
    """Whether a tensor can be read: not one of a wrapper's type, on `meta` or of a graph."""
    return type(ok) is Tensor and not ok.is_meta and not torch.compiler.is_compiling()
