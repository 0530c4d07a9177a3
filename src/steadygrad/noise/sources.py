"""Sources of gradients for an estimator while a model trains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad._checks import InputError
from steadygrad.noise.meters import Measured, Meter
from steadygrad.noise.norms import values_of
from steadygrad.noise.passes import PassBorders
from steadygrad.noise.per_example import ExampleNorms
from steadygrad.sharding import World, fsdp_modules, is_sharded

__all__ = [
    "AccumulatedSource",
    "BackwardSource",
    "ExampleSource",
    "Source",
    "leaves_of",
]


class Source(ABC):
    """Feeds a meter the gradient that each part adds to ``.grad``."""

    @abstractmethod
    def recording(self, samples: int) -> AbstractContextManager[None]:
        """A context around one part's backward pass."""

    def enable(self, active: bool) -> None:  # noqa: B027  # without hooks there is nothing to do
        """Says whether the passes to come are measured, before their forward passes."""

    def remove(self) -> None:  # noqa: B027
        """Takes every hook off the model."""


class BackwardSource(Source):
    """Sees each gradient before it is accumulated: exact in any precision, without a copy.

    A hook on a leaf runs once a backward pass with the summed gradient of all the leaf's uses,
    before it is added to ``.grad`` and before DDP or FSDP2 reduces it. So every rank's micro-batch
    is a part of its own.

    Args:
        leaves: What gradients flow into, by slots.
        meter: Measures them.
        borders: Finds the passes outside of recordings.
    """

    def __init__(self, leaves: list[nn.Parameter], meter: Meter, borders: PassBorders) -> None:
        self._meter, self._borders = meter, borders
        self._recording, self._enabled = False, True
        self._handles: list[RemovableHandle] = [
            leaf.register_hook(self._hook(slot, leaf)) for slot, leaf in enumerate(leaves)
        ]

    def _hook(self, slot: int, leaf: Tensor) -> Callable[[Tensor], None]:
        borders = self._borders

        def hook(gradient: Tensor) -> None:
            counts = borders.accumulates if self._recording else borders.measured
            if (self._recording or self._enabled) and counts(leaf):
                # It has a history of its own only under create_graph=True.
                self._meter.see(slot, gradient.detach() if gradient.requires_grad else gradient)

        return hook

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """A context around one part's backward pass."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def enable(self, active: bool) -> None:
        """Looks for passes outside of recordings, or leaves them alone."""
        self._enabled = active

    def remove(self) -> None:
        """Takes every hook off the model."""
        for handle in self._handles:
            handle.remove()


def leaves_of(model: nn.Module, measured: list[Measured], world: World) -> list[nn.Parameter]:
    """Leaves that receive the gradients: with FSDP2 the unsharded parameters that it keeps."""
    unsharded = _unsharded(model) if world.kind == "fsdp" else {}
    return [unsharded.get(m.name, m.parameter) for m in measured]


def _unsharded(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that FSDP2 computes with, by name; gathers every module once."""
    leaves: dict[str, nn.Parameter] = {}
    for module in fsdp_modules(model):
        module.unshard()  # type: ignore[operator]
        for name, parameter in model.named_parameters():
            if not is_sharded(parameter):
                leaves[name] = parameter
        module.reshard()  # type: ignore[operator]
    return leaves


class AccumulatedSource(Source):
    """Takes the difference that each part makes to ``.grad``; costs one copy of the gradients.

    Works for any number of backward passes a part, and for FSDP2's reduced shards, where one part
    is a micro-batch over all processes; each must then synchronise its gradients, and all processes
    have as many samples in it. Differences of 16-bit sums lose digits.

    Args:
        measured: The parameters to watch.
        meter: Measures them.
        world: The processes that train together.

    Raises:
        InputError: For DDP, whose ``.grad`` is local or reduced depending on ``no_sync``.
    """

    def __init__(self, measured: list[Measured], meter: Meter, world: World) -> None:
        if world.kind == "ddp":
            raise InputError(
                "Expected `source='accumulated'` with one process or FSDP2. Found DDP. "
                "Remedy: source='microbatch'."
            )
        self._meter = meter
        self._parameters = [m.parameter for m in measured]
        self._before: list[Tensor | None] = [None] * len(measured)

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
        norms: The layers' taps.
        measured: The parameters they measure.
        leaves: What gradients flow into, by slots.
        meter: Measures them.
    """

    def __init__(
        self,
        norms: ExampleNorms,
        measured: list[Measured],
        leaves: list[nn.Parameter],
        meter: Meter,
    ) -> None:
        self._norms, self._measured, self._meter = norms, measured, meter
        self._recording = False
        # Examples' norms do not give the gradient's elements, which the witness compares: hooks
        # take them from the leaves.
        self._handles: list[RemovableHandle] = [
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
        self._recording = True
        try:
            with self._norms.recording(samples):
                yield
        finally:
            self._recording = False
        squares = self._norms.pop()
        for slot, measured in enumerate(self._measured):
            if measured.name in squares:
                self._meter.see_norm(slot, squares[measured.name].sqrt())

    def enable(self, active: bool) -> None:
        """Taps the forward passes to come, or leaves them alone."""
        self._norms.enabled = active

    def remove(self) -> None:
        """Takes every hook off the model."""
        self._norms.remove()
        for handle in self._handles:
            handle.remove()
