"""The parts of one step: all facts about them but their gradients."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_count, check_number

__all__ = ["Part", "PartSums", "Step", "StepParts"]


@dataclass
class PartSums:
    """Sums over the parts of one step on this process; tensors where weights are.

    Attributes:
        a: :math:`A`, the weights.
        c: :math:`C`.
        d: :math:`D`.
        parts: Number of parts.
        samples: Number of samples.
    """

    a: Tensor | float = 0.0
    c: Tensor | float = 0.0
    d: Tensor | float = 0.0
    parts: int = 0
    samples: int = 0

    def add(self, weight: Tensor | float, samples: int, parts: int) -> None:
        """Adds ``parts`` equal parts that share this weight and these samples."""
        self.a = self.a + weight
        self.c = self.c + weight * (parts / samples)
        self.d = self.d + weight * weight / samples
        self.parts += parts
        self.samples += samples

    def scaled(self, factor: float) -> "PartSums":
        """The sums when every weight is ``factor`` times as large."""
        return PartSums(
            self.a * factor, self.c * factor, self.d * factor**2, self.parts, self.samples
        )


@dataclass(frozen=True)
class Step:
    """Facts of a step that one process knows.

    Attributes:
        sums: The parts, with provisional weights.
        factor: True weight over provisional weight.
        share: Part of ``sums`` that is this process's own: 1, or one over the number of
            processes when all of them saw the same parts.
        multiple: Gradient summed over what the processes saw, over ``.grad``.
    """

    sums: PartSums
    factor: float
    share: float
    multiple: float


@dataclass(frozen=True)
class Part:
    """One micro-batch, as it is announced before its backward pass.

    Attributes:
        weight: Factor between the micro-batch's mean loss and what ``backward`` is called on;
            provisional while the number of micro-batches is unknown.
        samples: Samples of this process in it.
        count: Number of equal parts it is made of: its samples, or 1.
        explicit: Whether the weight was given.
        loss_scale: Loss scale of its backward pass; None: the scaler's, or 1.
    """

    weight: Tensor | float
    samples: int
    count: int
    explicit: bool
    loss_scale: Tensor | float | None = None

    @property
    def each(self) -> Tensor | float:
        """Weight of one of its equal parts."""
        return self.weight / self.count


class StepParts:
    """The parts of the step under way.

    Args:
        accumulation: How losses make up the step: ``"mean"``, ``"sum"`` or ``"samples"``.
        processes: Number of processes that train together.
        shared: Whether a part is one of all processes together.
        by_example: Whether each sample is a part.
        alike: Whether each process needs two parts, and all of them equal.

    Attributes:
        sums: Sums over the parts, with provisional weights.
        broken: Whether the step cannot be measured.
        idle: Whether a micro-batch without samples was run.
        repeated: Whether two parts are backward passes over the same forward pass.
    """

    def __init__(
        self, accumulation: str, processes: int, *, shared: bool, by_example: bool, alike: bool
    ) -> None:
        self._accumulation, self._processes = accumulation, processes
        self._shared, self._by_example, self._alike = shared, by_example, alike
        self.clear()

    def clear(self) -> None:
        """Starts a new step."""
        self.sums = PartSums()
        self.broken = self.idle = self.repeated = False
        self._explicit: bool | None = None
        self._kinds: set[tuple[float | None, int]] = set()

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
        known: Tensor | float
        if weight is None:
            known = samples if self._accumulation == "samples" else 1.0
        else:
            known = _readable(weight)
        return Part(known, samples, samples if self._by_example else 1, explicit, loss_scale)

    def add(self, part: Part) -> None:
        """Counts a micro-batch whose backward pass is over."""
        self._explicit = part.explicit
        together = part.samples * (self._processes if self._shared else 1)
        self.sums.add(part.weight, together, part.count)
        # Weights on the device cannot be compared without waiting for it.
        weight = None if isinstance(part.weight, Tensor) else part.weight
        self._kinds.add((weight, part.samples))

    def wrong(self) -> InputError | None:
        """The reason why the whole step cannot be measured, if there is one."""
        if self.broken:
            return None
        if self.repeated:
            return InputError(
                "Expected one backward pass over each forward pass. Found a second one, as of two "
                "losses of the same samples. Remedy: add the losses up before backward(), or make "
                "NoiseScale(source='accumulated') with one `with noise.microbatch(n)` around all "
                "passes of the same samples."
            )
        several = self._processes == 1 or self._shared or self._alike
        needed = 2 if several else 1 - self.idle
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
            factor = (self._processes if self._shared else 1) / (sums.samples or 1)
        if self._shared:
            return Step(sums, factor, share=1 / self._processes, multiple=1.0)
        return Step(sums, factor, share=1.0, multiple=float(self._processes))


def _readable(weight: Tensor | float) -> Tensor | float:
    """A checked number; a tensor on an accelerator stays there, and is NaN if negative."""
    if not isinstance(weight, Tensor):
        return check_number("weight", weight, low=0, low_open=True)
    if weight.numel() != 1:
        raise InputError(
            f"Parameter `weight` should be one number. Found a tensor of shape "
            f"{tuple(weight.shape)}. Remedy: a 0-d tensor, such as a sum of tokens."
        )
    wide = weight.detach().reshape(())
    wide = wide.to(torch.float32 if weight.device.type == "mps" else torch.float64)
    return torch.where(wide >= 0, wide, torch.nan)
