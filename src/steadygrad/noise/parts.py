"""The parts of one step: all facts about them but their gradients."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Part", "PartSums", "Step"]


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
