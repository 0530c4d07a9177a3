"""Batches of parameters of one group, device and set of types, on which passes work."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, compress, repeat
from operator import attrgetter, eq, is_, mul
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.numerics import exact, wide
from steadygrad.optim.buckets import line, places_of
from steadygrad.optim.checks import TYPES, is_capturing
from steadygrad.optim.codes import EXPONENTS, first_element, seeds_at
from steadygrad.optim.passes import Types, addresses_of, sync_masters
from steadygrad.optim.state import MASTER, StateField
from steadygrad.shards import is_sharded, local

if TYPE_CHECKING:
    from steadygrad.optim.loops.runtime import Table


class Gradients(NamedTuple):
    """Local gradients of all parameters, with two flags for each, and their scale."""

    grads: list[Tensor | None]  # None: this process has none
    has_grad: list[bool]  # whether there is one on this process, or None that counts as a zero
    in_step: list[bool]  # whether it is worked on, because some process may have a gradient
    grad_scale: Tensor | None  # loss scale that is still in the gradients; None: none is

    def worked_on(self, batches: "Sequence[ParamBatch]") -> "list[ParamBatch]":
        """Batches of which at least one parameter is worked on."""
        return [batch for batch in batches if any(self.in_step[i] for i in batch.places)]


class ParamBatch:
    """Parameters of one group on one device with one set of types, always in the same order.

    It is built once. Weights, gradients and their addresses are read anew in every step, so moving
    a parameter's memory needs no notification. Columns are small states, stacked:
    ``state[p][name]`` are views of their rows, so nothing is gathered one by one.

    With tables it works by compiled loops or kernels, else by multi-tensor calls. Moments may be
    float32 in some and codes in others. Without views, new states are copied to each.

    Attributes:
        places: Indices of the parameters among all parameters of the optimizer; ``index`` on the
            device.
        weights: Local weights, or their float32 masters.
        moments: Local large states, a list for each of them.
        columns: Small states, stacked along the first axis.
        numel: Elements of each parameter over all shards.
        exact: The widest type of their device.
    """

    # Of a step, flags with shape `(tensors)`.
    has_grad: Tensor  # as in `Gradients`, and `in_step` too
    in_step: Tensor
    taken: Tensor  # whether each takes the step, once that is decided
    grads: list[Tensor | None]  # local; None: the parameter takes no part
    # What calls work on together: places, on the device as well with their elements if several.
    buckets: list[tuple[list[int], tuple[Tensor, Tensor] | None]]
    # One over the loss scale, which multiplies every gradient that is read: squares of gradients
    # with a loss scale may be past float32 where the scaler finds nothing. None: there is none.
    inverse_scale: Tensor | None

    def __init__(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        places: Sequence[int],
        states: Sequence[dict[str, Any]],
        fields: Mapping[str, StateField],
        tables: "Sequence[Table]" = (),
        *,
        views: bool,
    ) -> None:
        self.group, self.params, self.places, self.states = group, list(params), places, states
        self.tables, self.views = tables, views
        self.device, self.sharded = params[0].device, any(map(is_sharded, params))
        self.numel = torch.tensor([p.numel() for p in params], device=self.device)
        self.index = torch.tensor(places, device=self.device)
        large = [name for name, field in fields.items() if field.elementwise]
        small = [
            n
            for n, f in fields.items()
            if n in states[0] and not (f.elementwise or f.shared or f.scales)
        ]
        self.columns = {name: torch.stack([s[name].detach() for s in states]) for name in small}
        if views:
            for name, column in self.columns.items():
                for state, row in zip(states, column.unbind(), strict=True):
                    # Replace only the memory: the user may hold a reference to the state tensor.
                    state[name].data = row
        self._kept = self._state_tensors()
        moments = tuple([local(state[name]) for state in states] for name in large)
        self.moments: tuple[list[Tensor], ...] = moments
        self.coded = [moment.dtype is torch.uint8 for moment in self.moments[0]]
        # In place of those that there are none of: the moments, whose memory is there as well.
        self.scales = tuple(
            [local(s.get(name + EXPONENTS, s[name])) for s in states]
            for name in (large if any(self.coded) else ())
        )
        self._masters = [local(state[MASTER]) for state in states if MASTER in state]
        self._own = [local(p) for p in params] if self.sharded else self.params
        self.exact, self.weights = exact(self.device), self._masters or self._own
        # What calls work on together, and where each parameter is in the sums of these, on the
        # device; None: at its own place.
        together = [] if tables else places_of(self)
        self._bucketed, places = [self._bucket(own) for own in together], [*chain(*together)]
        order = sorted(range(len(places)), key=lambda k: places[k])
        self.order = None if order == sorted(order) else torch.tensor(order, device=self.device)
        self._shared = {*chain(*(own for own in together if len(own) > 1))}
        self.moments = tuple(map(self._lines, moments))
        self.state_dtype, self.sum_dtype = self.moments[0][0].dtype, wide(self.weights[0].dtype)
        # Random bits, `(2, tensors)`, and the first elements' places in the whole, `(tensors)`.
        self.seeds: Tensor | None = None
        self._firsts: Tensor | None = None
        if self.scales:
            self.state_dtype, self.sum_dtype = torch.float32, self.exact
            firsts = [first_element(p) if c else 0 for p, c in zip(params, self.coded, strict=True)]
            self._firsts = torch.tensor(firsts, device=self.device)
        self.grads, self.buckets = [], []
        # Both flags on the host; None where they are a graph's own.
        self._flags: tuple[list[bool], list[bool]] | None = None
        if torch.compiler.is_compiling():
            return
        # What must stay for the batch to be used again.
        self._dtypes, self._shapes = [p.dtype for p in self._own], [p.shape for p in self._own]
        self._strides = [p.stride() for p in self._own]
        self._contiguous = all(map(Tensor.is_contiguous, self._own))
        self._large = [t for tensors in (*moments, *self.scales, self._masters) for t in tensors]
        self._states = [*self._large, *(s[name] for name in small for s in states)]
        self._sizes, self._addresses = [t.numel() for t in self._large], addresses_of(self._states)
        for table in tables:
            table.fill_states((*self.moments, *self.scales))

    @property
    def sign(self) -> float:
        """Factor that gives gradients their direction: -1 to maximise."""
        return -1.0 if self.group["maximize"] else 1.0

    @property
    def lr(self) -> float | Tensor:
        """The group's learning rate: a number, or a tensor with shape ``()`` on the device."""
        lr: float | Tensor = self.group["lr"]
        if not isinstance(lr, Tensor):
            return lr
        # In one call: there are devices without float64.
        dtype = lr.dtype if self.exact is torch.float64 else self.exact
        return lr.to(self.device, dtype).reshape(())

    @property
    def steps(self) -> Tensor:
        """Steps that each parameter has taken, with shape ``(tensors)``, in the widest type."""
        return self.columns["step"].to(self.exact, copy=True)

    def store(self, name: str, values: Tensor) -> None:
        """Writes new values of a column."""
        self.columns[name].copy_(values)
        if not self.views:
            rows = [state[name] for state in self.states]
            torch._foreach_copy_(rows, list(self.columns[name].unbind()))

    def refresh(self, given: Gradients) -> bool:
        """Reads weights, gradients and addresses; False if the batch must be built anew."""
        if not torch.compiler.is_compiling():
            self._own = [local(p) for p in self.params] if self.sharded else self.params
            if not self._are_laid_out(self._own, self._dtypes) or not self._keeps_states():
                return False
        self.weights, self.inverse_scale = self._masters or self._own, None
        if self._firsts is not None:
            self.seeds = seeds_at(self.index, self.columns["step"], self._firsts)
        if (scale := given.grad_scale) is not None:
            # In one call: there are devices without float64.
            self.inverse_scale = scale.to(self.device, self.exact).reshape(()).reciprocal()
        grads = [given.grads[i] for i in self.places]
        in_step = [given.in_step[i] for i in self.places]
        self._set_flags([given.has_grad[i] for i in self.places], in_step)
        if self.tables:
            return self._fill_tables(grads)
        if self._masters:
            sync_masters(self._own, self._masters)
        pairs = zip(in_step, grads, self._own, strict=True)
        self.grads = [self._for_calls(g, own) if works else None for works, g, own in pairs]
        self.weights, self.grads = self._lines(self.weights), self._lines(self.grads)
        self.buckets = self._bucketed
        if not {*map(type, self.grads)} <= {Tensor, type(None)}:
            # A wrapped gradient is no part of a flat tensor.
            self.buckets = [([i], None) for places, _ in self._bucketed for i in places]
        return True

    def _bucket(self, places: list[int]) -> "tuple[list[int], tuple[Tensor, Tensor] | None]":
        """Places of a bucket; if they are several, on the device as well, with their elements."""
        sizes = [self.weights[i].numel() for i in places]
        index, counts = (torch.tensor(n, device=self.device) for n in (places, sizes))
        return places, (index, counts) if len(places) > 1 else None

    def _lines(self, tensors: Sequence[Any]) -> list[Any]:
        """Tensors with those that share a bucket as views with a single axis, where it goes."""
        pairs = enumerate(tensors)
        return [line(t) if i in self._shared and t is not None else t for i, t in pairs]

    def _for_calls(self, gradient: Tensor | None, like: Tensor) -> Tensor:
        """A gradient no wider than its sums; a zero that takes no memory for None."""
        if gradient is None:
            return like.new_zeros(()).expand(like.shape)
        _check_shape(gradient, like)
        # A float64 gradient remains if the parameter was cast by `.data` but its gradient was not.
        return gradient.to(self.sum_dtype) if gradient.dtype is torch.float64 else gradient

    def _set_flags(self, has_grad: list[bool], in_step: list[bool]) -> None:
        # A graph makes its own, as later steps replace these.
        recording = not torch.compiler.is_compiling() and is_capturing()
        if recording or (has_grad, in_step) != self._flags:
            no = torch.zeros((), dtype=torch.bool, device=self.device)
            flags = no, ~no
            # Not copied from the host, which would wait for it.
            self.has_grad = torch.stack([flags[here] for here in has_grad])
            self.in_step = torch.stack([flags[here] for here in in_step])
            self._flags = None if recording else (has_grad, in_step)

    def _are_laid_out(self, tensors: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> bool:
        """Whether tensors have some types, and the shapes and strides that the parameters had.

        Compared without a tuple for each tensor: thousands of them wake the garbage collector.
        """
        return (
            all(map(is_, map(attrgetter("dtype"), tensors), dtypes))
            and all(map(eq, map(attrgetter("shape"), tensors), self._shapes))
            # Cheaper than comparing strides, and enough for contiguous tensors.
            and (
                all(map(Tensor.is_contiguous, tensors))
                if self._contiguous
                else all(map(eq, map(Tensor.stride, tensors), self._strides))
            )
        )

    def _keeps_states(self) -> bool:
        """Whether every state still is the tensor that it was, where it was."""
        found = self._state_tensors()
        return (
            len(found) == len(self._kept)
            and all(map(is_, found, self._kept))
            # The states' memory may have been exchanged through `state.data`.
            and np.array_equal(self._addresses, addresses_of(self._states))
            and all(map(eq, map(Tensor.numel, self._large), self._sizes))
        )

    def _state_tensors(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self.states))]

    def _fill_tables(self, grads: list[Tensor | None]) -> bool:
        """Lays gradients out in memory as their parameters are; False if loops cannot take one."""
        given = [g for g in grads if g is not None]
        dtype, has_grad = self.tables[0].types[0], np.array([g is not None for g in grads])
        alike = (
            has_grad.all()
            and {*map(type, given)} == {Tensor}
            and self._are_laid_out(given, repeat(dtype))
        )
        if not alike or any(map(Tensor.is_neg, given)):
            for i, (g, own) in enumerate(zip(grads, self._own, strict=True)):
                if g is not None:
                    _check_shape(g, own)
                    if type(g) is not Tensor or g.dtype is not dtype:
                        return False
                    if g.stride() != own.stride() or g.is_neg():
                        grads[i] = torch.empty_like(own, dtype=dtype).copy_(g)
        self.grads = grads
        places = addresses_of(self._own)
        found = np.zeros((3, len(places)), np.int64)
        found[0, has_grad] = addresses_of([g for g in grads if g is not None])
        found[1], found[2] = places, addresses_of(self._masters) if self._masters else places
        for table in self.tables:
            table.fill(found, has_grad)
        return True

    def finish(self) -> None:
        """Rounds masters to their parameters, tells autograd, and frees weights and gradients."""
        # Only those that were worked on: a graph may still need the others as they are.
        in_step = self._flags[1] if self._flags else [True] * len(self._own)
        written = list(compress(self._own, in_step))
        if self.tables:
            torch.autograd.graph.increment_version(written)
        if not self.tables:
            for own, master in zip(written, compress(self._masters, in_step), strict=False):
                own.copy_(master)
        self.grads, self.weights, self._own, self.buckets = [], [], [], []


def _check_shape(gradient: Tensor, parameter: Tensor) -> None:
    if gradient.shape != parameter.shape:
        raise InputError(
            f"Expected gradients of their parameters' shapes. Found shape {tuple(gradient.shape)} "
            f"for {tuple(parameter.shape)}. Remedy: zero_grad(), and a new optimizer."
        )


def types_for_loops(
    parameter: Tensor, gradient: Tensor | None, state: dict[str, Any], large: Sequence[str]
) -> Types | None:
    """Types of a parameter that loops can take, with large states of some names; None: they cannot.

    Its tensors must be plain ones that lie in memory alike, without gaps.
    """
    own, masters = local(parameter), [local(state[MASTER])] if MASTER in state else []
    moments, grad = [local(state[name]) for name in large], own if gradient is None else gradient
    # A plain parameter's detached memory is a plain tensor; a wrapper's is not.
    kept = (own.detach(), *moments, *masters)
    if any(type(t) is not Tensor for t in (grad.detach(), *kept)) or _has_gaps(own):
        return None
    types = (grad.dtype, (masters or [own])[0].dtype, moments[0].dtype, own.dtype)
    fits = {*types} <= {*TYPES, torch.uint8} and len({t.dtype for t in moments}) == 1
    fits = fits and (types[2] in (torch.float32, torch.float64) or own.is_contiguous())
    fits = fits and {t.dtype for t in masters} <= {torch.float32}
    layout = own.shape, own.stride()
    alike = all((t.shape, t.stride()) == layout and not t.is_neg() for t in kept)
    return types if fits and alike else None


def _has_gaps(tensor: Tensor) -> bool:
    """Whether its elements do not fill their memory, in whatever order."""
    axes = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    expected = accumulate((n for _, n in axes), mul, initial=1)
    return any(stride != wanted for (stride, _), wanted in zip(axes, expected, strict=False))
