"""Whether an optimizer's steps are for an accelerator's kernels, and the job they are handed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad import kernels
from steadygrad.optim import device_parts
from steadygrad.optim.device_job import DeviceJob

__all__ = ["DeviceSteps"]


class DeviceSteps:
    """The choice for one optimizer: kernels take all of its parameters, or none.

    Args:
        optimizer: Its class's name, for the warning.
        kind: Name of the class that drives its kernels.
    """

    def __init__(self, optimizer: str, kind: str) -> None:
        self._optimizer = optimizer
        self._kind: type[DeviceJob] = getattr(device_parts, kind)
        self._job: DeviceJob | None = None

    def job(
        self, groups: Sequence[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> DeviceJob | None:
        """What to hand to the kernels; None: this step is not for them."""
        # Only who asks for them: no device has timed them beside the multi-tensor path yet.
        wanted = [bool(group["fused"]) for group in groups]
        if not any(wanted):
            return None
        found: str | None = "it is for all of an optimizer's groups, or for none"
        if all(wanted):
            found = kernels.missing_on_device() or self._find(groups, states)
        if found is None:
            return self._job
        if any(group["fused"] for group in groups):
            kernels.warn_once(self._optimizer, found)
        return None

    def _find(
        self, groups: Sequence[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]
    ) -> str | None:
        """Makes a job if the last one is none any more; or says why there is none."""
        same = self._job is not None and self._job.holds(groups, states)
        if self._job is None or not same or self._job.prepared != self._job.variant():
            job, self._job = self._job if same else None, None
            found = self._kind.can_take(groups, states)
            if found is not None:
                return found
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return "a step outside of CUDA graphs must come before the first one in them"
            job = job or self._kind(groups, states)
            try:
                job.prepare()
            except Exception as error:
                # Whatever a compiler may raise on a machine nobody has seen: nothing is written.
                kernels.give_up_device(self._optimizer, error)
                return kernels.missing_on_device()
            self._job = job
        if not self._job.table.ready:
            return "too many CUDA graphs have been recorded since the last step outside of them"
        return None
