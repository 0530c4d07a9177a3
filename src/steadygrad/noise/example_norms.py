r"""Exact gradients of single examples, and their squared norms, one layer at a time.

A layer's weight gradient is a sum over the batch, and the terms need no second backward pass:
they follow from the layer's input :math:`a` and its output gradient :math:`g`, both of which
the ordinary backward pass holds. ``*_gradients(layer, a, g)`` returns each example's own gradient
of the weight, of shape ``[B, *weight.shape]``, and ``*_sq_norms(layer, a, g)`` its squared
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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad.numerics import wide

# Sorting the look-ups takes as long as clearing and reading this many rows for each (measured).
_RENUMBERING_COST = 4


def features(layer: nn.Module) -> int:
    """Number of trailing dimensions of a layer's output that are neither examples nor positions."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        return 1 + len(layer.kernel_size)
    return len(layer.normalized_shape) if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) else 1


def linear_gradients(layer: nn.Module | None, inputs: Tensor, grads: Tensor) -> Tensor:
    r"""For :math:`y = a W^T + b` with inputs ``[B, ..., K]``: :math:`\sum_t g_t a_t^T`."""
    return torch.bmm(_positions(_widened(grads)).mT, _positions(_widened(inputs)))


def linear_sq_norms(layer: nn.Module | None, inputs: Tensor, grads: Tensor) -> Tensor:
    r"""Squared norms for a linear layer.

    With :math:`T` positions an example, :math:`\|\sum_t g_t a_t^T\|^2` equals the "ghost norm"
    :math:`\sum_{tt'} (a_t \cdot a_{t'})(g_t \cdot g_{t'})`, which never forms the gradient. It
    takes :math:`T^2 (K + L)` multiplications against :math:`T K L`; the smaller one is taken.
    """
    a, g = _positions(_widened(inputs)), _positions(_widened(grads))
    positions, width, height = a.shape[1], a.shape[2], g.shape[2]
    if positions * (width + height) >= width * height:
        return _sq_norms(linear_gradients(layer, a, g))
    return (torch.bmm(a, a.mT) * torch.bmm(g, g.mT)).sum((1, 2))


def embedding_gradients(layer: nn.Embedding, indices: Tensor, grads: Tensor) -> Tensor:
    """For an embedding of indices ``[B, ...]``: output gradients, added up by rows."""
    return _add_rows(*_rows_and_grads(layer, indices, grads), layer.num_embeddings)


def embedding_sq_norms(layer: nn.Embedding, indices: Tensor, grads: Tensor) -> Tensor:
    """Squared norms for an embedding.

    An example with ``T`` look-ups touches at most ``T`` rows, so a much longer table is
    renumbered first: memory is of the order ``B T D``, never ``B V D``.
    """
    rows, grads = _rows_and_grads(layer, indices, grads)
    lookups = rows.shape[1]
    if layer.num_embeddings <= _RENUMBERING_COST * lookups:
        return _sq_norms(_add_rows(rows, grads, layer.num_embeddings))
    ordered, order = rows.sort(dim=1)
    ranks = F.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))
    renumbered = torch.empty_like(rows, dtype=torch.int64).scatter_(1, order, ranks)
    return _sq_norms(_add_rows(renumbered, grads, lookups))


def norm_gradients(layer: nn.LayerNorm | nn.RMSNorm, inputs: Tensor, grads: Tensor) -> Tensor:
    r"""For a layer or RMS norm with normalized inputs :math:`\hat x`: :math:`\sum_t g_t \hat x_t`.

    An RMS norm's ``eps=None`` stands, as in torch, for the machine epsilon of the inputs' dtype.
    """
    x, shape = _widened(inputs), list(layer.normalized_shape)
    if isinstance(layer, nn.RMSNorm):
        eps = torch.finfo(inputs.dtype).eps if layer.eps is None else layer.eps
        normalized = F.rms_norm(x, shape, eps=eps)
    else:
        # On CPU the kernel with a weight is 1.6 times as fast as the one without (measured).
        normalized = F.layer_norm(x, shape, weight=x.new_ones(shape), eps=layer.eps)
    return _sum_positions(normalized.mul_(grads), len(shape))


def conv_gradients(layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, grads: Tensor) -> Tensor:
    """For a convolution of inputs ``[B, C, W]`` or ``[B, C, H, W]``: a linear layer on patches."""
    gradients = linear_gradients(None, *_patches_and_grads(layer, inputs, grads))
    return gradients.view(len(inputs), *layer.weight.shape)


def conv_sq_norms(layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, grads: Tensor) -> Tensor:
    """Squared norms for a convolution."""
    norms = linear_sq_norms(None, *_patches_and_grads(layer, inputs, grads))
    return norms.view(len(inputs), layer.groups).sum(1)


def bias_gradients(layer: nn.Module, inputs: Tensor | None, grads: Tensor) -> Tensor:
    """Each example's bias gradient of any of these layers, with shape ``[B, *bias.shape]``."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        return _widened(grads).flatten(2).sum(2)
    return _sum_positions(_widened(grads), features(layer))


def _widened(values: Tensor) -> Tensor:
    return values.to(wide(values.dtype))


def _sq_norms(gradients: Tensor) -> Tensor:
    return gradients.flatten(1).square().sum(1)


def _positions(values: Tensor) -> Tensor:
    """``[B, ..., K]`` as ``[B, T, K]``; no dimension is inferred, for the sake of ``B = 0``."""
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)


def _sum_positions(values: Tensor, features: int) -> Tensor:
    between = tuple(range(1, values.dim() - features))
    # An empty tuple would mean "all dimensions" to torch.
    return values.sum(between) if between else values


def _rows_and_grads(layer: nn.Embedding, indices: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    rows, grads = indices.reshape(*indices.shape, 1).flatten(1), _positions(_widened(grads))
    if layer.padding_idx is not None:
        grads = grads.masked_fill((rows == layer.padding_idx).unsqueeze(-1), 0)
    return rows, grads


def _add_rows(rows: Tensor, grads: Tensor, num_rows: int) -> Tensor:
    """Adds ``grads[b, t]`` to row ``rows[b, t]`` of table ``b``; returns the tables."""
    batch, _, width = grads.shape
    first_rows = torch.arange(0, batch * num_rows, num_rows, device=rows.device)
    tables = grads.new_zeros(batch * num_rows, width)
    tables.index_add_(0, (rows + first_rows.unsqueeze(1)).flatten(), grads.flatten(0, 1))
    return tables.view(batch, num_rows, width)


def _patches_and_grads(
    layer: nn.Conv1d | nn.Conv2d, inputs: Tensor, grads: Tensor
) -> tuple[Tensor, Tensor]:
    """Patches ``[B G, P, (C / G) k]`` and output gradients ``[B G, P, O / G]``."""
    inputs, grads = _widened(inputs), _widened(grads).flatten(2)
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if isinstance(layer.padding, str):
        same = layer.padding == "same"
        reach = [d * (k - 1) * same for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in reach]
    else:
        sides = [(side, side) for side in layer.padding]
    if any(sum(pair) for pair in sides):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        # F.pad counts dimensions from the last one.
        inputs = F.pad(inputs, [side for pair in reversed(sides) for side in pair], mode=mode)
    if len(kernel) == 1:
        inputs = inputs.unsqueeze(2)
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    patches = F.unfold(inputs, kernel, dilation=dilation, stride=stride)
    groups, (batch, width, positions) = layer.groups, patches.shape
    patches = patches.reshape(batch * groups, width // groups, positions)
    grads = grads.reshape(batch * groups, grads.shape[1] // groups, positions)
    return patches.mT, grads.mT
