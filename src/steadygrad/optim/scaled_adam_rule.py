r"""The rule of ScaledAdam: arithmetic on columns with one number for each parameter, two passes.

A parameter is thought of as :math:`p = r\, \bar p` with :math:`\bar p` of root mean square 1.
Adam's second moment scales the gradient, the step is proportional to :math:`r`, and
:math:`\log r` is learned too, once in ``size_update_period`` steps :math:`P`. At step
:math:`t = 0, 1, \dots`,

.. math::
    v &\leftarrow \beta_2 v + (1 - \beta_2)\, g^2 \qquad
    \hat v = v / (1 - \beta_2^{t+1}) \\
    \delta &\leftarrow \beta_1 \delta + (1 - \beta_1) \left(
        - \eta\, \max(r, r_{\min})\, \frac{g}{\sqrt{\hat v} + \epsilon} + s\, p \right) \\
    p &\leftarrow p + \delta

with :math:`s` the size step, zero unless :math:`t \bmod P = P - 1`. The momentum is one of updates
and not of gradients, so that a new learning rate acts gradually. A parameter of one element has no
size: its learning rate is :math:`\eta` times ``scalar_lr_scale``, and its value is bounded.

The gradient may be clipped first, see :mod:`steadygrad.optim.clipping`.

The inner products :math:`h = p \cdot g`, from which sizes are learned, cost a pass over the
weights. They are needed before the update at size steps only; elsewhere the update takes them
along.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.numerics import may_hold, square_sums
from steadygrad.optim import passes
from steadygrad.optim.buckets import Bucket
from steadygrad.optim.passes import Pass, cast, clamp, inverse, library_of, root, where

CORRECTED_BELOW = 0.99  # the second moment is corrected until its correction is this near one
LARGEST_SIZE_STEP = 0.1  # in the current recipe, as a fraction of the size
Options = Mapping[str, Any]


class UpdateOptions(NamedTuple):
    """Numbers of a group that the update needs."""

    beta1: float
    beta2: float
    eps: float
    before: float  # bound on weights before the update; infinite: none
    after: float  # bound on weights after the update; infinite: none


def is_original(group: Options) -> bool:
    """Whether the rule is that of 2022."""
    return bool(group["recipe"] == "stateless7")


class StepScales(NamedTuple):
    """Factors of the update, each with shape ``(tensors)``."""

    taken: Any  # whether the parameter takes the step
    clip: Any  # on the gradient: clipping and direction
    second_moment: Any  # 1 / (1 - beta2**(t + 1)), or 1
    gradient: Any  # on the scaled gradient
    weight: Any  # s, on the weight; zero for one-element parameters


def step_scales(
    step: Any, known: tuple[Any, Any] | None, clip: Any, taken: Any, lr: Any, group: Options
) -> StepScales:
    """Factors of the update, from the steps of each parameter before this one.

    ``known`` is the root mean square of each and its size step, None for one-element parameters;
    ``clip`` a factor on all gradients: clipping and direction.
    """
    remaining = 1 - group["betas"][1] ** (step + 1)
    factor, one = inverse(remaining), library_of(step).ones_like(step)
    # In 2022 one-element parameters were corrected without end.
    if known is not None or not is_original(group):
        factor = where(remaining < CORRECTED_BELOW, factor, 1.0)
    if known is None:
        lr = one * group["scalar_lr_scale"] * lr
        return StepScales(taken, clip * one, factor, -lr, 0.0 * one)
    rms, size = known
    along = -lr * clamp(rms, group["param_min_rms"], None)
    return StepScales(taken, clip * one, factor, along, size)


def size_step(
    known: Mapping[str, Any], ring: Any, rms: Any, step: Any, sized: Any, lr: Any, group: Options
) -> tuple[Any, Any, Any]:
    r"""New sizes, the mean squares :math:`q` and size steps.

    .. math::
        q &\leftarrow \beta_2^P q + (1 - \beta_2^P)\, \frac{1}{P} \sum_i h_i^2 \\
        s &= - \eta\, c \sqrt{1 - \beta_2^{P k}}\; \frac{\sum_i h_i}{\sqrt q + \epsilon}

    with :math:`h_i = p \cdot g` the gradients of the log size over the last :math:`P` steps,
    :math:`c` the ``scalar_lr_scale`` and :math:`k` the number of size steps so far.

    ``known`` are the columns so far; ``ring`` the last :math:`h`, this step's among them, which
    count at size steps only; ``rms`` each parameter's root mean square now; ``sized`` says which
    are at a size step, or at the first.
    """
    period = group["size_update_period"]
    # The first step takes the size that the weights then have. With a period of one it is a size
    # step too many: nothing has been averaged yet.
    due, rms = sized & (step > 0), where(sized, rms, known["param_rms"])
    beta, mean = group["betas"][1] ** period, known["scale_exp_avg_sq"]
    mean = where(due, mean * beta + (ring * ring).mean(1) * (1 - beta), mean)
    scale = cast(root(1 - beta ** ((step + 1) // period)), mean.dtype)
    # The product of a tensor and a number is rounded to the tensor's type.
    lr = (lr.to(mean.dtype) if isinstance(lr, Tensor) else lr) * group["scalar_lr_scale"]
    raw = -lr * scale * ring.sum(1) / (passes.rounded_root(mean) + group["eps"])
    return rms, mean, where(due, _bounded(raw, rms, lr, group), 0.0)


def remembered(ring: Any, size_gradient: Any, step: Any, taken: Any) -> Any:
    """The last gradients of the log sizes, with this step's.

    A gradient whose square times twice the period overflows counts as zero: it came with weights
    that have grown since the last size step, which did not need it.
    """
    period, size_gradient = ring.shape[1], cast(size_gradient, ring.dtype)
    place = passes.counted(ring) == (step % period)[:, None]
    usable = where(size_gradient * size_gradient * (2 * period) < torch.inf, size_gradient, 0.0)
    return where(place & taken[:, None], usable[:, None], ring)


def _bounded(raw: Any, rms: Any, lr: float | Tensor, group: Options) -> Any:
    """A size step that makes no small parameter smaller, and no large one larger."""
    raw, most = where(rms < group["param_min_rms"], 0.0, raw), group["param_max_rms"]
    if is_original(group):
        back = library_of(raw).zeros_like(raw) - lr * group["size_update_period"]
        return where(rms > most, back, raw)
    raw = clamp(raw, -LARGEST_SIZE_STEP, LARGEST_SIZE_STEP)
    return library_of(raw).minimum(raw, (most - rms) / rms)


def _sums(bucket: Bucket, by: tuple[Tensor], options: tuple[()]) -> Tensor:
    squares = bucket.grad_squares()
    if not may_hold(by[0]):
        return torch.stack([squares, torch.zeros_like(squares), torch.zeros_like(squares)])
    return torch.stack([squares, bucket.products(), square_sums(bucket.own, bucket.sum_dtype)])


def _update(
    bucket: Bucket, by: StepScales, options: UpdateOptions, *, known: bool = False
) -> Tensor | None:
    products, (delta, v) = None if known else bucket.products()[None], bucket.moments
    # The correction of `v` and the rest of the average go into factors: of eps, of the gradient's
    # part and of the weight's.
    bias = root(by.second_moment)
    along_g = by.gradient / bias * (1 - options.beta1)
    along_p = by.weight * (1 - options.beta1)
    columns = by.taken, by.clip, options.eps / bias, along_g, along_p
    taken, clip, eps, along_g, along_p = bucket.each(v.dtype, *columns)
    decay1, decay2 = passes.decays_of(bucket, (options.beta1, options.beta2), taken)
    g = bucket.sanitized(taken, v.dtype).mul_(clip)
    passes.add_squares(bucket, v.mul_(decay2), g, 1 - options.beta2)
    d = torch.maximum(v, bucket.floors()) if bucket.coded else v
    d = passes.rounded_root(d) if bucket.is_exact else d.sqrt()
    g.div_(d.add_(eps))
    del d  # Two temporaries at a time, no more.
    g.mul_(along_g)
    p = bucket.weights
    # A weight that is not finite must not reach `delta` by way of zero. In the wider type, which a
    # weight with no axis would not bring about.
    own = p.to(bucket.dtype, copy=True).masked_fill_(along_p == 0, 0.0)
    if bucket.is_exact:
        g.add_(own.mul_(along_p))
    else:
        g.addcmul_(own, along_p)
    delta.mul_(decay1).add_(g)
    del g, own
    _bound_(p, taken, options.before)
    # Zero times an average that is finite: a step that is not taken leaves the weight as it is.
    p.add_(delta * taken)
    _bound_(p, taken, options.after)
    bucket.keep_moments(by.taken)
    bucket.keep_weights()
    return products


def _bound_(weights: Tensor, taken: Tensor, bound: float) -> None:
    if bound < torch.inf:
        weights.copy_(torch.where(taken, weights.clamp(-bound, bound), weights))


_LOOPS, _KERNELS = (f"steadygrad.optim.{name}.scaled_adam:" for name in ("loops", "kernels"))
# This process's :math:`|g|^2`, :math:`p \cdot g` and :math:`|p|^2`, by whether the latter two are
# needed.
sums = Pass(_sums, 3, f"{_LOOPS}sums_kernel", kernel=f"{_KERNELS}sums", columns=1)
# Moves `v`, `delta` and `p`: the equations above, with two temporaries. Its sums are
# :math:`p \cdot g` with the weights before the update; the second has none, as they are known.
update = Pass(
    _update, 1, f"{_LOOPS}update_kernel", (), f"{_KERNELS}update", len(StepScales._fields)
)
update_by_known = Pass(partial(_update, known=True))
