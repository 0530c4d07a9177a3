"""Sources of gradients for an estimator while a model trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad._checks import InputError
from steadygrad.distributed import fsdp_modules
from steadygrad.noise.meters import Meter
from steadygrad.noise.norms import values_of
from steadygrad.noise.passes import PassBorders
from steadygrad.noise.per_example import ExampleNorms
from steadygrad.shards import is_sharded

__all__ = ["AccumulatedSource", "BackwardSource", "ExampleSource", "Source"]


class Source:
    """Feeds a meter the gradient that each part adds to ``.grad``."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._recording, self._enabled = False, True
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """A context around one part's backward pass."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def enable(self, active: bool) -> None:
        """Says whether the passes to come are measured, before their forward passes."""
        self._enabled = active

    def remove(self) -> None:
        """Takes every hook off the model."""
        for handle in self._handles:
            handle.remove()


class BackwardSource(Source):
    """Sees each gradient before it is accumulated: exact in any precision, without a copy.

    A hook on a leaf runs once a backward pass with the summed gradient of all the leaf's uses,
    before it is added to ``.grad`` and before DDP or FSDP2 reduces it. So every rank's micro-batch
    is a part of its own.

    Args:
        model: The model as it is called in training.
        meter: Measures its gradients.
        borders: Finds the passes outside of recordings.
    """

    def __init__(self, model: nn.Module, meter: Meter, borders: PassBorders) -> None:
        super().__init__(meter)
        self._borders = borders
        leaves = enumerate(_leaves_of(model, meter))
        self._handles = [leaf.register_hook(self._hook(slot, leaf)) for slot, leaf in leaves]

    def _hook(self, slot: int, leaf: Tensor) -> Callable[[Tensor], None]:
        borders = self._borders

        def hook(gradient: Tensor) -> None:
            counts = borders.accumulates if self._recording else borders.measured
            if (self._recording or self._enabled) and counts(leaf):
                # It has a history of its own only under create_graph=True.
                self._meter.see(slot, gradient.detach() if gradient.requires_grad else gradient)

        return hook


def _leaves_of(model: nn.Module, meter: Meter) -> list[nn.Parameter]:
    """Leaves that receive the gradients, by slots: with FSDP2 the unsharded ones that it keeps."""
    leaves: dict[str, nn.Parameter] = {}
    for module in fsdp_modules(model) if meter.world.kind == "fsdp" else ():
        module.unshard()  # type: ignore[operator]
        for name, parameter in model.named_parameters():
            if not is_sharded(parameter):
                leaves[name] = parameter
        module.reshard()  # type: ignore[operator]
    return [leaves.get(m.name, m.parameter) for m in meter.measured]


class AccumulatedSource(Source):
    """Takes the difference that each part makes to ``.grad``; costs one copy of the gradients.

    Works for any number of backward passes a part, and for FSDP2's reduced shards, where one part
    is a micro-batch over all processes; each must then synchronise its gradients, and all processes
    have as many samples in it. Differences of 16-bit sums lose digits.

    Raises:
        InputError: For DDP, whose ``.grad`` is local or reduced depending on ``no_sync``.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        if meter.world.kind == "ddp":
            raise InputError(
                "Expected `source='accumulated'` with one process or FSDP2. Found DDP. "
                "Remedy: source='microbatch'."
            )
        self._parameters = [m.parameter for m in meter.measured]
        self._before: list[Tensor | None] = [None] * len(self._parameters)

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """A context around one part's backward passes."""
        if self._meter.is_empty:
            self._before = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        yield
        for slot, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            before = self._before[slot]
            self._meter.see(slot, parameter.grad if before is None else parameter.grad - before)
            self._before[slot] = parameter.grad.clone()


class ExampleSource(Source):
    """Sees every example's own gradient norm, so that each example is a part.

    Args:
        model: The model as it is called in training.
        meter: Measures its gradients.
        norms: The layers' taps.
    """

    def __init__(self, model: nn.Module, meter: Meter, norms: ExampleNorms) -> None:
        super().__init__(meter)
        self._norms, leaves = norms, _leaves_of(model, meter)
        # Examples' norms do not give the gradient's elements, which the witness compares: hooks
        # take them from the leaves.
        self._handles = [
            leaves[slot].register_hook(self._hook(slot)) for slot in meter.witness.slots
        ]

    def _hook(self, slot: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            witness = self._meter.witness
            if self._recording and slot in witness.lines:
                witness.see(slot, values_of(gradient.detach()))

        return hook

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """A context around one micro-batch's backward pass."""
        with super().recording(samples), self._norms.recording(samples):
            yield
        squares = self._norms.pop()
        for slot, measured in enumerate(self._meter.measured):
            if measured.name in squares:
                self._meter.see_norm(slot, squares[measured.name].sqrt())

    def enable(self, active: bool) -> None:
        """Taps the forward passes to come, or leaves them alone."""
        self._norms.enabled = active

    def remove(self) -> None:
        """Takes every hook off the model."""
        super().remove()
        self._norms.remove()
