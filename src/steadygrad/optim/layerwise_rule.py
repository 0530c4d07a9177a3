r"""The rule of LANS and LAMB: Adam's directions, each as long as its layer's weight.

For each block (parameter) :math:`x` with gradient :math:`g`, at its step :math:`t`,

.. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1)\, \tilde g \qquad
    v \leftarrow \beta_2 v + (1 - \beta_2)\, \tilde g^2 \\
    d &= \sqrt{v / (1 - \beta_2^t)} + \epsilon \qquad
    u_m = \frac{m / (1 - \beta_1^t)}{d} + \lambda x \qquad
    u_g = \frac{\tilde g}{d} + \lambda x

with :math:`\phi` the identity between its bounds. **LANS** normalises each block's gradient,
:math:`\tilde g = g / \|g\|`, clipped elementwise where asked, and takes Nesterov's two directions,

.. math::
    x \leftarrow x - \eta\, \phi(\|x\|) \left( \frac{\beta_1}{\|u_m\|}\, u_m
        + \frac{1 - \beta_1}{\|u_g\|}\, u_g \right).

**LAMB** takes the first one whole. In the paper :math:`\tilde g = g`; NVLAMB divides all gradients
by :math:`\max(1, \|G\| / c)` first, with :math:`\|G\|` the norm over all parameters.

The norms of directions are known only after the moments have moved: hence three passes, over
gradients, moments and weights. Between them there is arithmetic on columns with one number for each
parameter.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadygrad.numerics import square_sums
from steadygrad.optim.buckets import Bucket
from steadygrad.optim.passes import (
    Pass,
    average,
    clamp,
    grad_sq_norms,
    inverse,
    library_of,
    move_by,
    root,
    second_moment,
    where,
)


class Options(NamedTuple):
    """Numbers of a group that the passes need."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    # On each element of LANS's normalised gradient.
    clip_value: float
    lr: float | Tensor
    # Least and greatest value of :math:`\phi`.
    low: float
    high: float
    adapt: bool  # whether there is a trust ratio


class Factors(NamedTuple):
    """Factors of the pass over the moments, each with shape ``(tensors)``."""

    taken: Tensor  # whether the parameter takes the step
    gradient: Tensor  # the gradient of the moments over the one given, negative to maximise
    unbias1: Tensor  # 1 / (1 - beta1**t)
    unbias2: Tensor  # 1 / (1 - beta2**t)


class Coefficients(NamedTuple):
    """Factors of the pass over the weights, each with shape ``(tensors)``."""

    taken: Tensor
    gradient: Tensor
    unbias2: Tensor
    along_m: Tensor  # on m / d
    along_g: Tensor  # on the gradient over d; zero in LAMB
    keep: Tensor  # on the weight: one less the weight decay of the directions


def factors(scale: Tensor, step: Tensor, taken: Tensor, options: Options) -> Factors:
    """Factors of the pass over the moments, from each parameter's steps with this one.

    ``scale`` is the gradient of the moments over the one given, ``(tensors)`` or ``()``.
    """
    # A first step that is not taken leaves the count at zero; its corrections go unused.
    t = clamp(step, 1, None)
    unbias = (inverse(1 - beta**t) for beta in (options.beta1, options.beta2))
    # The norm of a step that is not taken, and so the scale, may be NaN.
    return Factors(taken, where(taken, scale, 0.0), *unbias)


def coefficients(sums: Tensor, by: Factors, options: Options) -> Coefficients:
    r"""Factors of the pass over the weights: learning rate times trust ratio.

    Args:
        sums: Squared norms of :math:`x, u_m` and, in LANS, :math:`u_g` over all shards, with shape
            ``(2, tensors)`` or ``(3, tensors)``.
        by: Factors of the pass over the moments.
        options: The group's options.
    """
    x, m, *g = sums
    # Rounded as a product with a plain number is, whatever type a tensor `lr` has.
    rate = library_of(x).ones_like(x) * options.lr
    bounds = options.low, options.high, options.adapt
    numbers = options.beta1, 1 - options.beta1, options.weight_decay, *bounds
    along_m, along_g, keep = lengths(x, m, g[0] if g else None, by.taken, rate, numbers)
    return Coefficients(by.taken, by.gradient, by.unbias2, along_m * by.unbias1, along_g, keep)


def lengths(x: Any, m: Any, g: Any, taken: Any, lr: Any, numbers: Any) -> Any:
    """Factors on :math:`u_m`, on :math:`u_g` and on :math:`x` from their squared norms.

    Compiled loops call it, too, with numbers in place of columns.
    """
    beta1, rest1, decay, low, high, adapt = numbers
    x = clamp(root(x), low, high)
    share = lr if g is None else lr * beta1
    # Selected, not multiplied by zero: a norm that is not finite must not reach a weight.
    along_m = where(taken, share * trust_ratio(x, root(m), adapt), 0.0)
    if g is None:
        return along_m, 0.0 * along_m, 1 - decay * along_m
    along_g = where(taken, lr * rest1 * trust_ratio(x, root(g), adapt), 0.0)
    return along_m, along_g, 1 - decay * (along_m + along_g)


def trust_ratio(weight: Any, direction: Any, adapt: bool = True) -> Any:
    """Weight norm over the direction's, 1 where either is zero or the weight's is past its type."""
    ratio = weight / direction
    return where(adapt & (weight > 0) & (ratio < math.inf), ratio, 1.0)


def _directions(
    bucket: Bucket, by: Factors, options: Options, *, has_two: bool, moves: bool
) -> Tensor:
    taken, scale, unbias1, unbias2 = bucket.each(bucket.dtype, *by)
    g, last = _scaled(bucket, taken, scale, options.clip_value), None
    if moves:
        average(bucket, g, (options.beta1, options.beta2), taken)
    if moves and not bucket.coded:
        bucket.keep_moments(by.taken)
    if not has_two:
        del g  # Its memory is still in the caches.
    m, x, d = bucket.moments[0], bucket.weights, _denominator(bucket, unbias2, options)
    if has_two:
        g.div_(d).add_(x, alpha=options.weight_decay)
        last = square_sums(bucket.parts(g), bucket.dtype)[None]
        del g  # Two temporaries at a time, no more.
    u = (m * unbias1).div_(d)
    del d
    u.add_(x, alpha=options.weight_decay)
    sums = square_sums([*bucket.own, *bucket.parts(u)], bucket.dtype).view(2, -1)
    return sums if last is None else torch.cat([sums, last])


def _move_weights(bucket: Bucket, by: Coefficients, options: Options, *, has_two: bool) -> None:
    taken, scale, unbias2, along_m, along_g, keep = bucket.each(bucket.dtype, *by)
    if has_two or bucket.coded:
        u = _scaled(bucket, taken, scale, options.clip_value)
    if bucket.coded:
        # The pass before this one left them as they were.
        average(bucket, u, (options.beta1, options.beta2), taken)
    m = bucket.moments[0]
    u = u.mul_(along_g).addcmul_(m, along_m) if has_two else m * along_m
    u.div_(_denominator(bucket, unbias2, options))
    move_by(bucket, keep, u)
    del u  # Codes are made in its place.
    if bucket.coded:
        bucket.keep_moments(by.taken)


def _scaled(bucket: Bucket, taken: Tensor, scale: Tensor, clip_value: float) -> Tensor:
    r"""A copy of :math:`\tilde g`."""
    g = bucket.sanitized(taken, bucket.moments[0].dtype).mul_(scale)
    return g if clip_value == torch.inf else g.clamp_(-clip_value, clip_value)


def _denominator(bucket: Bucket, unbias2: Tensor, options: Options) -> Tensor:
    """:math:`d`."""
    v = second_moment(bucket, (options.beta1, options.beta2))
    return (v * unbias2).sqrt_().add_(options.eps)


class LayerwisePasses(NamedTuple):
    """The passes of a step; the second returns squared norms of weights and directions."""

    grad_sq_norms: Pass
    move_moments: Pass
    move_weights: Pass
    # Both of them by loops, a few tensors at a time, where no sum over shards is in between.
    move_in_waves: Pass


def _passes(has_two: bool) -> tuple[LayerwisePasses, Pass]:
    """The passes of a step with one direction or two, and the sums of the second, for reports."""
    loops, kernels = (f"steadygrad.optim.{name}.layerwise:" for name in ("loops", "kernels"))
    rows, constants = 2 + has_two, (has_two,)
    first, second = len(Factors._fields), len(Coefficients._fields)
    moments, directions = (partial(_directions, has_two=has_two, moves=m) for m in (True, False))
    weights = partial(_move_weights, has_two=has_two)
    passes = LayerwisePasses(
        grad_sq_norms,
        Pass(moments, rows, f"{loops}moments_kernel", constants, f"{kernels}move_moments", first),
        Pass(weights, 0, f"{loops}weights_kernel", constants, f"{kernels}move_weights", second),
        Pass(weights, 0, f"{loops}waves_kernel", constants),
    )
    return passes, Pass(directions, rows)


LANS_PASSES, LANS_DIRECTIONS = _passes(has_two=True)
LAMB_PASSES, LAMB_DIRECTIONS = _passes(has_two=False)
