"""A pass of one batch through the model: sums of the tensors it made, in the order of execution.

A sum is finite exactly when all that it adds up is, unless it overflows itself. On a CPU each is
looked at right away, which waits for nothing; on other devices the sums of a pass travel to the
host together, and are looked at when they have arrived.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from steadygrad.sharding import local
from steadygrad.watch.finding import FORWARD, GRADIENT, OUTPUT, PARAMETER, WEIGHT, Event

__all__ = ["Clock", "Pass", "floating"]

_NARROW = (torch.float16, torch.bfloat16)


class Clock:
    """Counts the modules that compiled code ran: it keeps no lists, but may change a tensor.

    Attributes:
        ticks: Their number, with shape ``()``.
        used: Whether there is compiled code.
        deferred: Whether reading a number waits for a device, so that it is left until later.
    """

    def __init__(self, device: torch.device) -> None:
        self.ticks = torch.zeros((), dtype=torch.int64, device=device)
        self.used, self.deferred = False, device.type != "cpu"


class _Note(NamedTuple):
    """An event whose sum, and whose time where code is compiled, may still be on a device."""

    what: str
    name: str
    total: Any
    time: Any = None
    together: bool = False

    @property
    def finite(self) -> bool:
        """The total is a sum, or says whether it was finite."""
        return self.total is True or (self.total is not False and math.isfinite(self.total))


class Pass:
    """Collects the events of one batch.

    Args:
        batch: Its index.
        clock: Says when compiled code ran.

    Attributes:
        consumers: For each module, those that were handed its output itself.
        backward: Whether a gradient has been seen.
    """

    def __init__(self, batch: int, clock: Clock) -> None:
        self.batch, self._clock = batch, clock
        self.consumers: dict[str, list[str]] = defaultdict(list)
        self.backward = False
        self._notes: list[_Note] = []
        self._copied: tuple[Tensor, Any] | None = None

    def note(self, what: str, name: str, tensor: Tensor) -> bool:
        """Adds an event; False where the tensor is known not to be finite."""
        # Recorded by autograd, it would be a tensor more than a repeated forward pass has.
        tensor = tensor.detach()
        if type(tensor) is not Tensor:
            tensor = local(tensor)
        # float16 would overflow by adding up what is finite.
        total = tensor.sum(dtype=torch.float32) if tensor.dtype in _NARROW else tensor.sum()
        time = self._clock.ticks.clone() if self._clock.used else None
        if self._clock.deferred:
            self._notes.append(_Note(what, name, total, time))
            return True
        finite = math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())
        self._notes.append(_Note(what, name, finite, time))
        return finite

    def note_before(self, what: str, name: str, tensor: Tensor) -> None:
        """Adds an event that comes before the last one."""
        self.note(what, name, tensor)
        self._notes[-2:] = reversed(self._notes[-2:])

    def note_compiled(self, what: str, name: str, total: Tensor, time: Tensor) -> None:
        """Adds the sum that compiled code left, and when."""
        # Half a tick before what ran outside of compiled code after it.
        self._notes.append(_Note(what, name, total.clone(), time - 0.5))

    def note_all(self, what: str, names: list[str], tensors: list[Tensor]) -> None:
        """Adds an event for each tensor, by one call for all of them."""
        if not tensors:
            return
        on_host = not self._clock.deferred
        # Of the two norms that are fast, the first may overflow, and is then looked at again.
        norms: list[Any] = [*torch._foreach_norm(tensors, 2 if on_host else math.inf)]
        if on_host:
            if math.isfinite(torch.stack(norms).sum().item()):
                return
            norms = [bool(torch.isfinite(tensor).all()) for tensor in tensors]
        pairs = zip(names, norms, strict=True)
        self._notes += [_Note(what, name, norm, None, True) for name, norm in pairs]

    def close(self) -> None:
        """Sends what is on a device to the host; nothing waits for it."""
        on_device = [x for note in self._notes for x in note if isinstance(x, Tensor)]
        if not on_device:
            return
        device = on_device[0].device
        column = torch.stack([x.to(device, torch.float64) for x in on_device])
        if device.type == "cpu":
            self._copied = column, None
            return
        host = torch.empty_like(column, device="cpu", pin_memory=True)
        arrived = torch.cuda.Event()
        self._copied = host.copy_(column, non_blocking=True), arrived
        arrived.record()

    def arrived(self, *, wait: bool) -> bool:
        """Whether all sums are on the host."""
        if self._copied is None or self._copied[1] is None:
            return True
        if wait:
            self._copied[1].synchronize()
        return bool(self._copied[1].query())

    def finite(self) -> bool:
        """Whether all events are; all sums must have arrived."""
        numbers = self._copied is None or bool(torch.isfinite(self._copied[0]).all())
        return numbers and all(note.total is not False for note in self._notes)

    def events(self) -> list[Event]:
        """The events in the order of execution; all sums must have arrived."""
        numbers = iter(self._copied[0].tolist() if self._copied else [])
        notes = [
            _Note._make(next(numbers) if isinstance(x, Tensor) else x for x in note)
            for note in self._notes
        ]
        forward = [n for n in notes if n.what in FORWARD and not n.together]
        forward.sort(key=lambda note: note.time or 0)
        forward = _with_weights(forward, [n for n in notes if n.what == WEIGHT and n.together])
        place = {note.name: i for i, note in enumerate(forward) if note.what == OUTPUT}
        # Weights of a module that was not called itself have a gradient all the same.
        backward = [n for n in notes if n.what == GRADIENT and n.name in {"", *place}]
        # The engine works in the reverse order of the forward pass.
        backward.sort(key=lambda n: -place.get(n.name, len(place)))
        weights = [note for note in notes if note.what == PARAMETER]
        notes = [*forward, *_without_own(backward), *weights]
        return [Event(note.what, note.name, note.finite) for note in notes]


def _with_weights(forward: Sequence[_Note], weights: Sequence[_Note]) -> list[_Note]:
    """Puts weights that were noted together before their modules; those of no module first."""
    by_module: dict[str, list[_Note]] = defaultdict(list)
    for note in weights:
        by_module[note.name.rpartition(".")[0]].append(note)
    called = {note.name for note in forward}
    found = [note for name, own in by_module.items() if name not in called for note in own]
    for note in forward:
        found += [*by_module.pop(note.name, ()), note]
    return found


def _without_own(backward: Sequence[_Note]) -> Sequence[_Note]:
    """Leaves out what only a weight's own gradient shows, if a finite one was passed on."""
    bad = [i for i, note in enumerate(backward) if not note.finite]
    own = len(bad) == 1 and backward[bad[0]].together and bad[0] < len(backward) - 1
    return [note for note in backward if note.finite] if own else backward


def floating(nest: Any) -> Iterable[Tensor]:
    """The floating-point tensors in what a module takes or returns."""
    leaves = [nest] if isinstance(nest, Tensor) else _pytree.tree_leaves(nest)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
