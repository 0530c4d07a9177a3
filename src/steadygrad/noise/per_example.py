"""Exact squared gradient norms of single examples, during the ordinary backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_count
from steadygrad.noise.example_taps import Ledger, Tap
from steadygrad.noise.layer_rules import measured_layers

__all__ = ["ExampleNorms"]

# A parameter whose gradient stays exactly zero gives an audit nothing to compare.
_MOST_AUDITS = 8

_Received = list[tuple[str, Tensor | None, int]]


class ExampleNorms(Ledger):
    """Taps every layer so that a backward pass leaves its examples' squared gradient norms.

    A forward hook wraps each layer's output in an identity whose backward pass sees the layer's
    input and output gradient. No gradient changes.

    An example is an entry of every layer's leading dimension. A weight shared by several layers,
    or a layer called several times, holds its examples' gradients (``B`` times its size) until
    the pass is over. The first recording is audited, at the price of one host synchronisation
    (up to eight, while a gradient is exactly zero or not finite): each parameter must receive the
    sum of its examples' gradients. Layers inside a
    ``torch.compile``'d region cannot be seen, which is an error, not a zero.

    Args:
        model: The model as it is called in training: plain, in DDP, or after ``fully_shard``.
        layers: ``"all"``, or ``"norm"`` for LayerNorm and RMSNorm only.

    Attributes:
        parameter_names: The measured parameters, as ``model.named_parameters()`` names them.

    Raises:
        InputError: If a trainable parameter is in a layer of an unsupported type; no hook is
            left behind.

    References:
        | Normalization Layer Per-Example Gradients are Sufficient to Predict Gradient Noise
          Scale in Transformers (Gray et al., 2024)
        | https://arxiv.org/abs/2411.00999
    """

    def __init__(self, model: nn.Module, layers: str = "all") -> None:
        found = measured_layers(model, layers)
        super().__init__()
        names = [name for layer in found for name in layer.parameters.values()]
        self.parameter_names = list(dict.fromkeys(names))
        self._done: dict[str, Tensor] = {}
        self._recordings = 0
        self._taps = [Tap(layer, self) for layer in found]

    @contextmanager
    def recording(self, num_examples: int) -> Iterator[None]:
        """Measures the backward passes inside; their forward passes may lie before it.

        A recording that ends in an error leaves nothing behind.

        Args:
            num_examples: The size of every layer's leading dimension.

        Raises:
            InputError: If a layer has no such dimension, received a gradient without being
                called, or received another one than its examples' sum.
            RuntimeError: If a recording is under way already, or a layer is called again after
                its norms were taken.
        """
        check_count("num_examples", num_examples, low=0)
        if self.examples is not None:
            raise RuntimeError(
                "Expected one recording at a time. Found one inside another. "
                "Remedy: leave the first before the second is entered."
            )
        before = [tap.received() for tap in self._taps]
        self.examples = num_examples
        if self.audit is not None:
            self.audit.active = True
        try:
            yield
            self._finish(before)
        finally:
            self.examples, self.totals, self.held = None, {}, {}
            if self.audit is not None:
                self.audit.forget()
            for tap in self._taps:
                tap.reset()

    def pop(self) -> dict[str, Tensor]:
        r"""Returns the records since the last call, and forgets them.

        Returns:
            For each parameter that received a gradient, :math:`\sum_i \|h_i\|^2` with shape
            ``()``, where :math:`h_i` is example i's part of the gradient, divided by nothing.
        """
        done, self._done = self._done, {}
        return done

    def remove(self) -> None:
        """Takes every hook off the model."""
        for tap in self._taps:
            tap.remove()
        if self.audit is not None:
            self.audit.close()

    def _finish(self, before: list[_Received]) -> None:
        for name, gradients in self.held.items():
            self.totals[name] = torch.linalg.vector_norm(gradients).square()
        if self.enabled:
            for tap, state in zip(self._taps, before, strict=True):
                _refuse_unseen(tap, state, self.totals)
        self._recordings += 1
        if self.audit is not None and (
            self.audit.passes(self.totals) or self._recordings >= _MOST_AUDITS
        ):
            self.audit.close()
            self.audit = None
        for name, value in self.totals.items():
            self._done[name] = self._done[name] + value if name in self._done else value


def _refuse_unseen(tap: Tap, before: _Received, totals: dict[str, Tensor]) -> None:
    """A gradient that came past the tap: the layer's weight was used without the layer."""
    if tap.fired:
        return
    for (name, old, old_version), (_, new, version) in zip(before, tap.received(), strict=True):
        if name not in totals and (new is not old or version != old_version):
            kind = type(tap.layer.module).__name__
            raise InputError(
                f"Expected layer `{tap.layer.name}` ({kind}) to be called where its forward hooks "
                f"run. Found a gradient of `{name}` without such a call: the layer is inside a "
                "torch.compile'd region, or its weight is used directly. "
                "Remedy: source='microbatch', or measure before compiling."
            )
