r"""Compares gradients accumulated over micro-batches with the whole batch's, and names the bug.

Micro-batch :math:`i` alone has the gradient :math:`g_i`. The whole batch's gradient should be
:math:`\sum_i \alpha_i g_i`, and the loop left :math:`\sum_i \beta_i g_i`. Both sets of weights are
found by least squares; comparing them names the bug.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree

from steadygrad._checks import InputError, check_count
from steadygrad._names import plain_name
from steadygrad.formulas.tensors import exact
from steadygrad.sharding import ShardSum, local
from steadygrad.watch.windows import WORDS, AccumulationCheck, Window

__all__ = ["check_accumulation"]

Loss = Callable[[nn.Module, Any], Tensor]
Accumulate = Callable[[Sequence[Any]], object]


# Of the loss and not of the loop: other cuts say nothing more.
_LOSS_BUGS = ("random", "batch")


def check_accumulation(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    *,
    accumulate: Accumulate | None = None,
    micro_batches: int = 4,
) -> AccumulationCheck:
    """Compares one batch's gradient with the accumulated one, for four ways of cutting the batch.

    The cuts: equal micro-batches, one sample at a time, ragged ones, and a short last window with
    one micro-batch less. Weights, ``.grad``, buffers and random numbers are afterwards as
    they were. Dropout modules are off.

    Args:
        model: The model.
        loss_fn: ``(model, batch) -> loss``, the loss of a batch as it should be, shape ``()``.
        batch: A nest of tensors whose leading dimension is that of the samples; others are kept.
        accumulate: The loop's own window: is given the micro-batches, and calls ``backward`` on
            each. Default: ``(loss_fn(model, micro) / len(micros)).backward()``.
        micro_batches: Micro-batches of a whole window, as the loop is set.

    Returns:
        A window for each cut; none after one that shows that the loss cannot be cut.

    Raises:
        InputError: If the batch has fewer than ``2 * micro_batches`` samples.
    """
    check_count("micro_batches", micro_batches, low=2)
    count = _samples(batch)
    if count < 2 * micro_batches:
        raise InputError(
            f"Parameter `batch` should hold at least {2 * micro_batches} samples, two for each "
            f"micro-batch. Found {count}. Remedy: a larger batch, or fewer micro-batches."
        )

    def by_mean(micros: Sequence[Any]) -> None:
        for micro in micros:
            (loss_fn(model, micro) / len(micros)).backward()

    equal = [count // micro_batches] * micro_batches
    cuts = {
        "equal micro-batches": equal,
        "one sample at a time": [1] * count,
        "ragged micro-batches": _ragged(count, micro_batches),
        "short last window": equal[:-1],
    }
    with _as_it_was(model):
        judge = _Judge(model, loss_fn, accumulate or by_mean, micro_batches)
        windows: list[Window] = []
        for name, sizes in cuts.items():
            windows.append(judge(name, batch, sizes))
            if windows[-1].bug in _LOSS_BUGS:
                break
        return AccumulationCheck(windows)


class _Judge:
    """Takes the gradients of one window, and names their fault."""

    def __init__(
        self, model: nn.Module, loss_fn: Loss, accumulate: Accumulate, micro_batches: int
    ) -> None:
        named = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
        self._layers = [name.rpartition(".")[0] for name, _ in named]
        self._parameters = [p for _, p in named]
        self._model, self._loss, self._accumulate = model, loss_fn, accumulate
        self._whole, self._sum = micro_batches, ShardSum(self._parameters)
        # Sums over a batch in another order differ by roundings that grow as its root or less; the
        # root of the type's own precision is far above them and far below any of the bugs.
        self._tolerance = max(math.sqrt(torch.finfo(p.dtype).eps) for p in self._parameters)

    def __call__(self, name: str, batch: Any, sizes: Sequence[int]) -> Window:
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        micros = [_cut(batch, start, end) for start, end in pairwise(ends)]
        window = _cut(batch, 0, ends[-1])
        whole, again = (self._gradient(self._backward, window) for _ in range(2))
        used = self._gradient(self._accumulate, micros)
        parts = [self._gradient(self._backward, micro) for micro in micros]
        products = self._products([whole, used, again, *parts])
        total = products.sum(-1)
        ratio, cosine = _compared(total)
        layers = {
            layer: _compared(
                products[..., torch.tensor([n == layer for n in self._layers])].sum(-1)
            )
            for layer in dict.fromkeys(self._layers)
        }
        bug = self._bug(total, ratio, cosine, len(sizes))
        right, got = _weights(total, 0), _weights(total, 1)
        words = WORDS[bug].format(
            parts=len(sizes),
            whole=self._whole,
            ratio=ratio,
            left=int((got.abs() > 0.1 * got.abs().max()).sum()),
            used=_shown(got),
            right=_shown(right),
        )
        return Window(name, tuple(sizes), ratio, cosine, layers, bug, words)

    def _bug(self, products: Tensor, ratio: float, cosine: float, parts: int) -> str:
        near = partial(math.isclose, rel_tol=self._tolerance)
        if _misfit(products, 0, torch.tensor([1.0]), [2]) > self._tolerance:
            return "random"
        if near(ratio, 1) and near(cosine, 1):
            return ""
        right, used = _weights(products, 0), _weights(products, 1)
        if _misfit(products, 0, right) > self._tolerance:
            return "batch"
        if _misfit(products, 1, used) > self._tolerance:
            return "other"
        if int((used.abs() < self._tolerance * used.abs().max()).sum()):
            return "lost"
        if near(cosine, 1):
            found = {"sum": parts, "twice": 1 / parts, "short": parts / self._whole}
            return next((bug for bug, factor in found.items() if near(ratio, factor)), "factor")
        alike = float((used - used.mean()).abs().max()) <= self._tolerance * float(used.abs().max())
        return "means" if alike else "weights"

    def _backward(self, batch: Any) -> None:
        torch.autograd.backward(self._loss(self._model, batch))

    def _gradient(self, work: Callable[[Any], object], batches: Any) -> list[Tensor]:
        """Copies of this process's parts of the gradients that some work leaves."""
        for p in self._parameters:
            p.grad = None
        work(batches)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return [local(grad.detach()).clone() for grad in grads]

    def _products(self, vectors: Sequence[Sequence[Tensor]]) -> Tensor:
        """Inner products by parameter, with shape ``(vectors, vectors, parameters)``."""
        device = self._parameters[0].device
        columns = []
        for i in range(len(self._parameters)):
            rows = torch.stack([vector[i].reshape(-1).to(exact(device)) for vector in vectors])
            columns.append((rows @ rows.T).reshape(-1))
        packed: Tensor = self._sum(torch.stack(columns, dim=1))
        return packed.view(len(vectors), len(vectors), -1).cpu()


def _compared(products: Tensor) -> tuple[float, float]:
    """Ratio and cosine of vector 1 to vector 0; both are 1 for two zeros."""
    whole, used = products[0, 0].sqrt(), products[1, 1].sqrt()
    if float(whole) == float(used) == 0.0:
        return 1.0, 1.0
    return float(used / whole), float(products[0, 1] / (whole * used))


def _weights(products: Tensor, vector: int) -> Tensor:
    """Least-squares weights of the micro-batches' gradients in a vector."""
    found = torch.linalg.lstsq(products[3:, 3:], products[3:, vector, None], driver="gelsd")
    weights: Tensor = found.solution[:, 0]
    return weights


def _misfit(
    products: Tensor, vector: int, weights: Tensor, of: Sequence[int] | slice = slice(3, None)
) -> float:
    """Norm of a vector less a weighted sum of others, over the vector's norm."""
    weights = weights.to(products)
    fitted = 2 * weights @ products[of, vector] - weights @ products[of][:, of] @ weights
    square = products[vector, vector]
    return math.sqrt(max(0.0, float((square - fitted) / square.clamp(min=1e-300))))


def _samples(batch: Any) -> int:
    """The leading dimension of a nest of tensors; 0 if there is none."""
    sizes = [x.shape[0] for x in _pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 0


def _cut(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a nest; tensors without a sample dimension are kept."""
    count = _samples(batch)

    def part(leaf: Any) -> Any:
        whole = not (isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count)
        return leaf if whole else leaf[start:stop]

    return _pytree.tree_map(part, batch)


def _ragged(count: int, parts: int) -> list[int]:
    """Sizes that grow by equal steps, as nearly as whole numbers do."""
    more = count - parts
    ends = [round(more * i * (i + 1) / (parts * (parts + 1))) for i in range(parts + 1)]
    return [1 + stop - start for start, stop in pairwise(ends)]


def _shown(weights: Tensor) -> str:
    return "(" + ", ".join(f"{weight:.3g}" for weight in weights.tolist()) + ")"


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts gradients, buffers, random numbers and dropout back afterwards."""
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    dropouts = [m for m in model.modules() if isinstance(m, _DropoutNd) and m.training]
    for module in dropouts:
        module.training = False
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
        for module in dropouts:
            module.training = True
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
