"""Buckets: parameters of a batch that calls of operators work on together, as flat tensors.

A step then takes a number of calls that does not grow with the number of parameters. Factors, one
number for each parameter, are spread over its elements. A large parameter is a bucket of its own,
worked on where and as it lies, with factors of shape ``()``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from steadygrad.numerics import exact, inner_products, part_sums, square_sums, wide
from steadygrad.optim.codes import CODES, decode, encode, floors, row_of

if TYPE_CHECKING:
    from steadygrad.optim.batch import ParamBatch

# Elements that are worked on together even where no parameter has as many, temporaries and all.
BUCKET = 2**20
# On a CPU, elements of a bucket, which are to stay in the caches, and of a parameter in it: copies
# and spread factors of a larger one cost more than calls.
TOGETHER, LARGEST = 2**16, 2**13


class Codes(NamedTuple):
    """Scales, rows and random bits of moments that are codes: :mod:`steadygrad.optim.codes`."""

    exponents: tuple[list[Tensor], ...]  # of their scales, like the moments
    rows: list[int]  # elements of a row of each parameter
    seeds: Tensor | None = None  # random bits of the batch's parameters, `(2, tensors)`


@dataclass
class Bucket:
    """Some parameters of a batch in a step; one that takes no part has no elements here.

    A rule moves ``weights`` and ``moments`` in place, and then keeps them.
    """

    places: list[int]  # in the batch
    lengths: tuple[Tensor, Tensor] | None  # places and elements on the device; None: one alone
    states: tuple[list[Tensor], ...]  # local large states, all in one type
    codes: Codes | None  # None: the states are numbers
    # Of a step: local weights, or the float32 masters of 16-bit ones; local gradients in any
    # floating type; elements of each; and the factor on every gradient that is read.
    own: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    inverse_scale: Tensor | None = None
    # Of a pass: what it has gathered.
    _weights: Tensor | None = None
    _moments: tuple[Tensor, ...] | None = None
    _owners: Tensor | None = None

    def in_step(self, batch: "ParamBatch") -> "list[Bucket]":
        """This bucket with the weights and gradients of a step."""
        own, grads = ([given[i] for i in self.places] for given in (batch.weights, batch.grads))
        if self.lengths is not None and not {*map(type, grads)} <= {Tensor, type(None)}:
            # A wrapped gradient is no part of a flat tensor.
            return [one for i in self.places for one in bucket_of(batch, [i]).in_step(batch)]
        lengths, states, codes = self.lengths, self.states, self.codes
        scales = codes.exponents if codes is not None else ()
        works = [gradient is not None for gradient in grads]
        if not all(works):
            own, *rest = (
                [t if is_in else t.new_empty(0) for t, is_in in zip(some, works, strict=True)]
                for some in (own, *states, *scales)
            )
            states, scales = tuple(rest[: len(states)]), tuple(rest[len(states) :])
            grads = [t.new_empty(0) if g is None else g for t, g in zip(own, grads, strict=True)]
            if lengths is not None:
                # Not copied from the host, which would wait for it.
                index, counts = lengths
                lengths = index, counts * batch.in_step.index_select(0, index)
        if lengths is not None:
            own, grads = [*map(_line, own)], [*map(_line, grads)]
        if codes is not None:
            codes = Codes(scales, codes.rows, batch.seeds)
        sizes = [*map(Tensor.numel, own)]
        return [Bucket(self.places, lengths, states, codes, own, grads, sizes, batch.inverse_scale)]

    @property
    def sum_dtype(self) -> torch.dtype:
        """Type of sums over elements: the widest for codes, which a last digit may change."""
        own = self.own[0]
        return wide(own.dtype) if self.codes is None else exact(own.device)

    @property
    def dtype(self) -> torch.dtype:
        """The wider type of weights and moments."""
        own, state = self.own[0].dtype, self.moments[0].dtype
        return own if own is state else torch.promote_types(own, state)

    @property
    def weights(self) -> Tensor:
        """The weights as one tensor."""
        if self._weights is None:
            self._weights = _flat(self.own)
        return self._weights

    @property
    def moments(self) -> tuple[Tensor, ...]:
        """The large states, each as one tensor; numbers in float32 if they are codes."""
        if self._moments is None:
            states: Sequence[Sequence[Tensor]] = self.states
            if self.codes is not None:
                kinds = zip(self.states, self.codes.exponents, CODES, strict=True)
                states = [
                    [
                        decode(*one, code)
                        for one in zip(own, exponents, self.codes.rows, strict=True)
                    ]
                    for own, exponents, code in kinds
                ]
            self._moments = tuple(map(_flat, states))
        return self._moments

    def floors(self) -> Tensor:
        """Least second moments that codes stand for, one for each element."""
        assert self.codes is not None
        given = zip(self.codes.exponents[1], self.own, self.codes.rows, strict=True)
        return _flat([floors(exponents, weight.shape, row) for exponents, weight, row in given])

    def gradient(self) -> Tensor:
        """The gradients as one tensor without their loss scale, then in float32 at least."""
        gradient = _flat(self.grads)
        if self.inverse_scale is None:
            return gradient
        dtype = wide(gradient.dtype)
        return gradient.to(dtype) * self.inverse_scale.to(dtype)

    def sanitized(self, taken: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of :meth:`gradient`; zeros where an element does not take the step.

        Decided on the device: the host does not wait to learn which.
        """
        gradient = self.gradient()
        if gradient is self.grads[0] and gradient.dtype == dtype:
            return torch.where(taken, gradient, 0.0)
        return gradient.to(dtype).masked_fill_(~taken, 0.0)

    def each(self, dtype: torch.dtype, *columns: Tensor) -> list[Tensor]:
        """Columns ``(tensors)`` with an entry for each element; ``()`` for a parameter alone."""
        if self.lengths is None:
            return [column[self.places[0]].to(dtype) for column in columns]
        if self._owners is None:
            # Told the length, for which the host would wait.
            self._owners = torch.repeat_interleave(*self.lengths, output_size=sum(self.sizes))
        if len(columns) == 1:
            return [columns[0].to(dtype).index_select(0, self._owners)]
        return [*torch.stack(columns).to(dtype).index_select(1, self._owners).unbind()]

    def parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """A gathered tensor's part of each parameter."""
        return [tensor] if self.lengths is None else tensor.split(self.sizes)

    def grad_squares(self) -> Tensor:
        """Squared norm of each gradient, ``(places)``."""
        is_scaled = self.inverse_scale is not None
        return square_sums(self.parts(self.gradient()) if is_scaled else self.grads, self.sum_dtype)

    def products(self) -> Tensor:
        """Inner product of each weight and its gradient, ``(places)``."""
        dtype = self.sum_dtype
        x, g = self.weights.to(dtype), self.gradient().to(dtype)
        if self.lengths is None and x.numel() > LARGEST:
            return inner_products([x], [g], dtype)
        return part_sums(x * g, self.sizes).to(dtype)

    def keep_weights(self) -> None:
        """Writes gathered weights to the parameters' own."""
        self._keep(self.own, self.parts(self.weights))

    def keep_moments(self) -> None:
        """Writes gathered moments to the parameters' own, unless they are codes."""
        if self.codes is None:
            self._keep([*chain(*self.states)], [*chain(*map(self.parts, self.moments))])

    def _keep(self, own: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        # A parameter alone is moved where it lies.
        if self.lengths is not None:
            pairs = [(t, part) for t, part in zip(own, parts, strict=True) if t.numel()]
            parts = [part if t.ndim == 1 else part.view_as(t) for t, part in pairs]
            torch._foreach_copy_([t for t, _ in pairs], parts)

    def keep_codes(self, taken: Tensor) -> None:
        """Rounds moments to their codes, of parameters that take the step."""
        assert self.codes is not None
        kinds = zip(self.states, self.codes.exponents, self.moments, CODES, strict=True)
        for own, exponents, moment, code in kinds:
            given = zip(
                self.places, own, exponents, self.parts(moment), self.codes.rows, strict=True
            )
            for i, old, scale, numbers, row in given:
                pair = encode(numbers, self.codes.seeds[:, i], row, code)
                old.copy_(torch.where(taken[i], pair[0].view_as(old), old))
                scale.copy_(torch.where(taken[i], pair[1].view_as(scale), scale))


def bucket_of(batch: "ParamBatch", places: list[int]) -> Bucket:
    """Parameters at some places with what stays of them from step to step."""
    states, codes = tuple([own[i] for i in places] for own in batch.moments), None
    if batch.coded[places[0]]:
        scales = tuple([own[i] for i in places] for own in batch.scales)
        codes = Codes(scales, [row_of(batch.params[i]) for i in places])
    if len(places) == 1:
        return Bucket(places, None, states, codes)
    counts = [batch.weights[i].numel() for i in places]
    index, lengths = (torch.tensor(numbers, device=batch.device) for numbers in (places, counts))
    return Bucket(places, (index, lengths), tuple([*map(_line, own)] for own in states), codes)


def places_of(batch: "ParamBatch") -> list[list[int]]:
    """Places of the parameters that are worked on together.

    A bucket of several takes six tensors more than a parameter alone, and no more memory than two
    temporaries of the largest parameter, or of ``BUCKET``.
    """
    sizes, is_cpu = [weight.numel() for weight in batch.weights], batch.device.type == "cpu"
    room = TOGETHER if is_cpu else max(*sizes, BUCKET) // 8
    # A wrapper is worked on as it is.
    alone = [
        batch.group["foreach"] is False
        or size > (LARGEST if is_cpu else room)
        or type(weight.detach()) is not Tensor
        for size, weight in zip(sizes, batch.weights, strict=True)
    ]
    buckets = [[i] for i, is_alone in enumerate(alone) if is_alone]
    for is_coded in (False, True):
        left = 0
        for i, size in enumerate(sizes):
            if not alone[i] and batch.coded[i] is is_coded:
                if size > left:
                    buckets.append([])
                    left = room
                buckets[-1].append(i)
                left -= size
    return buckets


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Some tensors as one with a single axis; a tensor alone as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])


def _line(tensor: Tensor) -> Tensor:
    """A view of a tensor with a single axis, if there is one; else the tensor."""
    return tensor.view(-1) if tensor.ndim != 1 and tensor.is_contiguous() else tensor
