r"""Exact gradients of single examples, and their squared norms, one layer at a time.

A layer's weight gradient is a sum over the batch, and the terms need no second backward pass:
they follow from the layer's input :math:`a` and its output gradient :math:`g`, both of which
the ordinary backward pass holds. Every layer has a pair of functions: ``*_gradients`` returns
each example's own gradient, of shape ``[B, *parameter.shape]``, and ``*_sq_norms`` its squared
Euclidean norm, of shape ``[B]``, by whichever way costs less. "Example" means an entry of the
leading dimension. Nothing is divided: the examples' gradients add up to the layer's gradient.

Half-precision tensors are widened to float32 first, so that no square overflows.

References:
    | Efficient Per-Example Gradient Computations (Goodfellow, 2015)
    | https://arxiv.org/abs/1510.01799
    | Large Language Models Can Be Strong Differentially Private Learners (Li et al., 2022)
    | https://arxiv.org/abs/2110.05679
    | Normalization Layer Per-Example Gradients are Sufficient to Predict Gradient Noise Scale
      in Transformers (Gray et al., 2024)
    | https://arxiv.org/abs/2411.00999
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ConvGeometry",
    "conv_bias_gradients",
    "conv_weight_gradients",
    "conv_weight_sq_norms",
    "embedding_gradients",
    "embedding_sq_norms",
    "layer_norm_weight_gradients",
    "linear_bias_gradients",
    "linear_weight_gradients",
    "linear_weight_sq_norms",
    "norm_bias_gradients",
    "rms_norm_weight_gradients",
    "sq_norms",
    "widen",
]

# Sorting the look-ups takes as long as clearing and reading this many rows for each (measured).
_RENUMBERING_COST = 4


@dataclass(frozen=True)
class ConvGeometry:
    """Steps of a convolution over its input: the arguments of ``nn.Conv1d`` or ``nn.Conv2d``.

    Tuples have one entry for each spatial dimension (one or two of them).
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    padding_mode: str = "zeros"


def widen(values: Tensor) -> Tensor:
    """Returns ``values`` in float32 at least."""
    return values if values.dtype.itemsize >= 4 else values.float()


def sq_norms(gradients: Tensor) -> Tensor:
    """Squared Euclidean norm of each example's gradient.

    Args:
        gradients: One gradient for each example, with shape ``[B, *shape]``.

    Returns:
        The squared norms, with shape ``[B]``, in float32 at least.
    """
    return widen(gradients).flatten(1).square().sum(1)


def linear_weight_gradients(inputs: Tensor, grads: Tensor) -> Tensor:
    r"""Each example's weight gradient of :math:`y = a W^T + b`: :math:`\sum_t g_t a_t^T`.

    Args:
        inputs: The layer's input, with shape ``[B, ..., K]``.
        grads: The gradient of its output, with shape ``[B, ..., L]``.

    Returns:
        The gradients, with shape ``[B, L, K]``, in float32 at least.
    """
    grads, inputs = _positions(widen(grads)), _positions(widen(inputs))
    return torch.bmm(grads.transpose(1, 2), inputs)


def linear_weight_sq_norms(inputs: Tensor, grads: Tensor) -> Tensor:
    r"""Squared norm of each example's weight gradient of a linear layer.

    With :math:`T` positions an example, :math:`\|\sum_t g_t a_t^T\|^2` equals the "ghost norm"
    :math:`\sum_{tt'} (a_t \cdot a_{t'})(g_t \cdot g_{t'})`, which never forms the gradient. It
    takes :math:`T^2 (K + L)` multiplications against :math:`T K L`; the smaller one is taken.

    Args:
        inputs: The layer's input, with shape ``[B, ..., K]``.
        grads: The gradient of its output, with shape ``[B, ..., L]``.

    Returns:
        The squared norms, with shape ``[B]``, in float32 at least.
    """
    positions, wide, narrow = _positions(inputs).shape[1], inputs.shape[-1], grads.shape[-1]
    if positions * (wide + narrow) < wide * narrow:
        return _ghost_sq_norms(inputs, grads)
    return sq_norms(linear_weight_gradients(inputs, grads))


def linear_bias_gradients(grads: Tensor) -> Tensor:
    """Each example's bias gradient of a linear layer: ``[B, ..., L]`` to ``[B, L]``."""
    return _sum_positions(widen(grads), features=1)


def embedding_gradients(
    indices: Tensor, grads: Tensor, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    """Each example's gradient of an embedding table.

    Args:
        indices: Rows looked up, with shape ``[B, ...]``.
        grads: The gradient of the output, with shape ``[B, ..., D]``.
        num_embeddings: Number of rows of the table, ``V``.
        padding_idx: The row that receives no gradient, if there is one.

    Returns:
        The gradients, with shape ``[B, V, D]``, in float32 at least.
    """
    rows, grads = _rows_and_grads(indices, grads, padding_idx)
    return _add_rows(rows, grads, num_embeddings)


def embedding_sq_norms(
    indices: Tensor, grads: Tensor, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    """Squared norm of each example's gradient of an embedding table.

    An example with ``T`` look-ups touches at most ``T`` rows, so a much longer table is
    renumbered first: memory is of the order ``B T D``, never ``B V D``. Arguments as in
    :func:`embedding_gradients`.

    Returns:
        The squared norms, with shape ``[B]``, in float32 at least.
    """
    rows, grads = _rows_and_grads(indices, grads, padding_idx)
    lookups = rows.shape[1]
    if num_embeddings <= _RENUMBERING_COST * lookups:
        return sq_norms(_add_rows(rows, grads, num_embeddings))
    ordered, order = rows.sort(dim=1)
    ranks = F.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))
    renumbered = torch.empty_like(rows, dtype=torch.int64).scatter_(1, order, ranks)
    return sq_norms(_add_rows(renumbered, grads, lookups))


def layer_norm_weight_gradients(
    inputs: Tensor, grads: Tensor, normalized_shape: Sequence[int], eps: float = 1e-5
) -> Tensor:
    r"""Each example's weight gradient of a layer norm: :math:`\sum_t g_t \odot \hat x_t`.

    Args:
        inputs: The layer's input, with shape ``[B, ..., *normalized_shape]``.
        grads: The gradient of its output, of the same shape.
        normalized_shape: The trailing dimensions that are normalized together.
        eps: Added to the variance.

    Returns:
        The gradients, with shape ``[B, *normalized_shape]``, in float32 at least.
    """
    inputs, shape = widen(inputs), list(normalized_shape)
    # On CPU the kernel with a weight is 1.6 times as fast as the one without (measured).
    normalized = F.layer_norm(inputs, shape, weight=inputs.new_ones(shape), eps=eps)
    return _sum_positions(normalized.mul_(grads), features=len(shape))


def rms_norm_weight_gradients(
    inputs: Tensor, grads: Tensor, normalized_shape: Sequence[int], eps: float | None = None
) -> Tensor:
    r"""Each example's weight gradient of an RMS norm: :math:`\sum_t g_t \odot \hat x_t`.

    Arguments and result as in :func:`layer_norm_weight_gradients`; ``eps=None`` stands, as in
    torch, for the machine epsilon of the inputs' dtype.
    """
    eps = torch.finfo(inputs.dtype).eps if eps is None else eps
    normalized = F.rms_norm(widen(inputs), list(normalized_shape), eps=eps)
    return _sum_positions(normalized.mul_(grads), features=len(normalized_shape))


def norm_bias_gradients(grads: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """Each example's bias gradient of a layer norm, with shape ``[B, *normalized_shape]``."""
    return _sum_positions(widen(grads), features=len(normalized_shape))


def conv_weight_gradients(inputs: Tensor, grads: Tensor, geometry: ConvGeometry) -> Tensor:
    """Each example's weight gradient of a convolution: a linear layer applied to patches.

    Args:
        inputs: The layer's input, with shape ``[B, C, W]`` or ``[B, C, H, W]``.
        grads: The gradient of its output, with shape ``[B, O, ...]``.
        geometry: Kernel, stride, padding, dilation and groups.

    Returns:
        The gradients, with shape ``[B, O, C / groups, *kernel_size]``, in float32 at least.
    """
    gradients = linear_weight_gradients(*_patches_and_grads(inputs, grads, geometry))
    channels = inputs.shape[1] // geometry.groups
    return gradients.view(inputs.shape[0], grads.shape[1], channels, *geometry.kernel_size)


def conv_weight_sq_norms(inputs: Tensor, grads: Tensor, geometry: ConvGeometry) -> Tensor:
    """Squared norm of each example's weight gradient of a convolution.

    Arguments as in :func:`conv_weight_gradients`.

    Returns:
        The squared norms, with shape ``[B]``, in float32 at least.
    """
    norms = linear_weight_sq_norms(*_patches_and_grads(inputs, grads, geometry))
    return norms.view(inputs.shape[0], geometry.groups).sum(1)


def conv_bias_gradients(grads: Tensor) -> Tensor:
    """Each example's bias gradient of a convolution: ``[B, O, ...]`` to ``[B, O]``."""
    return widen(grads).flatten(2).sum(2)


def _positions(values: Tensor) -> Tensor:
    """``[B, ..., K]`` as ``[B, T, K]``; no dimension is inferred, for the sake of ``B = 0``."""
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)


def _sum_positions(values: Tensor, features: int) -> Tensor:
    between = tuple(range(1, values.dim() - features))
    # An empty tuple would mean "all dimensions" to torch.
    return values.sum(between) if between else values


def _ghost_sq_norms(inputs: Tensor, grads: Tensor) -> Tensor:
    inputs, grads = _positions(widen(inputs)), _positions(widen(grads))
    input_gram = torch.bmm(inputs, inputs.transpose(1, 2))
    return (input_gram * torch.bmm(grads, grads.transpose(1, 2))).sum((1, 2))


def _rows_and_grads(
    indices: Tensor, grads: Tensor, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    rows, grads = indices.reshape(*indices.shape, 1).flatten(1), _positions(widen(grads))
    if padding_idx is not None:
        grads = grads.masked_fill((rows == padding_idx).unsqueeze(-1), 0)
    return rows, grads


def _add_rows(rows: Tensor, grads: Tensor, num_rows: int) -> Tensor:
    """Adds ``grads[b, t]`` to row ``rows[b, t]`` of table ``b``; returns the tables."""
    batch, _, width = grads.shape
    first_rows = torch.arange(0, batch * num_rows, num_rows, device=rows.device)
    tables = grads.new_zeros(batch * num_rows, width)
    tables.index_add_(0, (rows + first_rows.unsqueeze(1)).flatten(), grads.flatten(0, 1))
    return tables.view(batch, num_rows, width)


def _patches_and_grads(
    inputs: Tensor, grads: Tensor, geometry: ConvGeometry
) -> tuple[Tensor, Tensor]:
    """Patches ``[B G, P, (C / G) k]`` and output gradients ``[B G, P, O / G]``."""
    kernel, stride, dilation = geometry.kernel_size, geometry.stride, geometry.dilation
    inputs, grads = _padded(widen(inputs), geometry), widen(grads).flatten(2)
    if len(kernel) == 1:
        inputs = inputs.unsqueeze(2)
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    patches = F.unfold(inputs, kernel, dilation=dilation, stride=stride)
    groups, (batch, width, positions) = geometry.groups, patches.shape
    patches = patches.reshape(batch * groups, width // groups, positions)
    grads = grads.reshape(batch * groups, grads.shape[1] // groups, positions)
    return patches.transpose(1, 2), grads.transpose(1, 2)


def _padded(inputs: Tensor, geometry: ConvGeometry) -> Tensor:
    sides: list[int] = []
    # F.pad counts dimensions from the last one.
    for axis in reversed(range(len(geometry.kernel_size))):
        if isinstance(geometry.padding, str):
            reach = geometry.dilation[axis] * (geometry.kernel_size[axis] - 1)
            total = reach if geometry.padding == "same" else 0
            sides += [total // 2, total - total // 2]
        else:
            sides += [geometry.padding[axis]] * 2
    if not any(sides):
        return inputs
    mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
    return F.pad(inputs, sides, mode=mode)
