"""Buckets: parameters of a batch that calls of operators work on together, as flat tensors.

A step then takes a number of calls that hardly grows with the number of small parameters. Factors,
one number for each parameter, are spread over its elements. A large parameter is alone in its
bucket, worked on where and as it lies, with factors of shape ``()``.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from steadygrad.numerics import inner_products, part_sums, square_sums, wide
from steadygrad.optim.codes import CODES, decode, encode, floors, row_of

if TYPE_CHECKING:
    from steadygrad.optim.batch import ParamBatch

# Elements that are worked on together even where no parameter has as many, temporaries and all.
BUCKET = 2**20
# On a CPU, elements of a bucket, which are to stay in the caches, and of a parameter in it: copies
# and spread factors of a larger one cost more than calls.
TOGETHER, LARGEST = 3 * 2**15, 2**14
# Elements of a parameter, in the mean, from which factors are spread by copies, not by indices.
LONG = 512


class Bucket:
    """Some parameters of a batch in a pass; one that takes no part in the step has no elements.

    A rule moves ``weights`` and ``moments``, numbers also where they are kept as codes, in place,
    and then keeps them.

    Attributes:
        own: Local weights, or the float32 masters of 16-bit ones.
        sizes: Elements of each.
        coded: Whether moments are kept as codes.
        dtype: The wider type of weights and moments.
        is_exact: Whether each operation is rounded, as compiled loops do, so that both come to the
            same codes. Torch's own calls may take a product and a sum in one.
    """

    def __init__(
        self, batch: "ParamBatch", places: list[int], lengths: tuple[Tensor, Tensor] | None
    ) -> None:
        self._batch, self._places, self._lengths = batch, places, lengths
        self.own, grads = self._of(batch.weights), [batch.grads[i] for i in places]
        self._grads = [w if g is None else g for w, g in zip(self.own, grads, strict=True)]
        self.sizes, self.coded = [t.numel() for t in self.own], batch.coded[places[0]]
        self._states = [self._of(tensors) for tensors in batch.moments]
        self._scales = [self._of(tensors) for tensors in batch.scales if self.coded]
        self._rows = [row_of(batch.params[i]) for i in places] if self.coded else []
        own, state = self.own[0].dtype, batch.state_dtype
        self.dtype = own if own is state else torch.promote_types(own, state)
        self.sum_dtype = batch.sum_dtype
        self.is_exact = self.sum_dtype != wide(own)
        self._weights: Tensor | None = None
        self._moments: tuple[Tensor, ...] | None = None

    def _of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        works = [self._batch.grads[i] is not None for i in self._places]
        none = tensors[0] if all(works) else tensors[self._places[0]].new_empty(0)
        return [tensors[i] if own else none for i, own in zip(self._places, works, strict=True)]

    @property
    def weights(self) -> Tensor:
        """The weights as one tensor."""
        if self._weights is None:
            self._weights = _flat(self.own)
        return self._weights

    @property
    def moments(self) -> tuple[Tensor, ...]:
        """The large states, each as one tensor."""
        if self._moments is None:
            states = self._states
            if self.coded:
                states = [
                    [decode(*one, code) for one in zip(own, exponents, self._rows, strict=True)]
                    for own, exponents, code in zip(states, self._scales, CODES, strict=True)
                ]
            self._moments = tuple(map(_flat, states))
        return self._moments

    def floors(self) -> Tensor:
        """Least second moments that codes stand for, one for each element."""
        given = zip(self._scales[1], self.own, self._rows, strict=True)
        return _flat([floors(exponents, weight.shape, row) for exponents, weight, row in given])

    def gradient(self) -> Tensor:
        """The gradients as one tensor without their loss scale, then in float32 at least."""
        gradient, inverse = _flat(self._grads), self._batch.inverse_scale
        dtype = wide(gradient.dtype)
        return gradient if inverse is None else gradient.to(dtype) * inverse.to(dtype)

    def sanitized(self, taken: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of :meth:`gradient`; zeros where an element does not take the step."""
        return torch.where(taken, self.gradient(), 0.0).to(dtype)

    def each(self, dtype: torch.dtype, taken: Tensor, *columns: Tensor) -> list[Tensor]:
        """Columns ``(tensors)`` with an entry for each element; ``()`` for a parameter alone.

        The first one are flags, and remain so.
        """
        columns = taken, *columns
        if self._lengths is None:
            first, *rest = (column[self._places[0]].to(dtype) for column in columns)
        else:
            index, counts = self._lengths
            if not all(self.sizes):
                counts = counts * self._batch.in_step.index_select(0, index)
            # Told the length, for which the host would wait.
            total, entries = sum(self.sizes), torch.stack(columns).to(dtype)
            if total >= LONG * len(index) and index.device.type == "cpu" and not is_compiling():
                # A loop in torch over parameters, which on an accelerator were launches.
                spread = entries.new_empty(len(entries), total)
                own = entries.index_select(1, index).split(1, 1)
                torch._foreach_copy_(spread.split(self.sizes, 1), own)
            else:
                owners = torch.repeat_interleave(index, counts, output_size=total)
                spread = entries.index_select(1, owners)
            first, *rest = spread
        return [first.bool(), *rest]

    def parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """Parts of a gathered tensor, one for each parameter."""
        return [tensor] if self._lengths is None else tensor.split(self.sizes)

    def grad_squares(self) -> Tensor:
        """Squared norm of each gradient."""
        is_scaled = self._batch.inverse_scale is not None
        parts = self.parts(self.gradient()) if is_scaled else self._grads
        return square_sums(parts, self.sum_dtype)

    def products(self) -> Tensor:
        """Inner product of each weight and its gradient."""
        x = self.weights.to(wide(self.own[0].dtype))
        g = self.gradient().to(x.dtype)
        if self._lengths is None and x.numel() > LARGEST:
            if self.is_exact:
                return (x * g).sum(dtype=self.sum_dtype)[None]
            return inner_products([x], [g], self.sum_dtype)
        return part_sums(x * g, self.sizes).to(self.sum_dtype)

    def keep_weights(self) -> None:
        """Writes weights to the parameters' own."""
        self._keep([self.own], [self.weights])

    def keep_moments(self, taken: Tensor) -> None:
        """Writes moments to the parameters' own; codes only of parameters that take the step."""
        if not self.coded:
            self._keep(self._states, self.moments)
        # Of numbers there are no scales.
        kinds = zip(self._states, self._scales, self.moments, CODES, strict=False)
        seeds: Any = self._batch.seeds
        for own, exponents, moment, code in kinds:
            given = zip(self._places, own, exponents, self.parts(moment), self._rows, strict=True)
            for i, *kept, numbers, row in given:
                new = encode(numbers, seeds[:, i], row, code)
                for old, found in zip(kept, new, strict=True):
                    old.copy_(torch.where(taken[i], found.view_as(old), old))

    def _keep(self, kept: Iterable[Sequence[Tensor]], moved: Iterable[Tensor]) -> None:
        # A parameter alone is moved where it lies.
        if self._lengths is not None:
            pairs = zip(chain(*kept), chain(*map(self.parts, moved)), strict=True)
            found = [(t, p if t.ndim == 1 else p.view_as(t)) for t, p in pairs if len(p)]
            # A process may have no element of any.
            if found:
                torch._foreach_copy_([t for t, _ in found], [part for _, part in found])


def places_of(batch: "ParamBatch") -> list[list[int]]:
    """Places of the parameters that are worked on together, each in one bucket.

    A bucket of several takes a dozen tensors of its size, and so no more memory than two
    temporaries of the largest parameter, or of ``BUCKET``.
    """
    sizes, is_cpu = [weight.numel() for weight in batch.weights], batch.device.type == "cpu"
    room = TOGETHER if is_cpu else max(*sizes, BUCKET) // 10
    most = -1 if batch.group["foreach"] is False else LARGEST if is_cpu else room
    # A wrapper is worked on as it is.
    pairs, left = zip(sizes, batch.weights, strict=True), room
    alone = [n > most or type(weight.detach()) is not Tensor for n, weight in pairs]
    kinds = [*zip(alone, batch.coded, strict=True)]
    buckets: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: kinds[i]):
        if alone[i] or not buckets or sizes[i] > left or kinds[i] != kinds[buckets[-1][0]]:
            buckets.append([])
            left = room
        buckets[-1].append(i)
        left -= sizes[i]
    return buckets


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Some tensors as one with a single axis; a tensor alone as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])
