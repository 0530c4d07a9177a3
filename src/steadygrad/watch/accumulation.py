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

from steadygrad._checks import InputError, check_count
from steadygrad._names import plain_name
from steadygrad.formulas.tensors import exact
from steadygrad.sharding import ShardSum, local
from steadygrad.watch.windows import WORDS, AccumulationCheck, Window, cut, ragged, samples

__all__ = ["check_accumulation"]

Loss = Callable[[nn.Module, Any], Tensor]
Accumulate = Callable[[Sequence[Any]], object]


# Bugs of the loss function, not of the loop: further windows would show nothing new.
_LOSS_BUGS = ("random", "batch", "rounding")
# Elements of a parameter whose inner products are taken at a time.
_CHUNK = 2**20
# A factor that no binary type holds exactly.
_OTHER_SCALE = 0.7


def check_accumulation(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    *,
    accumulate: Accumulate | None = None,
    micro_batches: int = 4,
) -> AccumulationCheck:
    """Compares one batch's gradient with the accumulated one, for four ways of cutting the batch.

    The cuts: equal micro-batches, one sample at a time (of the first ``2 * micro_batches``), ragged
    ones, and a short last window with one micro-batch less. Weights, ``.grad``, buffers and random
    numbers are afterwards as they were. Dropout modules are off. The memory is that of
    ``2 * micro_batches + 10`` gradients.

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
        InputError: If the batch has fewer than ``2 * micro_batches`` samples, or a gradient is not
            finite.
    """
    check_count("micro_batches", micro_batches, low=2)
    count = samples(batch)
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
        "one sample at a time": [1] * (2 * micro_batches),
        "ragged micro-batches": ragged(count, micro_batches),
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
        self._model, self._loss, self._loop = model, loss_fn, accumulate
        self._whole, self._sum = micro_batches, ShardSum(self._parameters)
        # Far below any bug, and far above the roundings of sums in another order and of adding up
        # ``.grad`` in its own type.
        adding = max(torch.finfo(p.dtype).eps for p in self._parameters)
        self._floor = max(math.sqrt(torch.finfo(torch.float32).eps), 4 * adding)

    def __call__(self, name: str, batch: Any, sizes: Sequence[int]) -> Window:
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        micros = [cut(batch, start, end) for start, end in pairwise(ends)]
        window = cut(batch, 0, ends[-1])
        again, used = self._gradient(self._backward, window), self._gradient(self._loop, micros)
        measured = [self._measured(batch) for batch in (window, *micros)]
        whole, *parts = (gradient for gradient, _ in measured)
        products, noise = self._products([whole, used, again, *parts], [n for _, n in measured])
        total = products.sum(-1)
        if not total.isfinite().all():
            raise InputError(
                f"Expected finite gradients of the batch. Found some that are not, in {name}. "
                "Remedy: GradientWatch(model) names the layer."
            )
        ratio, cosine = _compared(total)
        layers = {
            layer: _compared(
                products[..., torch.tensor([n == layer for n in self._layers])].sum(-1)
            )
            for layer in dict.fromkeys(self._layers)
        }
        right, got = _weights(total, 0), _weights(total, 1)
        square = noise.sum(-1)[0] + (right.square() * noise.sum(-1)[1:]).sum()
        rounding = float((square / total[0, 0].clamp(min=1e-300)).sqrt())
        bug = _bug(total, self._floor, rounding, len(sizes), self._whole)
        words = WORDS[bug].format(
            parts=len(sizes),
            whole=self._whole,
            ratio=ratio,
            left=int((got.abs() > 0.1 * got.abs().max()).sum()),
            used=_shown(got),
            right=_shown(right),
        )
        return Window(name, tuple(sizes), ratio, cosine, layers, bug, words)

    def _backward(self, batch: Any) -> None:
        torch.autograd.backward(self._loss(self._model, batch))

    def _measured(self, batch: Any) -> tuple[list[Tensor], Tensor]:
        """Gradient of a batch, and squares of its roundings, with shape ``(parameters)``.

        Another factor of the loss, which no type holds exactly, makes other roundings all the way
        back.
        """

        def scaled(batch: Any) -> None:
            torch.autograd.backward(_OTHER_SCALE * self._loss(self._model, batch))

        gradient, other = self._gradient(self._backward, batch), self._gradient(scaled, batch)
        products = [_gram(pair) for pair in zip(gradient, other, strict=True)]
        weights = torch.tensor([1.0, -1 / _OTHER_SCALE]).to(products[0])
        squares = [weights @ product.view(2, 2) @ weights for product in products]
        return gradient, torch.stack(squares).clamp(min=0)

    def _gradient(self, work: Callable[[Any], object], batches: Any) -> list[Tensor]:
        """Copies of this process's parts of the gradients that some work leaves."""
        for p in self._parameters:
            p.grad = None
        work(batches)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return [local(grad.detach()).clone() for grad in grads]

    def _products(
        self, vectors: Sequence[Sequence[Tensor]], squares: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Inner products by parameter, with shape ``(vectors, vectors, parameters)``, and squares.

        Both are added up over the processes in one collective.
        """
        columns = [_gram([vector[i] for vector in vectors]) for i in range(len(self._parameters))]
        rows = torch.cat([torch.stack(columns, dim=1), torch.stack([*squares])])
        packed = self._sum(rows).cpu()
        count = len(vectors)
        return packed[: count**2].view(count, count, -1), packed[count**2 :]


def _gram(tensors: Sequence[Tensor]) -> Tensor:
    """Inner products of tensors of one shape, in a row."""
    products = []
    for pieces in zip(*(x.reshape(-1).split(_CHUNK) for x in tensors), strict=True):
        rows = torch.stack([piece.to(exact(piece.device)) for piece in pieces])
        products.append((rows @ rows.T).reshape(-1))
    return torch.stack(products).sum(0)


def _bug(products: Tensor, floor: float, rounding: float, parts: int, whole: int) -> str:
    """Name of the fault.

    Args:
        products: Inner products of the gradients of the whole batch, the loop, the whole batch
            again and each micro-batch.
        floor: Least relative difference that counts.
        rounding: Relative roundings that were measured.
        parts: Micro-batches of this window.
        whole: Micro-batches of a whole window.
    """
    tolerance = max(floor, 3 * rounding)
    near = partial(math.isclose, rel_tol=tolerance)
    ratio, cosine = _compared(products)
    # Random numbers look like large roundings, but come with the same factor too.
    if _misfit(products, 0, torch.tensor([1.0]), [2]) > max(floor, rounding / 4):
        return "random"
    # Half of the smallest bug: one micro-batch too few.
    if tolerance > 0.5 / whole:
        return "rounding"
    if near(ratio, 1) and near(cosine, 1):
        return ""
    right, used = _weights(products, 0), _weights(products, 1)
    if _misfit(products, 0, right) > tolerance:
        return "batch"
    if _misfit(products, 1, used) > tolerance:
        return "other"
    if int((used.abs() < tolerance * used.abs().max()).sum()):
        return "lost"
    if near(cosine, 1):
        found = {"sum": parts, "twice": 1 / parts, "short": parts / whole}
        return next((bug for bug, factor in found.items() if near(ratio, factor)), "factor")
    alike = float((used - used.mean()).abs().max()) <= tolerance * float(used.abs().max())
    return "means" if alike else "weights"


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


def _shown(weights: Tensor) -> str:
    return "(" + ", ".join(f"{weight:.3g}" for weight in weights.tolist()) + ")"


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts gradients, buffers, random numbers and dropout back afterwards."""
    grads = [(p, p.grad) for p in model.parameters()]
    # By their names: a forward pass may put another tensor in a buffer's place.
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
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
            for holder, name, buffer, kept in buffers:
                holder[name] = buffer.copy_(kept)
