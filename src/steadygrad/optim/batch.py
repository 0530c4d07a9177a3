"""Batches of parameters of one group, device and set of types, on which passes work."""

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.numerics import exact, wide
from steadygrad.optim.buckets import places_of
from steadygrad.optim.checks import TYPES, dense_gradient, is_capturing
from steadygrad.optim.codes import EXPONENTS, first_element, row_of, seeds_at
from steadygrad.optim.passes import (
    BACKENDS,
    Types,
    addresses_of,
    runtime_of,
    sync_masters,
    tensor_of,
)
from steadygrad.optim.state import MASTER, StateField
from steadygrad.shards import is_sharded, local

if TYPE_CHECKING:
    from steadygrad.optim.loops.runtime import Table


class Gradients(NamedTuple):
    """Local gradients of all parameters, with two flags for each, and their scale."""

    grads: list[Tensor | None]  # None: this process has none
    has_grad: Sequence[bool]  # whether there is one on this process, or None that counts as a zero
    in_step: Sequence[bool]  # whether it is worked on, because some process may have a gradient
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

    With loops a column is an array of NumPy's, which has the memory of the states.

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
    has_grad: Any  # as in `Gradients`, and `in_step` too
    in_step: Any
    taken: Any  # whether each takes the step, once that is decided
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
        types: Sequence[Types | None],
        *,
        views: bool,
        is_exact: bool,
    ) -> None:
        self.group, self.params, self.places, self.states = group, list(params), places, states
        # What belongs to its parameters, of what all parameters of the optimizer have.
        self._of = itemgetter(*places) if len(places) > 1 else lambda one: (one[self.places[0]],)
        self.views, self.device = views, params[0].device
        self.sharded = any(map(is_sharded, params))
        large = [name for name, field in fields.items() if field.elementwise]
        # One for numbers, and one for codes if there are any.
        kinds = dict.fromkeys(one for one in types if one)
        self.tables = [self._table(kind, types, len(large)) for kind in kinds]
        self.on_host = bool(kinds) and BACKENDS[self.device.type] == "loops"
        self.numel = self.column(torch.tensor([p.numel() for p in params], device=self.device))
        self.index = torch.tensor(places, device=self.device)
        self.columns = {
            name: self._stacked(name)
            for name, field in fields.items()
            if name in states[0] and not (field.elementwise or field.shared or field.scales)
        }
        moments = [[local(state[name]) for state in states] for name in large]
        self.coded = [moment.dtype is torch.uint8 for moment in moments[0]]
        # In place of those that there are none of: the moments, whose memory is there as well.
        self.scales = tuple(
            [local(s.get(name + EXPONENTS, s[name])) for s in states]
            for name in (large if any(self.coded) else ())
        )
        self._masters = [local(state[MASTER]) for state in states if MASTER in state]
        self._own = [local(p) for p in params] if self.sharded else self.params
        self.exact, self.weights = exact(self.device), self._masters or self._own
        self._put_together()
        self.moments = tuple(map(self._lines, moments))
        self.state_dtype = torch.float32 if self.scales else self.moments[0][0].dtype
        self.sum_dtype = sum_type_of(self.weights[0], is_exact)
        # Random bits, `(2, tensors)`, and the first elements' places in the whole, `(tensors)`.
        self.seeds: Any = None
        self._firsts: Tensor | None = None
        if self.scales:
            firsts = [first_element(p) if c else 0 for p, c in zip(params, self.coded, strict=True)]
            self._firsts = torch.tensor(firsts, device=self.device)
        # Both flags on the host; None where they are a graph's own.
        self._flags: tuple[list[bool], list[bool]] | None = None
        if not torch.compiler.is_compiling():
            self._remember(moments)

    def _table(self, kind: Types, types: Sequence[Types | None], large: int) -> "Table":
        """A table of the parameters of some types, with the number of their large states."""
        places = [i for i, own in enumerate(types) if own == kind]
        params, is_coded = [self.params[i] for i in places], kind[2] is torch.uint8
        rows = [row_of(p) for p in params] if is_coded else ()
        given = [local(p).numel() for p in params], kind, large * (1 + is_coded), rows, places
        more = () if BACKENDS[self.device.type] == "loops" else (self.device,)
        table: Table = runtime_of(self.device).Table(*given, *more)
        return table

    def _stacked(self, name: str) -> Any:
        """A column of small states, of which these become views if they are to."""
        column = torch.stack([state[name].detach() for state in self.states])
        if self.views:
            for state, row in zip(self.states, column.unbind(), strict=True):
                # Replace only the memory: the user may hold a reference to the state tensor.
                state[name].data = row
        return self.column(column)

    def _put_together(self) -> None:
        """Buckets of the parameters that go by multi-tensor calls, and the order of their sums."""
        together = [] if self.tables else places_of(self)
        self._bucketed, places = [self._bucket(own) for own in together], [*chain(*together)]
        # Where each parameter is in the sums of these, on the device; None: at its own place.
        order = sorted(range(len(places)), key=lambda k: places[k])
        self.order = None if order == sorted(order) else torch.tensor(order, device=self.device)
        self._shared = {*chain(*(own for own in together if len(own) > 1))}

    def _remember(self, moments: Sequence[Sequence[Tensor]]) -> None:
        """References and addresses by which later steps see whether the batch can be used again."""
        self._kept = self._state_tensors()
        # Whoever exchanges a parameter's states by their memory exchanges these as well.
        self._watched = [*chain(*moments, *self.scales, self._masters)]
        self._watched += [state["step"] for state in self.states]
        self._layouts, self._shapes = [*map(_layout, self._own)], [p.shape for p in self._own]
        self._contiguous, self._places = self._are_contiguous(), self._addresses()
        self._of_one = [i for i, p in enumerate(self._own) if p.numel() == 1]
        # Addresses of gradients, parameters and weights.
        self._found = np.zeros((3, len(self.params)), np.int64)
        for table in self.tables:
            table.fill_states((*self.moments, *self.scales))

    @property
    def sign(self) -> float:
        """Factor that gives gradients their direction: -1 to maximise."""
        return -1.0 if self.group["maximize"] else 1.0

    def column(self, values: Any) -> Any:
        """A tensor as a column, on this device: NumPy's array of it where loops work."""
        if not isinstance(values, Tensor):
            return values
        return values.cpu().numpy() if self.on_host else values.to(self.device)

    def number(self, value: Any) -> Any:
        """A number for all parameters: a plain one where loops work, of a tensor one, ``()``."""
        if not isinstance(value, Tensor):
            return value
        if self.on_host:
            return value.detach().to("cpu", torch.float64).numpy().item()
        # In one call: there are devices without float64.
        return value.to(self.device, self.exact).reshape(())

    @property
    def steps(self) -> Any:
        """Steps that each parameter has taken, with shape ``(tensors)``, in the widest type."""
        # A copy: the column is written to before the step is over.
        step = self.columns["step"]
        return step.astype(np.float64) if self.on_host else step.to(self.exact, copy=True)

    def store(self, name: str, values: Any) -> None:
        """Writes new values of a column."""
        if self.on_host:
            self.columns[name][...] = values
        else:
            self.columns[name].copy_(values)
        if not self.views:
            rows = [state[name] for state in self.states]
            torch._foreach_copy_(rows, list(self.columns[name].unbind()))

    def refresh(self, given: Gradients) -> bool:
        """Reads weights, gradients and addresses; False if the batch must be built anew."""
        if not torch.compiler.is_compiling():
            self._own = [local(p) for p in self.params] if self.sharded else self.params
            if not self._is_as_built():
                return False
        self.weights, self.inverse_scale = self._masters or self._own, None
        if self._firsts is not None:
            steps = tensor_of(self.columns["step"])
            self.seeds = self.column(seeds_at(self.index, steps, self._firsts))
        if (scale := given.grad_scale) is not None:
            self.inverse_scale = scale.to(self.device, self.exact).reshape(()).reciprocal()
        grads, has_grad, in_step = map(self._of, given[:3])
        self._set_flags(has_grad, in_step)
        if self.tables:
            return self._fill_tables([*grads])
        for p in self.params:
            dense_gradient(p)
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
        """Tensors of parameters, those that share a bucket as contiguous views with one axis."""
        found = [*tensors]
        for i in self._shared:
            if (t := found[i]) is not None and t.ndim != 1 and t.is_contiguous():
                found[i] = t.view(-1)
        return found

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
            self.has_grad, self.in_step = (
                self.column(torch.stack([flags[here] for here in some]))
                for some in (has_grad, in_step)
            )
            self._flags = None if recording else (has_grad, in_step)

    def _is_as_built(self) -> bool:
        """Whether parameters have their layout, wherever they lie now, and states their place."""
        states = self._state_tensors()
        if len(states) != len(self._kept) or not all(map(is_, states, self._kept)):
            return False
        # Memory may have been exchanged through `.data`. Another shape in the same place is noticed
        # where loops are given the gradients.
        places, count = self._addresses(), len(self._own)
        if (places == self._places).all() and self.tables and self._contiguous:
            return self._are_contiguous()
        is_moved = (places[count:] != self._places[count:]).any()
        self._places = places
        return not is_moved and [*map(_layout, self._own)] == self._layouts

    def _addresses(self) -> NDArray[np.int64]:
        return addresses_of([*self._own, *self._watched])

    def _are_contiguous(self) -> bool:
        return all(map(Tensor.is_contiguous, self._own))

    def _state_tensors(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self.states))]

    def _fill_tables(self, grads: list[Tensor | None]) -> bool:
        """Lays gradients out in memory as their parameters are; False if loops cannot take one."""
        dtype, given = self.tables[0].types[0], [g for g in grads if g is not None]
        alike = (
            self._contiguous
            and len(given) == len(grads)
            and {*map(type, given)} == {Tensor}
            and {*map(attrgetter("dtype"), given)} == {dtype}
            and [*map(attrgetter("shape"), given)] == self._shapes
            and all(map(Tensor.is_contiguous, given))
            # Of a view that is yet to be negated only one element lies without gaps.
            and not any(given[i].is_neg() for i in self._of_one)
        )
        if not alike and not self._lay_out(grads, dtype):
            return False
        self.grads, found = grads, self._found
        has_grad = np.ones(len(grads), np.bool_)
        if len(given) < len(grads):
            has_grad[:] = [g is not None for g in grads]
        found[0] = 0
        found[0, has_grad] = addresses_of([g for g in grads if g is not None])
        found[1:] = self._places[: len(grads)]
        if self._masters:
            found[2] = addresses_of(self._masters)
        for table in self.tables:
            table.fill(found, has_grad)
        return True

    def _lay_out(self, grads: list[Tensor | None], dtype: torch.dtype) -> bool:
        """Copies gradients that are not laid out so; False if loops cannot take one."""
        if [*map(_layout, self._own)] != self._layouts:
            return False
        for i, (g, own) in enumerate(zip(grads, self._own, strict=True)):
            if g is not None:
                dense_gradient(self.params[i])
                _check_shape(g, own)
                if type(g.detach()) is not Tensor or g.dtype is not dtype:
                    return False
                if g.stride() != own.stride() or g.is_neg():
                    grads[i] = torch.empty_like(own, dtype=dtype).copy_(g)
        return True

    def finish(self) -> None:
        """Rounds masters to their parameters, tells autograd, and frees weights and gradients."""
        # Only those that were worked on: a graph may still need the others as they are.
        in_step = self._flags[1] if self._flags else [True] * len(self._own)
        written = list(compress(self._own, in_step))
        if self.tables:
            torch.autograd.graph.increment_version(written)
        elif self._masters:
            torch._foreach_copy_(written, [*compress(self._masters, in_step)])
        self.grads, self.weights, self._own, self.buckets = [], [], [], []


def _layout(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _check_shape(gradient: Tensor, parameter: Tensor) -> None:
    if gradient.shape != parameter.shape:
        raise InputError(
            f"Expected gradients of their parameters' shapes. Found shape {tuple(gradient.shape)} "
            f"for {tuple(parameter.shape)}. Remedy: zero_grad(), and a new optimizer."
        )


def sum_type_of(weight: Tensor, is_exact: bool) -> torch.dtype:
    """Type of sums over elements: the widest beside codes, which a last digit may change."""
    return exact(weight.device) if is_exact else wide(weight.dtype)


def types_for_loops(
    parameter: Tensor,
    gradient: Tensor | None,
    state: dict[str, Any],
    large: Sequence[str],
    is_exact: bool,
) -> Types | None:
    """Types of a parameter that loops can take, with large states of some names; None: they cannot.

    Its tensors must be plain ones that lie in memory alike, without gaps.
    """
    own, masters = local(parameter), [local(state[MASTER])] if MASTER in state else []
    moments, grad = [local(state[name]) for name in large], own if gradient is None else gradient
    # A plain parameter's detached memory is a plain tensor; a wrapper's is not.
    kept = (own.detach(), *moments, *masters)
    axes = sorted(range(own.ndim), key=own.stride().__getitem__, reverse=True)
    has_gaps = not own.detach().permute(axes).is_contiguous()
    if any(type(t) is not Tensor for t in (grad.detach(), *kept)) or has_gaps:
        return None
    weight = (masters or [own])[0]
    total = sum_type_of(weight, is_exact)
    types = (grad.dtype, weight.dtype, moments[0].dtype, own.dtype, total)
    fits = {*types} <= {*TYPES, torch.uint8} and len({t.dtype for t in moments}) == 1
    states = (torch.float32, torch.float64, *[torch.uint8] * own.is_contiguous())
    fits = fits and types[2] in states
    fits = fits and {t.dtype for t in masters} <= {torch.float32}
    layout = own.shape, own.stride()
    alike = all((t.shape, t.stride()) == layout and not t.is_neg() for t in kept)
    return types if fits and alike else None
