"""A check that the examples' gradients of each parameter add up to the parameter's own."""

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from steadygrad._checks import InputError

__all__ = ["ExampleAudit"]

# Relative to the larger of the gradient and its examples: far above rounding, far below what a
# use of the weight outside its layer contributes.
_TOLERANCE = 1e-2
_TOLERANCE_HALF = 1e-1


class ExampleAudit:
    """Compares the sum over examples with the gradient that arrives at the leaf.

    It finds what a layer's forward hook cannot see: a weight that is also used by itself
    (``F.linear(x, embedding.weight)``, a penalty on the weights), or another hook that changes
    gradients. Leaf hooks see the local gradient before DDP or FSDP2 reduces it.
    """

    def __init__(self) -> None:
        self.active = False
        self._expected: dict[str, Tensor] = {}
        self._received: dict[str, Tensor] = {}
        self._coarse: set[str] = set()
        self._handles: dict[tuple[str, int], RemovableHandle] = {}

    def watch(self, name: str, weight: Tensor) -> None:
        """Notes the gradient that a layer's weight receives in the next recording."""

        def note(gradient: Tensor) -> None:
            if self.active:
                _accumulate(self._received, name, gradient.detach())

        if weight.requires_grad and (name, id(weight)) not in self._handles:
            self._handles[name, id(weight)] = weight.register_hook(note)

    def expect(self, name: str, gradient: Tensor, dtype: torch.dtype) -> None:
        """Notes the sum over examples of one use of a parameter, in a layer of that dtype."""
        if dtype.itemsize < 4:
            self._coarse.add(name)
        _accumulate(self._expected, name, gradient.detach())

    def passes(self, totals: dict[str, Tensor]) -> bool:
        """Whether everything was compared and agreed; ``False`` asks for another round.

        Args:
            totals: The sum of the examples' squared norms, by parameter.

        Raises:
            InputError: If a parameter received something else.
        """
        names = [name for name in self._expected if name in self._received]
        figures = [self._compare(name, totals[name]) for name in names]
        # The only host synchronisation of the measurement, once in a run.
        rows = torch.stack(figures).tolist() if figures else []
        for name, (error, scale, tolerance) in zip(names, rows, strict=True):
            if error > tolerance**2 * scale:
                raise InputError(
                    f"Expected the gradient of `{name}` to be the sum of its layer's examples. "
                    f"Found a relative difference of {(error / scale) ** 0.5:.2g}: the parameter "
                    "is also used outside its layer's forward (as in F.linear(x, "
                    "embedding.weight), or in a penalty), or a hook changes its gradient. Remedy: "
                    "call a layer that shares the parameter, or source='microbatch'."
                )
        # After an overflow, or an empty batch, nothing has been compared.
        seen = [0 < scale < float("inf") for _, scale, _ in rows]
        return bool(seen) and all(seen)

    def forget(self) -> None:
        """Ends a round."""
        self.active, self._expected, self._received = False, {}, {}

    def close(self) -> None:
        """Takes every hook off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def _compare(self, name: str, total: Tensor) -> Tensor:
        received, expected = self._received[name], self._expected[name]
        half = name in self._coarse or received.dtype.itemsize < 4
        received = received.to_dense() if received.is_sparse else received
        error = (received.double() - expected.double()).square().sum()
        scale = received.double().square().sum() + total.double()
        tolerance = error.new_tensor(_TOLERANCE_HALF if half else _TOLERANCE)
        return torch.stack([error, scale, tolerance]).cpu()


def _accumulate(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    known = sums.get(name)
    sums[name] = value if known is None else known + value
