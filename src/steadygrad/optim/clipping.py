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

# Steps at which the current recipe takes a first, doubled threshold from as many norms.
EARLY = (10, 20, 40)


class Clipping(NamedTuple):
    """A group's memory of its norms."""

    norms: Tensor  # the last, with shape (period); step t in place t mod period
    threshold: Tensor  # norm above which gradients are scaled down; infinite before there is one
    clipped: Tensor  # how often that happened since the threshold was last taken


def total_norm(terms: Tensor, shapes: Sequence[tuple[Any, ...]]) -> Tensor:
    """Root of the sum of a group's terms, in float32 and with shape ``()``.

    From :math:`r_i^2 |g_i|^2` of each parameter, and types and shapes, none but for float64. The
    original adds up parameters of one shape in their own type, and these sums in float32, by the
    order of their shapes. That is repeated: the threshold carries the rounding into later steps.
    """
    if not shapes:
        return terms.sum().sqrt().to(torch.float32)
    stacks: dict[tuple[Any, ...], list[Tensor]] = {}
    for term, shape in zip(terms.unbind(), shapes, strict=True):
        stacks.setdefault(shape, []).append(term)
    total = torch.zeros((), device=terms.device)
    for shape in sorted(stacks):
        total = (total + torch.stack(stacks[shape]).sum()).to(torch.float32)
    # Through float64, because not every CPU library rounds a float32 root correctly.
    return total.to(torch.float64).sqrt().to(torch.float32)


def clip(
    known: Clipping, norm: Tensor, step: Tensor, ok: Tensor, *, scale: float, original: bool
) -> tuple[Clipping, Tensor]:
    """Remembers this step's norm and returns the factor on the gradients.

    ``step`` counts the steps before this one, of which the first is never clipped; ``scale`` is the
    threshold over the median; in the ``original`` there is none before a whole period is over.
    """
    period = len(known.norms)
    taken = ok & (step > 0)
    place = torch.arange(period, device=norm.device) == step % period
    # A norm may overflow where each gradient is finite: it must not switch the threshold off.
    seen = place & taken & (norm < torch.inf)
    norms = torch.where(seen, norm.to(known.norms), known.norms)
    threshold, clipped = known.threshold, known.clipped
    early = [n for n in EARLY if n < period and not original]
    due = taken & torch.stack([step % period == 0, *(step == n for n in early)]).any()
    if may_hold(due):
        ordered = norms.sort().values.to(threshold.dtype)
        found = scale * ordered[min(period - 1, period // 4 * 2)]
        for n in early:
            # The places of steps not yet taken hold zeros, and come first.
            median = ordered[period - n + min(n - 1, n // 4 * 2)]
            found = torch.where(step == n, 2 * scale * median, found)
        threshold = torch.where(due, found, threshold)
        clipped = torch.where(due, 0.0, clipped)
    # A product with the reciprocal, in float32, as the original's quotient is computed.
    factor = ((norm.to(norms) + 1e-20).reciprocal() * threshold.to(norms)).clamp(max=1.0)
    # Without a threshold infinity over an infinite norm is no number.
    factor = torch.where(taken & (threshold < torch.inf), factor, 1.0)
    return Clipping(norms, threshold, clipped + (factor < 1)), factor
