"""Norms of gradients by parameter and by group: of whole gradients, however they are sharded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steadygrad._names import plain_name
from steadygrad.numerics import exact, square_sums
from steadygrad.shards import PackedSum, aligned
from steadygrad.watch.passes import values

__all__ = ["GradientNorms", "gradient_norms"]


@dataclass(frozen=True)
class GradientNorms:
    """Norms of gradients; reading them waits for the device.

    Attributes:
        names: Parameters that have a gradient on this process.
        groups: Groups of the parameters.
        squares: Squares of their norms, float64, with shape ``(len(names),)``.
    """

    names: Sequence[str]
    groups: Sequence[str]
    squares: Tensor

    @property
    def total(self) -> float:
        """The norm of all gradients together."""
        return float(self.squares.sum().sqrt())

    @property
    def by_parameter(self) -> Mapping[str, float]:
        """The norm of each parameter's gradient."""
        return dict(zip(self.names, self.squares.sqrt().tolist(), strict=True))

    @property
    def by_group(self) -> Mapping[str, float]:
        """The norm of each group's gradients together."""
        sums = dict.fromkeys(self.groups, 0.0)
        for group, square in zip(self.groups, self.squares.tolist(), strict=True):
            sums[group] += square
        return {group: total**0.5 for group, total in sums.items()}


def gradient_norms(
    model: nn.Module,
    group_of: Callable[[str], str] | None = None,
    shard_sum: PackedSum | None = None,
) -> GradientNorms:
    """Takes the norms of the gradients as they are now, in one collective for each mesh.

    Under sharding every process of the mesh must call it. A norm of a DTensor's local part, which
    ``.item()`` reads from a partial sum, would be too small by the root of the number of shards.
    Gradients that are laid out otherwise than their parameters are redistributed first.

    Args:
        model: The model.
        group_of: Gives a parameter's group by its name. Default: the part of the model, a child or
            an item of a list of modules.
        shard_sum: That of the model's parameters; making it takes a collective more.
    """
    names = [plain_name(name) for name, _ in model.named_parameters()]
    parameters = [*model.parameters()]
    device = parameters[0].device if parameters else torch.device("cpu")
    squares = torch.zeros(len(names), dtype=exact(device), device=device)
    found = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
    present = [*found]
    if present:
        # A sparse one may have several parts of a row.
        dense = [g.coalesce() if g.is_sparse else g for g in found.values()]
        gradients = [values(aligned(g, parameters[i])) for i, g in zip(found, dense, strict=True)]
        squares[present] = square_sums(gradients, squares.dtype)
    # All parameters travel, those without a gradient as zeros: one length on every process.
    squares = (shard_sum or PackedSum(parameters)).of_all(squares[None])[0]
    names = [names[i] for i in present]
    return GradientNorms(names, [(group_of or _part)(name) for name in names], squares[present])


def _part(name: str) -> str:
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first
