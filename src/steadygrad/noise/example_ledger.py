"""The ledger that all taps of one model write to during a recording."""

import math

import torch
from torch import Tensor

from steadygrad.noise.example_audit import ExampleAudit

__all__ = ["Ledger", "sum_of_squares"]


class Ledger:
    """Sums of the examples' gradients, written by all taps of one model.

    Attributes:
        enabled: Whether forward passes are tapped.
        examples: Number of examples of the recording under way, or ``None``.
        totals: Sum over examples of the squared norms, by parameter.
        hold_all: Whether every layer may be used again after its backward pass.
        held: Examples' gradients that may still grow before they are squared, by parameter.
        audit: The comparison with the gradients received, until it has passed.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.examples: int | None = None
        self.hold_all = False
        self.totals: dict[str, Tensor] = {}
        self.held: dict[str, Tensor] = {}
        self.audit: ExampleAudit | None = ExampleAudit()
        self._scratch: dict[torch.dtype, Tensor] = {}

    def scratch(self, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """Memory to overwrite, kept on CPU: new pages would cost 5% of a training step."""
        if like.device.type != "cpu":
            return None
        known = self._scratch.get(like.dtype)
        if known is None or known.numel() < math.prod(shape):
            self._scratch[like.dtype] = known = like.new_empty(math.prod(shape))
        return known[: math.prod(shape)].view(shape)

    def hold(self, name: str, gradients: Tensor) -> None:
        """Adds one use of a parameter: the norm is that of the sum over its uses."""
        known = self.held.get(name)
        self.held[name] = gradients if known is None else known + gradients

    def settle(self) -> None:
        """Squares the gradients that were held."""
        for name, gradients in self.held.items():
            self.totals[name] = sum_of_squares(gradients)
        self.held = {}


def sum_of_squares(values: Tensor) -> Tensor:
    """The squared Euclidean norm of a tensor, with shape ``()``."""
    flat = values.flatten()
    # BLAS counts in 32 bits.
    return torch.dot(flat, flat) if flat.numel() < 2**31 else torch.linalg.vector_norm(flat) ** 2
