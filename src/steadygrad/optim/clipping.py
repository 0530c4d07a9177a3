r"""ScaledAdam's clipping by the median of recent gradient norms, without host synchronisation.

The norm is that of the scaled gradients, because the update goes by them,

.. math:: n_t^2 = \sum_i r_i^2\, |g_i|^2

over the parameters of a group with root mean squares :math:`r_i`. Once in a period the threshold
becomes ``clipping_scale`` times the median of the last norms, and gradients above it are scaled
down to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.numerics import may_hold
from steadygrad.optim.passes import cast, counted, inverse, root, tensor_of, where

# Steps at which the current recipe takes a first, doubled threshold from as many norms.
EARLY = (10, 20, 40)


class Clipping(NamedTuple):
    """A group's memory of its norms."""

    norms: Any  # the last, with shape (period); step t in place t mod period
    threshold: Any  # norm above which gradients are scaled down; infinite before there is one
    clipped: Any  # how often that happened since the threshold was last taken


def total_norm(terms: Any, shapes: Sequence[tuple[Any, ...]]) -> Any:
    """Root of the sum of a group's terms, in float32 and with shape ``()``.

    From :math:`r_i^2 |g_i|^2` of each parameter, and types and shapes, none but for float64. The
    original adds up parameters of one shape in their own type, and these sums in float32, by the
    order of their shapes. That is repeated: the threshold carries the rounding into later steps.
    """
    if not shapes:
        return cast(root(terms.sum()), torch.float32)
    stacks: dict[tuple[Any, ...], list[Tensor]] = {}
    for term, shape in zip(tensor_of(terms).unbind(), shapes, strict=True):
        stacks.setdefault(shape, []).append(term)
    total = torch.zeros((), device=terms.device)
    for shape in sorted(stacks):
        total = (total + torch.stack(stacks[shape]).sum()).to(torch.float32)
    # Through float64, because not every CPU library rounds a float32 root correctly.
    return total.to(torch.float64).sqrt().to(torch.float32)


def clip(
    known: Clipping, norm: Any, step: Any, ok: Any, *, scale: float, original: bool
) -> tuple[Clipping, Any]:
    """The memory with this step's norm, and the factor on the gradients.

    ``step`` counts the steps before this one, of which the first is never clipped; ``scale`` is the
    threshold over the median; in the ``original`` there is none before a whole period is over.
    """
    period, own = len(known.norms), known.norms.dtype
    taken, norm = ok & (step > 0), cast(norm, own)
    place = counted(known.norms) == step % period
    # A norm may overflow where each gradient is finite: it must not switch the threshold off.
    seen = place & taken & (norm < torch.inf)
    norms = where(seen, norm, known.norms)
    threshold, clipped = known.threshold, known.clipped
    early, due = [n for n in EARLY if n < period and not original], step % period == 0
    firsts = [step == n for n in early]
    for first in firsts:
        due = due | first
    due = due & taken
    if may_hold(due):
        ordered = tensor_of(norms).sort().values
        ordered = cast(ordered if isinstance(norms, Tensor) else ordered.numpy(), threshold.dtype)
        found = scale * ordered[min(period - 1, period // 4 * 2)]
        for n, first in zip(early, firsts, strict=True):
            # The places of steps not yet taken hold zeros, and come first.
            median = ordered[period - n + min(n - 1, n // 4 * 2)]
            found = where(first, 2 * scale * median, found)
        threshold = where(due, found, threshold)
        clipped = where(due, 0.0, clipped)
    # A product with the reciprocal, in float32, as the original's quotient is computed.
    factor = inverse(norm + 1e-20) * cast(threshold, own)
    factor = where(factor > 1, 1.0, factor)
    # Without a threshold infinity over an infinite norm is no number.
    factor = where(taken & (threshold < torch.inf), factor, 1.0)
    return Clipping(norms, threshold, clipped + (factor < 1)), factor
