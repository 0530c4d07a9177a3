"""Float32 masters of 16-bit parameters.

A master holds the digits that a 16-bit weight cannot. When other code writes to the weights (a
checkpoint is loaded, an average is swapped in for an evaluation and out again), the masters must
follow. Every step compares: where a weight no longer equals its rounded master, the master takes
the weight's value; elsewhere it keeps all its digits. torch's version counters cannot replace the
comparison, because writes through ``parameter.data`` do not change them.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MASTER", "ensure_master", "round_masters", "sync_masters", "wants_master"]

MASTER = "master_weight"


def wants_master(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a parameter has a master."""
    narrow = parameter.dtype in (torch.float16, torch.bfloat16)
    return narrow and group["master_weights"] is not False


def ensure_master(
    parameter: Tensor, state: MutableMapping[str, Any], group: Mapping[str, Any]
) -> None:
    """Makes or drops a master where the model was cast, or the option changed, since."""
    if (MASTER in state) == wants_master(parameter, group):
        return
    if state.pop(MASTER, None) is None:
        state[MASTER] = parameter.detach().to(torch.float32)


def sync_masters(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Copies values that were written to parameters into their masters, element by element.

    Args:
        parameters: Local 16-bit parameters.
        masters: Local masters of the parameters.
    """
    for own, master in zip(parameters, masters, strict=True):
        # Bits, because the CPU compares integers much faster than 16-bit floats.
        unchanged = master.to(own.dtype).view(torch.int16) == own.view(torch.int16)
        # Written in place: less memory at a time than the two temporaries of a step.
        torch.where(unchanged, master, own, out=master)


def round_masters(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Rounds masters to their parameters, both local."""
    for own, master in zip(parameters, masters, strict=True):
        own.copy_(master)
