"""What a step works on: plain local tensors, gathered from parameters, gradients and state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadygrad.optim.checks import dense_gradient
from steadygrad.sharding import aligned_locals, local

if TYPE_CHECKING:
    from steadygrad.optim.fused import Fused

__all__ = ["Leaves", "Scaling", "buckets_of", "local_grads"]


@dataclass(frozen=True)
class Leaves:
    """Parameters of one group that take the same path: one device, one working type.

    Attributes:
        group: The group, for its options.
        params: The parameters as the user holds them.
        weights: This process's parts, or their float32 masters'.
        grads: This process's parts of the gradients, zeros for None.
        states: The parameters' states.
        numels: Elements over all shards.
        buckets: Indices of parameters that are worked on together.
        fused: The same for compiled loops; gradients and buckets are empty then.
    """

    group: dict[str, Any]
    params: list[Tensor]
    weights: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    numels: list[int]
    buckets: list[list[int]]
    fused: "Fused | None" = None

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.weights[0].device

    def column(self, name: str) -> Tensor:
        """A small state of all of them, stacked along the first axis."""
        return torch.stack([state[name] for state in self.states])

    def put_column(self, name: str, values: Tensor) -> None:
        """Writes it back."""
        torch._foreach_copy_([state[name] for state in self.states], list(values.unbind()))

    def locals(self, name: str) -> list[Tensor]:
        """This process's parts of a large state."""
        return [local(state[name]) for state in self.states]


@dataclass(frozen=True)
class Scaling:
    """What a gradient scaler has left to the optimizer.

    Attributes:
        inverse: One over the loss scale still in the gradients, with shape ``()``; None: none.
        found_inf: Positive where a scaler has found a non-finite gradient; None: nobody looked.
    """

    inverse: Tensor | None
    found_inf: Tensor | None

    def ok(self, finite: Sequence[Tensor]) -> Tensor:
        """Whether a step is to be taken, with shape ``()``.

        Args:
            finite: Whether some of the gradients are finite, each with shape ``()``.
        """
        device = finite[0].device
        flags = [flag.to(device) for flag in finite]
        if self.found_inf is not None:
            flags.append((self.found_inf == 0).to(device).reshape(()))
        return flags[0] if len(flags) == 1 else torch.stack(flags).all()

    def factor(self, device: torch.device, maximize: bool) -> Tensor:
        """What to multiply gradients by, with shape ``()``."""
        sign = torch.full((), -1.0 if maximize else 1.0, dtype=torch.float64, device=device)
        return sign if self.inverse is None else sign * self.inverse.to(device).reshape(())


def local_grads(parameters: Sequence[Tensor]) -> list[Tensor]:
    """This process's parts of the gradients; a zero that takes no memory for each None."""
    return aligned_locals([dense_gradient(p) for p in parameters], parameters)


# Elements that are worked on together even where no parameter has as many.
BUCKET = 2**20


def buckets_of(weights: Sequence[Tensor]) -> list[list[int]]:
    """Consecutive parameters that together are no larger than the largest of all, or ``BUCKET``.

    A multi-tensor call makes a temporary for each of its tensors: so the temporaries of a bucket
    are no more than the largest parameter's would be alone, or 4 MB. On a CPU a bucket is to fit
    into the caches, and a large parameter is one of its own.
    """
    buckets: list[list[int]] = []
    sizes = [weight.numel() for weight in weights]
    largest = BUCKET if weights[0].device.type == "cpu" else max(*sizes, BUCKET)
    room = -1
    for index, size in enumerate(sizes):
        if size > room or not buckets:
            buckets.append([])
            room = largest
        buckets[-1].append(index)
        room -= size
    return buckets
