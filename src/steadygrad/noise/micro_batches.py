"""The micro-batches of a step: announced, open, or counted."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_count, check_number
from steadygrad.noise.loss_scale import LossScale
from steadygrad.noise.meters import Meter
from steadygrad.noise.parts import Part, PartSums, Step
from steadygrad.noise.passes import PassBorders
from steadygrad.noise.repeats import Repeats

__all__ = ["MicroBatches"]


class MicroBatches:
    """Opens and closes the parts of a step, by contexts or as backward passes are found.

    Args:
        meter: Measures their gradients.
        loss_scale: Knows the scale that they carry.
        samples: Samples of a pass that was not announced; None: such a pass is not measured.
        accumulation: How losses make up the step: ``"mean"``, ``"sum"`` or ``"samples"``.
        shared: Whether a part is one of all processes together.
        by_example: Whether each sample is a part.
        alike: Whether each process needs two parts, and all of them equal.

    Attributes:
        repeats: Tells passes that are no micro-batch of their own.
        borders: Finds the backward passes outside of contexts.
        sums: Sums over the parts of the step under way, with provisional weights.
        broken: Whether the step cannot be measured.
    """

    repeats: Repeats

    def __init__(
        self,
        meter: Meter,
        loss_scale: LossScale,
        samples: Callable[[], int] | int | None,
        accumulation: str,
        *,
        shared: bool,
        by_example: bool,
        alike: bool,
    ) -> None:
        self._meter, self._loss_scale, self._samples = meter, loss_scale, samples
        self._accumulation, self._shared = accumulation, shared
        self._by_example, self._alike = by_example, alike
        self._together = meter.world.size if shared else 1
        self.borders = PassBorders(self._begin, self._end, self._spoil)

    def clear(self) -> None:
        """Starts a new step."""
        self.borders.finish()
        self._told: Part | None = None
        self._open: Part | None = None
        self.sums = PartSums()
        self.broken = self._idle = False
        self._alien = ""
        self.repeats.turn()
        self._explicit: bool | None = None
        self._kinds: set[tuple[float | None, int]] = set()
        self._meter.clear()
        self._loss_scale.begin()

    def part(
        self,
        samples: int,
        weight: Tensor | float | None = None,
        loss_scale: Tensor | float | None = None,
    ) -> Part:
        """The next micro-batch, which counts once it is added.

        Args:
            samples: Samples of this process in it; one without any will not count.
            weight: Weight of the micro-batch; None: as ``accumulation`` says.
            loss_scale: Loss scale of its backward pass; None: the scaler's, or 1.

        Raises:
            InputError: If the weight is not positive, or only some micro-batches have one.
        """
        if check_count("num_samples", samples, low=0) == 0:
            return Part(0.0, 0, 1, False)
        explicit = weight is not None
        if self._explicit not in (None, explicit):
            raise InputError(
                "Expected a weight for all micro-batches of a step or for none. Found both. "
                "Remedy: give each one its weight, or leave it to `accumulation`."
            )
        if weight is None:
            weight = samples if self._accumulation == "samples" else 1.0
        count = samples if self._by_example else 1
        return Part(_readable(weight), samples, count, explicit, loss_scale)

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
            part = self.part(count)
        self._open = part
        return part is not None

    def _end(self) -> None:
        part, self._open = self._open, None
        assert part is not None
        alien = self.repeats.end()
        if not part.samples:
            self._meter.drop_part()
            self._idle = True
            return
        self._alien = self._alien or alien
        self._meter.end_part(part, self._loss_scale.of_part(part.loss_scale))
        self._explicit = part.explicit
        self.sums.add(part.weight, part.samples * self._together, part.count)
        # Weights on the device cannot be compared without waiting for it.
        weight = None if isinstance(part.weight, Tensor) else part.weight
        self._kinds.add((weight, part.samples))

    def _spoil(self) -> None:
        # What this backward pass has added to .grad is unknown: the step cannot be measured.
        self._open, self.broken = None, True
        self.repeats.begin()
        self._meter.drop_part()

    def wrong(self) -> InputError | None:
        """The reason why the whole step cannot be measured, if there is one."""
        if self.broken:
            return None
        if self._alien:
            return InputError(
                "Expected one backward pass over the forward pass of each micro-batch. Found "
                f"{self._alien}. Remedy: add the losses up before backward(), or make "
                "NoiseScale(source='accumulated') with one `with noise.microbatch(n)` around all "
                "passes of the same samples."
            )
        several = self._meter.world.size == 1 or self._shared or self._alike
        needed = 2 if several else 1 - self._idle
        if self.sums.parts < needed:
            return InputError(
                f"Expected at least {needed} parts a step. Found {self.sums.parts}. Remedy: split "
                "the batch into micro-batches, each in `with noise.microbatch(n)` or after "
                "`noise.samples(n)`, or use source='per_example'."
            )
        if self._alike and len(self._kinds) > 1:
            return InputError(
                "Expected equal micro-batches for metric='l1'. Found (weight, samples) in "
                f"{sorted(self._kinds, key=str)}. Remedy: drop the last, smaller one."
            )
        return None

    def step(self) -> Step:
        """The whole step, whose number of parts is known by now."""
        sums = self.sums
        if self.broken:
            # NaN reaches every process through the collective, and all leave the step out.
            return Step(PartSums(math.nan, math.nan, math.nan, parts=2, samples=2), 1.0, 1.0, 1.0)
        factor = 1.0
        if not self._explicit and self._accumulation == "mean":
            factor = 1 / (sums.a or 1.0)  # type: ignore[assignment]  # only a given weight is a tensor
        elif not self._explicit and self._accumulation == "samples":
            factor = self._together / (sums.samples or 1)
        multiple = self._meter.world.size / self._together
        return Step(sums, factor, share=1 / self._together, multiple=multiple)


def _readable(weight: Tensor | float) -> Tensor | float:
    """A checked number; a tensor on an accelerator stays there, and is NaN if negative."""
    if not isinstance(weight, Tensor):
        return check_number("weight", weight, low=0, low_open=True)
    wide = weight.detach().reshape(())
    wide = wide.to(torch.float32 if weight.device.type == "mps" else torch.float64)
    return torch.where(wide >= 0, wide, torch.nan)
