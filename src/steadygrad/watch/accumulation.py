r"""Compares gradients accumulated over micro-batches with the whole batch's, and names the bug.

Micro-batch :math:`i` alone has the gradient :math:`g_i`. The whole batch's gradient should be
:math:`\sum_i \alpha_i g_i`, and the loop left :math:`\sum_i \beta_i g_i`. Both sets of weights are
found by least squares; comparing them names the bug.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_count, shown
from steadygrad._names import plain_name
from steadygrad._nests import take_rows
from steadygrad.formulas.tensors import exact
from steadygrad.sharding import ShardSum, local
from steadygrad.watch import windows as cuts
from steadygrad.watch.windows import WORDS, AccumulationCheck, Window, not_samples

__all__ = ["check_accumulation"]

Loss = Callable[[nn.Module, Any], Tensor]
Accumulate = Callable[[Sequence[Any]], object]
Part = Callable[[Tensor], Any]

# Bugs of the loss function, not of the loop: further windows would show nothing new.
_LOSS_BUGS = ("random", "batch", "rounding")
# Elements of a parameter whose inner products are taken at a time.
_CHUNK = 2**20
# A factor that no binary type holds exactly.
_OTHER_SCALE = 0.7
# The vectors before those of the micro-batches: the gradients of the whole batch, the loop, the
# whole batch again, and of its samples in another order.
_WHOLE, _USED, _AGAIN, _MIXED, _PARTS = range(5)


def check_accumulation(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    *,
    accumulate: Accumulate | None = None,
    micro_batches: int = 4,
    split: Callable[[Any, Tensor], Any] | None = None,
    samples: int | None = None,
) -> AccumulationCheck:
    """Compares one batch's gradient with the accumulated one, for four ways of cutting the batch.

    The cuts: equal micro-batches, one sample at a time (of the first ``2 * micro_batches``), ragged
    ones, and a short last window with one micro-batch less. Weights, ``.grad``, buffers and random
    numbers are afterwards as they were. Where a gradient is random, as with dropout, the model is
    in evaluation mode meanwhile, but for modules that keep statistics, as BatchNorm does. The
    memory is that of ``2 * micro_batches + 12`` gradients.

    Args:
        model: The model.
        loss_fn: ``(model, batch) -> loss``, the loss of a batch as it should be, shape ``()``.
        batch: A nest of tensors, arrays and lists with a row for each sample, or anything that
            ``split`` cuts. Numbers, texts and tensors without dimensions are kept.
        accumulate: The loop's own window: is given the micro-batches, and calls ``backward`` on
            each. Default: ``(loss_fn(model, micro) / len(micros)).backward()``.
        micro_batches: Micro-batches of a whole window, as the loop is set.
        split: ``(batch, indices) -> micro_batch``, which has the samples ``indices``, int64 with
            shape ``(n,)``. Default: rows, where everything in the batch has as many.
        samples: Samples in the batch. Default: its rows; with ``split`` ``2 * micro_batches``.

    Returns:
        A window for each cut; none after one that shows that the loss cannot be cut.

    Raises:
        InputError: If the batch has fewer than ``2 * micro_batches`` samples, or its rows are not
            samples: their numbers differ, or the gradient depends on their order. If no weight
            requires a gradient, or the gradient is zero or not finite.
    """
    least = 2 * check_count("micro_batches", micro_batches, low=2)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "Parameter `model` should have weights that require a gradient. Found none. "
            "Remedy: requires_grad_() on those that are trained."
        )
    if samples is not None:
        check_count("samples", samples, low=least, remedy="fewer micro-batches")
    count = (samples or least) if split else cuts.samples(batch, least, samples)
    part = partial(split, batch) if split else partial(take_rows, batch, count)

    def by_mean(micros: Sequence[Any]) -> None:
        for micro in micros:
            (loss_fn(model, micro) / len(micros)).backward()

    def whole() -> None:
        torch.autograd.backward(loss_fn(model, part(torch.arange(count, device="cpu"))))

    equal = [count // micro_batches] * micro_batches
    ways = {
        "equal micro-batches": equal,
        "one sample at a time": [1] * least,
        "ragged micro-batches": cuts.ragged(count, micro_batches),
        "short last window": equal[:-1],
    }
    with _as_it_was(model) as put_back:
        whole()
        changed = put_back()
        judge = _Judge(model, loss_fn, accumulate or by_mean, micro_batches, put_back)
        windows: list[Window] = []
        for name, sizes in ways.items():
            window = judge(name, part, sizes, is_split=split is not None)
            if window.bug == "random" and not windows:
                _settle(model, whole, changed)
                window = judge(name, part, sizes, is_split=split is not None)
            windows.append(window)
            if window.bug in _LOSS_BUGS:
                break
        return AccumulationCheck(windows)


class _Judge:
    """Takes the gradients of one window, and names their fault."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        accumulate: Accumulate,
        micro_batches: int,
        put_back: Callable[[], list[Tensor]],
    ) -> None:
        named = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
        self._layers = [name.rpartition(".")[0] for name, _ in named]
        self._parameters = [p for _, p in named]
        self._model, self._loss, self._loop, self._put_back = model, loss_fn, accumulate, put_back
        self._whole, self._sum = micro_batches, ShardSum(self._parameters)
        # Far below any bug, and far above the roundings of sums in another order and of adding up
        # ``.grad`` in its own type.
        adding = max(torch.finfo(p.dtype).eps for p in self._parameters)
        self._floor = max(math.sqrt(torch.finfo(torch.float32).eps), 4 * adding)

    def __call__(self, name: str, part: Part, sizes: Sequence[int], *, is_split: bool) -> Window:
        products, squares = self._products(*self._gradients(name, part, sizes, is_split))
        total, lengths = products.sum(-1), products.sum(-1).diagonal()
        # A micro-batch without a gradient, as one without labels, says nothing of its weight.
        least = 1e-12 * float(lengths[_PARTS:].nan_to_num(0, 0, 0).max())
        seen = [i for i, x in enumerate(lengths) if i < _PARTS or least < float(x) < math.inf]
        total, squares = total[seen][:, seen], squares.sum(-1)[seen]
        ratio, cosine = _compared(total)
        layers = {
            layer: _compared(products[..., [n == layer for n in self._layers]].sum(-1))
            for layer in dict.fromkeys(self._layers)
        }
        right, got = _weights(total, _WHOLE), _weights(total, _USED)
        own, parts = squares[_WHOLE], right.square() @ squares[_PARTS:]
        rounding = (torch.stack([own, own + parts]) / total[_WHOLE, _WHOLE]).sqrt().tolist()
        bug = _bug(total, self._floor, rounding, len(sizes), self._whole)
        if squares[_USED]:
            bug = "steps"
        if bug == "order":
            raise not_samples(f"another gradient in another order, in {name}", 2 * self._whole)
        if bug == "unknown" or (bug == "batch" and not lengths.isfinite().all()):
            raise InputError(
                "Expected finite gradients, not all of them zero. Found others, in the window of "
                f"{name}. Remedy: GradientWatch(model) names the layer."
            )
        words = WORDS[bug].format(
            parts=len(sizes),
            whole=self._whole,
            ratio=ratio,
            left=int((got.abs() > 0.1 * got.abs().max()).sum()),
            used=_shown(got),
            right=_shown(right),
        )
        return Window(name, tuple(sizes), ratio, cosine, layers, bug, words)

    def _gradients(
        self, name: str, part: Part, sizes: Sequence[int], is_split: bool
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Gradients in the order of the constants, and squares: roundings, and the loop's steps."""
        rows = torch.arange(sum(sizes), device="cpu")
        micros = rows.split([*sizes])
        try:
            again = self._gradient(self._backward, part(rows))
            mixed = again if is_split else self._gradient(self._backward, part(_moved(rows)))
            measured = [self._measured(part, own) for own in (rows, *micros)]
        except Exception as error:
            if is_split:
                raise
            raise not_samples(f"{shown(error)}, in {name}", 2 * self._whole) from error
        (whole, *parts), (noise, *noises) = zip(*measured, strict=True)
        used = self._gradient(self._loop, [part(own) for own in micros])
        steps = torch.zeros_like(noise)
        steps += any(isinstance(changed, nn.Parameter) for changed in self._put_back())
        return [whole, used, again, mixed, *parts], [noise, steps, noise, noise, *noises]

    def _backward(self, batch: Any) -> None:
        torch.autograd.backward(self._loss(self._model, batch))

    def _measured(self, part: Part, rows: Tensor) -> tuple[list[Tensor], Tensor]:
        """Gradient of samples, and squares of its roundings, with shape ``(parameters)``.

        Another factor of the loss, which no type holds exactly, makes other roundings all the way
        back.
        """

        def scaled(batch: Any) -> None:
            torch.autograd.backward(_OTHER_SCALE * self._loss(self._model, batch))

        gradient = self._gradient(self._backward, part(rows))
        other = self._gradient(scaled, part(rows))
        products = [_gram(pair) for pair in zip(gradient, other, strict=True)]
        weights = torch.tensor([1.0, -1 / _OTHER_SCALE]).to(products[0])
        squares = [weights @ product.view(2, 2) @ weights for product in products]
        return gradient, torch.stack(squares).clamp(min=0)

    def _gradient(self, work: Callable[[Any], object], batches: Any) -> list[Tensor]:
        """Copies of this process's parts of the gradients that some work leaves, all real."""
        for p in self._parameters:
            p.requires_grad_().grad = None
        work(batches)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        found = [local(grad.detach()).to_dense().clone() for grad in grads]
        return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]

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


def _bug(products: Tensor, floor: float, rounding: list[float], parts: int, whole: int) -> str:
    """Name of the fault.

    Args:
        products: Inner products of the gradients, in the order of the constants.
        floor: Least relative difference that counts.
        rounding: Relative roundings of the whole batch's gradient, and with its parts' as well.
        parts: Micro-batches of this window.
        whole: Micro-batches of a whole window.
    """
    tolerance = max(floor, 3 * rounding[1])
    near = partial(math.isclose, rel_tol=tolerance)
    ratio, cosine = _compared(products)
    if not 0 < float(products[_WHOLE, _WHOLE] + products[_AGAIN, _AGAIN]) < math.inf:
        return "unknown"
    if ratio == 0:
        return "lost"
    one = torch.tensor([1.0])
    # Random numbers look like large roundings, but come with the same factor too.
    if _misfit(products, _WHOLE, one, [_AGAIN]) > max(floor, rounding[0] / 4):
        return "random"
    # Half of the smallest bug: one micro-batch too few.
    if tolerance > 0.5 / whole:
        return "rounding"
    if not _misfit(products, _WHOLE, one, [_MIXED]) <= tolerance:
        return "order"
    if not math.isfinite(ratio):
        return "overflow"
    if near(ratio, 1) and near(cosine, 1):
        return ""
    right, used = _weights(products, _WHOLE), _weights(products, _USED)
    if _misfit(products, _WHOLE, right) > tolerance:
        return "batch"
    if _misfit(products, _USED, used) > tolerance:
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
    inner, with_it = products[_PARTS:, _PARTS:], products[_PARTS:, vector, None].nan_to_num(0, 0, 0)
    found = torch.linalg.lstsq(inner, with_it, driver="gelsd")
    weights: Tensor = found.solution[:, 0]
    return weights


def _misfit(
    products: Tensor, vector: int, weights: Tensor, of: Sequence[int] | slice = slice(_PARTS, None)
) -> float:
    """Norm of a vector less a weighted sum of others, over the vector's norm."""
    weights = weights.to(products)
    fitted = 2 * weights @ products[of, vector] - weights @ products[of][:, of] @ weights
    square = products[vector, vector]
    return float(((square - fitted) / square.clamp(min=1e-300)).clamp(min=0).sqrt())


def _shown(weights: Tensor) -> str:
    return "(" + ", ".join(f"{weight:.3g}" for weight in weights.tolist()) + ")"


def _moved(rows: Tensor) -> Tensor:
    """The rows in another order, each at another place than before."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0), device="cpu")
    return rows[order.roll(1)[order.argsort()]]


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[Callable[[], list[Tensor]]]:
    """Puts everything back afterwards; weights and buffers also when the function is called.

    It returns those that had changed.
    """
    grads = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    kept: list[tuple[Any, str, Tensor, Tensor]]
    kept = [({"": p}, "", p, p.detach().clone()) for p, *_ in grads]
    # By their names: a forward pass may put another tensor in a buffer's place.
    kept += [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    settings = [(m, m.training, getattr(m, "dropout", 0.0)) for m in model.modules()]

    @torch.no_grad()
    def put_back() -> list[Tensor]:
        changed = []
        for holder, name, tensor, was in kept:
            # Written only where they differ: graphs that hold them stay valid.
            alike = torch.equal(local(tensor.detach()), local(was))
            if not alike or holder[name] is not tensor:
                holder[name] = tensor.copy_(was)
                changed.append(tensor)
        return changed

    def stay(mode: bool = True) -> nn.Module:
        return model

    # The loop's own ``model.train()`` changes nothing.
    model.__dict__.setdefault("train", stay)
    try:
        with torch.random.fork_rng():
            for p, *_ in grads:
                p.grad = None
            yield put_back
    finally:
        put_back()
        for p, grad, is_trained in grads:
            p.requires_grad_(is_trained).grad = grad
        if model.__dict__["train"] is stay:
            del model.__dict__["train"]
        for module, training, dropout in settings:
            module.training = training
            if isinstance(module, nn.RNNBase):
                module.dropout = dropout


def _settle(model: nn.Module, work: Callable[[], object], changed: list[Tensor]) -> None:
    """Turns dropout off: evaluation mode, but for modules with tensors that a pass changed.

    These keep statistics, as BatchNorm does. If the loss fails in evaluation mode, only innermost
    modules are in it.
    """
    statistics, others = {*map(id, changed)}, []
    for module in model.modules():
        own = [*module._buffers.values(), *module._parameters.values()]
        if isinstance(module, nn.RNNBase):
            # In training mode, because cuDNN has no backward pass out of it.
            module.dropout = 0.0
        elif module.training and statistics.isdisjoint(map(id, own)):
            others.append(module)
            module.training = False
    try:
        work()
    except Exception:
        for module in others:
            module.training = bool(module._modules)
