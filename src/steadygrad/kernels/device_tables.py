"""What kernels for accelerators are handed: one table of numbers for a whole model.

It begins with what holds for the step, then comes a row for each group of options, then one for
each tensor. All are int64: addresses, counts, or the bits of a float64. The host fills it in and
sends it over in one copy, if anything in it has changed.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad.kernels.tables import ChunkTable

__all__ = ["CHUNK", "DeviceTable", "Group", "Head", "Row"]

# Elements of a chunk, the work of one program: with fewer a tensor's programs have more partial
# sums to add up, with more some processors have nothing left to do at the end.
CHUNK = 32768
# Steps that CUDA graphs can record between two that are taken outside of them.
SPARES = 4


class Head(IntEnum):
    """Places of what holds for the step: addresses of float32 numbers, zero: there is none."""

    FOUND_INF = 0
    GRAD_SCALE = 1
    GROUPS = 2  # number of groups
    SPARE = 3


class Group(IntEnum):
    """Places in a group's row; float64 unless it says otherwise."""

    LR = 0
    LR_AT = 1  # address of the learning rate; zero: it is LR
    LR_DOUBLE = 2  # integer: whether that is of float64, not of float32
    BETA1 = 3
    BETA2 = 4
    LOG_BETA1 = 5
    LOG_BETA2 = 6
    EPS = 7
    SIGN = 8  # minus one to go up
    SKIPPED = 9  # address
    # LANS
    DECAY = 10
    CLIP = 11  # infinite: none
    LOW = 12  # minus infinite: none
    HIGH = 13
    # ScaledAdam
    SCALAR_SCALE = 10
    MIN_RMS = 11
    MAX_RMS = 12
    SCALAR_MAX = 13
    PERIOD = 14  # integer
    ORIGINAL = 15  # integer: whether the rule is that of 2022
    CLIPPING = 16  # zero: none
    HISTORY = 17  # integer: number of norms that are remembered
    NORMS = 18  # address
    THRESHOLD = 19  # address
    CLIPPED = 20  # address
    FIRST = 21  # integer: its first tensor
    TENSORS = 22  # integer
    STEPWISE = 23  # integer: whether norms are added up as the original does in float64


class Row(IntEnum):
    """Places in a tensor's row; addresses unless it says otherwise."""

    ACTIVE = 0  # integer: 1 with a gradient, 2 with one of zeros, 0: takes no part
    GRAD = 1
    WEIGHT = 2
    FIRST = 3  # `m` or `v`
    SECOND = 4  # `v` or `delta`
    PARAM = 5  # where the weight goes in the type of a 16-bit parameter
    STEP = 6
    GROUP = 7  # integer
    SLOT = 8  # integer: place of the first of its partial sums
    SLOTS = 9  # integer: how many there are
    # ScaledAdam
    SCALAR = 10  # integer: whether it has one element
    NUMEL = 11  # float64: elements over all shards
    RMS = 12
    MEAN_SQUARE = 13
    RING = 14
    DOUBLE = 15  # integer: whether its state is of float64, not of float32
    STACK_END = 16  # integer: whether the next is of another shape
    SPARE = 17


class DeviceTable:
    """Tensors of a model, cut into chunks, and the numbers that kernels need of them.

    Args:
        sizes: Elements of each tensor.
        kinds: For each the place of its set of types; each set has kernels of its own.
        groups: Number of groups.
        device: Where the kernels run.
        chunk: Elements of a chunk.

    Attributes:
        head: What holds for the step, with shape ``(len(Head))``; to be filled in.
        groups: With shape ``(groups, len(Group))``; to be filled in.
        rows: With shape ``(tensors, len(Row))``; to be filled in.
        chunks: On the device: rows of tensor, first element, length and place of partial sums.
        sums: On the device: partial sums, float64 with shape ``(4, chunks)``.
        totals: On the device: sums of tensors, float64 with shape ``(4, tensors)``.
        factors: On the device: what kernels leave to later ones for each tensor, float64.
        flags: On the device: whether the gradients of this step are bad, as it is found out and as
            it is decided, int32 with shape ``(2)``.
        ranges: First chunk and number of chunks of each set of types.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kinds: Sequence[int],
        groups: int,
        device: torch.device,
        chunk: int = CHUNK,
    ) -> None:
        cut = ChunkTable(sizes, 1, chunk)
        slots = np.arange(len(cut.chunks))
        chunks = np.concatenate([cut.chunks, slots[:, None]], axis=1)
        owners = np.asarray(kinds, np.int64)[chunks[:, 0]]
        chunks = chunks[np.argsort(owners, kind="stable")]
        lengths = np.bincount(owners)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self.ranges = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        self.device, tensors = device, len(sizes)
        widths = [len(Head), groups * len(Group), tensors * len(Row)]
        self._ends = np.cumsum(widths).tolist()
        self._host = np.zeros(sum(widths), np.int64)
        self._sent: NDArray[np.int64] | None = None
        self.head, group_part, row_part = np.split(self._host, self._ends[:2])
        self.groups = group_part.reshape(groups, len(Group))
        self.rows = row_part.reshape(tensors, len(Row))
        self.rows[:, Row.SLOT] = cut.firsts
        self.rows[:, Row.SLOTS] = np.diff([*cut.firsts, len(chunks)])
        self.slots, self.tensors = len(chunks), tensors
        self.chunks = torch.from_numpy(chunks).to(device)
        self.sums = torch.zeros(4, self.slots, dtype=torch.float64, device=device)
        self.totals = torch.zeros(4, tensors, dtype=torch.float64, device=device)
        self.factors = torch.zeros(tensors, 8, dtype=torch.float64, device=device)
        self.flags = torch.zeros(2, dtype=torch.int32, device=device)
        self._own = torch.zeros(len(self._host), dtype=torch.int64, device=device)
        self._current = self._own
        self._spares: list[tuple[Tensor, Tensor]] = []
        self._recorded: list[tuple[Tensor, Tensor]] = []
        self._refill()

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Head, groups and rows on the device, as they were last sent."""
        head, groups, rows = self._current.tensor_split(self._ends[:2])
        return head, groups, rows

    def send(self) -> None:
        """Copies what has been filled in to the device; the host does not wait for it."""
        if _is_recording(self.device):
            self._record()
            return
        self._refill()
        self._current = self._own
        if self._sent is not None and np.array_equal(self._sent, self._host):
            return
        self._sent = self._host.copy()
        sent = torch.from_numpy(self._sent)
        # Pinned memory goes back to its pool after the copy, not before.
        sent = sent.pin_memory() if self.device.type == "cuda" else sent
        self._own.copy_(sent, non_blocking=True)

    @property
    def ready(self) -> bool:
        """Whether a step can be taken now: a recording needs memory that was made before it."""
        return bool(self._spares) or not _is_recording(self.device)

    def _record(self) -> None:
        """Lets a graph copy a table of its own, which later steps do not write to."""
        host, table = self._spares.pop()
        host.copy_(torch.from_numpy(self._host))
        table.copy_(host, non_blocking=True)
        self._current = table
        # It copies again at each replay.
        self._recorded.append((host, table))

    def _refill(self) -> None:
        while self.device.type == "cuda" and len(self._spares) < SPARES:
            pinned = torch.empty(len(self._host), dtype=torch.int64, pin_memory=True)
            self._spares.append((pinned, torch.empty_like(self._own)))


def _is_recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
