"""Counts of the steps that are skipped."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.numerics import HostCopy
from steadygrad.optim.checks import is_capturing


class SkipMonitor:
    """Counts skipped steps in a row; the host does not wait for an accelerator.

    On an accelerator the count of skipped steps is copied to the host now and then, and read
    one interval later: the warning comes after at most twice as many steps.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_a_row = self._steps = 0
        self._copied: HostCopy | None = None
        self._last: float | None = None

    def count(self, ok: Tensor, states: Iterable[Mapping[str, Any]], limit: int | None) -> None:
        """Counts a step if it was skipped, and warns at the limit; None: never."""
        # With gradients of a wrapper type `ok` has that type and cannot be read.
        readable = type(ok) is Tensor and not (torch.compiler.is_compiling() or ok.is_meta)
        on_host = readable and ok.device.type == "cpu"
        if on_host and bool(ok.numpy()):
            self._in_a_row = 0
            return
        # Without a look-up by parameter: on accelerators this is done in every step.
        counts = {id(state["skipped"]): state["skipped"] for state in states}
        for count in counts.values():
            count.add_((~ok).to(count.device))
        if not readable or limit is None or limit < 1 or is_capturing():
            return
        if on_host:
            self._in_a_row += 1
            if self._in_a_row == limit:
                self._warn(limit)
        else:
            self._steps += 1
            if self._steps % limit == 1 % limit:
                for own in [c for c in counts.values() if c.device == ok.device][:1]:
                    self._look(own, limit)

    def _look(self, skipped: Tensor, limit: int) -> None:
        """Compares the count of an interval ago with the one before it, and copies this one."""
        before, self._last = self._last, None
        if self._copied is not None and self._copied.event.query():
            self._last = float(self._copied.numbers)
            # Without the count of the interval before, the skips of this interval are unknown.
            if before is not None and self._last - before >= limit:
                self._warn(limit)
        self._copied = HostCopy(skipped)

    def _warn(self, limit: int) -> None:
        warnings.warn(
            f"Expected finite gradients in {self._name}. Found none in {limit} steps in a row, "
            "which were skipped. Remedy: diagnostics() between backward and zero_grad names the "
            f"parameters; {self._name}.warn_after_skips says after how many steps to warn.",
            stacklevel=2,
        )
