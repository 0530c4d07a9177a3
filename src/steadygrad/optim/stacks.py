"""Batches of same-shape parameters, and stacks of which their states are views."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.shards import is_sharded, local

__all__ = [
    "Batch",
    "BatchState",
    "check_result",
    "common_stack",
    "kind_of",
    "laid_out_as",
]


class BatchState(Mapping[str, Tensor]):
    """A batch's state by name: tensors with shape ``[n, ...]``.

    Reading gives the stack itself: what is done to it in place is done to the state. Assigning a
    tensor of the same leading dimension stores its rows as the members' states when the block of
    ``batched_params`` ends; until then reading gives the assigned tensor.
    """

    def __init__(self, stacks: dict[str, Tensor], size: int) -> None:
        self.stacks = stacks
        self._size = size
        self.fill: Callable[[str], Tensor | None] | None = None
        self._assigned: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._assigned:
            return self._assigned[name]
        if name not in self.stacks:
            found = self.fill(name) if self.fill is not None else None
            if found is None:
                raise KeyError(
                    f"Expected the name of a state. Found {name!r}; known are {list(self)}. "
                    "Remedy: return it from `init_state`, or assign it first."
                )
            self.stacks[name] = found
        return self.stacks[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.check(name, value)
        self._assigned[name] = value

    def __iter__(self) -> Iterator[str]:
        return iter({**self.stacks, **self._assigned})

    def __len__(self) -> int:
        return len({**self.stacks, **self._assigned})

    def check(self, name: str, value: object) -> None:
        """Raises InputError unless ``value`` is a tensor with a row for each member."""
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or value.ndim < 1 or value.shape[0] != self._size:
            raise InputError(
                f"Expected state {name!r} to be a tensor with leading dimension {self._size}, one "
                f"row for each parameter. Found {found}. Remedy: torch.full(({self._size},), x) "
                "for a scalar x of each; a number that all share belongs into the group."
            )

    def pop_assigned(self, batches: "Sequence[Batch]") -> list[tuple[str, Tensor]]:
        """Takes out the assigned tensors, as copies where they lie in any batch's stacks."""
        found, self._assigned = list(self._assigned.items()), {}
        stacks = [stack for batch in batches for stack in batch.state.stacks.values()]
        homes = {stack.untyped_storage()._cdata for stack in stacks}
        return [
            (name, value.clone())
            if value is not self.stacks.get(name) and value.untyped_storage()._cdata in homes
            else (name, value)
            for name, value in found
        ]


@dataclass(eq=False)
class Batch:
    """Same-shape parameters of one group, stacked.

    Attributes:
        param: The parameters, with shape ``[n, *shape]``: a copy, to be changed in place or
            assigned anew.
        grad: Gradients of the parameters, with the same shape; zeros where a gradient is None. A
            copy too.
        state: State of the parameters, stacked likewise.
        names: Names of the parameters; ``params.3`` for the group's fourth parameter where it has
            none.
        params: The parameters themselves.
        parts: The same, or this process's parts of DTensors.
        has_grad: Which of them have a gradient, on the host.
    """

    param: Tensor
    grad: Tensor
    state: BatchState
    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    parts: tuple[Tensor, ...]
    has_grad: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.params)


def common_stack(rows: Sequence[Tensor]) -> Tensor | None:
    """The one tensor whose rows these are, in this order; None if they are not.

    It goes by addresses, not by a list kept aside, so that it also finds stacks that were copied
    or read from a file as a whole.
    """
    first = rows[0]
    home, start, size = first.untyped_storage()._cdata, first.storage_offset(), first.numel()
    for i, row in enumerate(rows):
        if (
            row.storage_offset() != start + i * size
            or row.untyped_storage()._cdata != home
            or not row.is_contiguous()
        ):
            return None
    return first.as_strided((len(rows), *first.shape), (size, *first.stride()), start)


def laid_out_as(parameter: Tensor, row: Tensor) -> Tensor:
    """The row as it is, or as this process's part of a DTensor laid out as the parameter."""
    if not is_sharded(parameter) or row.shape != local(parameter.detach()).shape or not row.ndim:
        return row
    sharded: Any = parameter.detach()
    return type(sharded).from_local(  # type: ignore[no-any-return]
        row,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, type and device, which tensors that are stacked must have in common."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


def check_result(batch: Batch) -> None:
    """Raises InputError unless the parameters can be written back as the block has left them."""
    expected = (len(batch), *batch.parts[0].shape)
    if not isinstance(batch.param, Tensor) or tuple(batch.param.shape) != expected:
        found = getattr(batch.param, "shape", type(batch.param).__name__)
        raise InputError(
            f"Expected `batch.param` of shape {expected} when the block ends. Found {found}. "
            "Remedy: change it in place, or assign a tensor of its own shape."
        )
