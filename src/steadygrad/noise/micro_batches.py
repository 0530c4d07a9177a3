"""The micro-batches of a step: announced, open, or counted."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from steadygrad._checks import InputError
from steadygrad.noise.loss_scale import LossScale
from steadygrad.noise.meters import Meter
from steadygrad.noise.parts import Part, StepParts
from steadygrad.noise.passes import PassBorders
from steadygrad.noise.repeats import Repeats

__all__ = ["MicroBatches"]


class MicroBatches:
    """Opens and closes the parts of a step, by contexts or as backward passes are found.

    Args:
        parts: The step's parts.
        meter: Measures their gradients.
        loss_scale: Knows the scale that they carry.
        samples: Samples of a pass that was not announced; None: such a pass is not measured.

    Attributes:
        repeats: Tells passes over the samples of an earlier part.
        borders: Finds the backward passes outside of contexts.
    """

    repeats: Repeats

    def __init__(
        self,
        parts: StepParts,
        meter: Meter,
        loss_scale: LossScale,
        samples: Callable[[], int] | int | None,
    ) -> None:
        self._parts, self._meter, self._loss_scale = parts, meter, loss_scale
        self._samples = samples
        self.borders = PassBorders(self._begin, self._end, self._spoil)
        self._told: Part | None = None
        self._open: Part | None = None

    def clear(self) -> None:
        """Starts a new step."""
        self.borders.finish()
        self._told = self._open = None
        self._parts.clear()
        self._meter.clear()
        self._loss_scale.begin()

    def tell(self, part: Part) -> None:
        """Takes the facts about the next backward pass."""
        self._told = part

    @contextmanager
    def context(self, part: Part, recording: AbstractContextManager[None] | None) -> Iterator[None]:
        """A context around a part's backward pass; without a recording it is not measured."""
        if self._open is not None:
            raise InputError(
                "Expected one micro-batch at a time. Found one inside another. "
                "Remedy: leave the first before the second is entered."
            )
        if recording is None:
            yield
            return
        self._told, self._open = None, part
        self.repeats.begin(several=True)
        try:
            with recording:
                yield
        except BaseException:
            self._spoil()
            raise
        self._end()

    def _begin(self) -> bool:
        """Opens the part of a backward pass, if its size is known."""
        part, self._told = self._told, None
        if part is None and self._samples is not None:
            count = self._samples() if callable(self._samples) else self._samples
            part = self._parts.part(count)
        self._open = part
        return part is not None

    def _end(self) -> None:
        part, self._open = self._open, None
        assert part is not None
        self._parts.repeated |= self.repeats.end()
        if not part.samples:
            self._meter.drop_part()
            self._parts.idle = True
            return
        self._meter.end_part(part, self._loss_scale.of_part(part.loss_scale))
        self._parts.add(part)

    def _spoil(self) -> None:
        # What this backward pass has added to .grad is unknown: the step cannot be measured.
        self._open, self._parts.broken = None, True
        self.repeats.begin()
        self._meter.drop_part()
