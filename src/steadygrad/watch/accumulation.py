r"""Compares gradients accumulated over micro-batches with the whole batch's, and names the bug.

Micro-batch :math:`i` alone has the gradient :math:`g_i`. The whole batch's gradient should be
:math:`\sum_i \alpha_i g_i`, and the loop left :math:`\sum_i \beta_i g_i`. Both sets of weights are
found by least squares; comparing them names the bug.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from steadygrad._checks import InputError, check_count, shown
from steadygrad.numerics import exact
from steadygrad.shards import PackedSum, local
from steadygrad.watch.passes import values

__all__ = ["AccumulationCheck", "Window", "check_accumulation"]

# Elements of a parameter whose inner products are taken at a time.
_CHUNK = 2**20
# Parts of a batch that are no containers.
_KEPT = (Tensor, int, float, str, type(None))
# A factor that no binary type holds exactly: a loss with it has other roundings all the way back.
_FACTOR = 0.7
# Gradients before those of the micro-batches: the whole batch's, the loop's, the whole batch's
# again, and that of the loss with the factor.
_WHOLE, _USED, _AGAIN, _SCALED, _PARTS = range(5)


@dataclass(frozen=True)
class Window:
    """One way of cutting the batch, and how its gradient compares with the whole one's.

    Attributes:
        sizes: Samples of each micro-batch.
        ratio: Norm of the accumulated gradient over that of the whole batch's.
        cosine: Cosine of the angle between them.
        bug: Name of the bug; empty where both are equal.
        words: Description of the bug, and the remedy.
    """

    name: str
    sizes: tuple[int, ...]
    ratio: float
    cosine: float
    bug: str
    words: str


@dataclass(frozen=True)
class AccumulationCheck:
    """Comparison of the gradients in each window."""

    windows: Sequence[Window]

    @property
    def bugs(self) -> Sequence[str]:
        """Names of the bugs found, each once."""
        return list(dict.fromkeys(window.bug for window in self.windows if window.bug))

    def __str__(self) -> str:
        """A line for each window."""
        lines = []
        for w in self.windows:
            one = f"{len(w.sizes)} x {w.sizes[0]}" if len({*w.sizes}) == 1 else ""
            cut = one or " + ".join(map(str, w.sizes))
            lines += [f"{w.name} ({cut}): ratio {w.ratio:.4g}, cosine {w.cosine:.4g}. {w.words}"]
        return "\n".join(lines)


def check_accumulation(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    accumulate: Callable[[Sequence[Any]], object] | None = None,
    micro_batches: int = 4,
) -> AccumulationCheck:
    """Compares one batch's gradient with the accumulated one, for four ways of cutting the batch.

    Weights, ``.grad``, buffers and random numbers are afterwards as they were. With dropout the
    loss is random: call ``model.eval()`` before. The memory is that of ``2 * micro_batches + 12``
    gradients.

    Args:
        model: The model.
        loss_fn: ``(model, batch) -> loss``, the loss of a batch as it should be, shape ``()``.
        batch: Dicts and tuples of tensors with a row for each sample. Numbers, texts and tensors
            without dimensions are kept. For all else hand over the samples' indices, as a tensor,
            and let ``loss_fn`` and the loop collate.
        accumulate: The loop's own window: is given the micro-batches, and calls ``backward`` on
            each. Default: ``(loss_fn(model, micro) / len(micros)).backward()``.
        micro_batches: Micro-batches of a whole window, as the loop is set.

    Returns:
        A window for each cut whose samples have a gradient; none beside one that shows that the
        loss cannot be cut: equal micro-batches, one sample at a time (of the first ``2 *
        micro_batches``), ragged ones, and a short last window with one micro-batch less.

    Raises:
        InputError: If the batch has fewer than ``2 * micro_batches`` samples, or not everything in
            it has as many rows; if no weight requires a gradient, or that is zero or not finite.
    """
    least = 2 * check_count("micro_batches", micro_batches, low=2)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("Parameter `model` should have weights that require a gradient.")
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    count = _count(batch, least)

    def by_mean(micros: Sequence[Any]) -> None:
        for micro in micros:
            (loss_fn(model, micro) / len(micros)).backward()

    windows: list[Window] = []
    with _as_it_was(model) as put_back:
        check = _Check(model, loss_fn, accumulate or by_mean, batch, micro_batches, put_back)
        for name, sizes in _cuts(count, micro_batches).items():
            window = check.window(name, sizes)
            if window.bug != "nothing":
                # Of the loss, not of the loop: other windows fit by chance, or show nothing new.
                windows = [*(windows if window.bug != "batch" else ()), window]
            elif not windows:
                raise InputError(
                    "Expected finite gradients, not all of them zero. Found others, in the window "
                    f"of {name}. Remedy: GradientWatch(model) names the layer."
                )
            if window.bug in ("random", "batch", "rounding"):
                break
    return AccumulationCheck(windows)


def _cuts(count: int, parts: int) -> dict[str, list[int]]:
    """Sizes of micro-batches by the name of the way in which they are cut."""
    equal, one = [count // parts] * parts, [1] * parts
    return {
        "equal micro-batches": equal,
        "one sample at a time": [*one, *one],
        "ragged micro-batches": [*one[1:], count - parts + 1],
        "short last window": equal[1:],
    }


def _count(batch: Any, least: int) -> int:
    """The number of a nest's samples: the length of all that it holds."""
    leaves = _pytree.tree_leaves(batch, is_leaf=lambda part: isinstance(part, list))
    lengths = {len(x) for x in leaves if isinstance(x, Tensor) and x.ndim}
    others = [type(x).__name__ for x in leaves if not isinstance(x, _KEPT)]
    if others or len(lengths) != 1 or min(lengths) < least:
        raise _not_samples(", ".join(others or map(str, sorted(lengths))) or "no tensor", least)
    return lengths.pop()


def _take(rows: Tensor, part: Any) -> Any:
    """Copies of some rows of a tensor; anything else as it is."""
    if not isinstance(part, Tensor) or not part.ndim:
        return part
    chosen = part.detach().index_select(0, rows.to(part.device))
    return chosen.requires_grad_(part.requires_grad)


def _not_samples(found: str, least: int) -> InputError:
    return InputError(
        f"Parameter `batch` should hold at least {least} samples, one in each row of all its "
        f"tensors, in dicts and tuples. Found {found}. Remedy: a larger batch; or a tensor of the "
        "samples' indices, which `loss_fn` and the loop collate."
    )


@dataclass
class _Check:
    """Takes gradients of windows of a batch, where ``whole`` micro-batches are set."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    loop: Callable[[Sequence[Any]], object]
    batch: Any
    whole: int
    put_back: Callable[[], bool]

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.sum = PackedSum(self.parameters)

    def window(self, name: str, sizes: Sequence[int]) -> Window:
        """Compares a window of micro-batches of some sizes."""
        rows = torch.arange(sum(sizes), device="cpu")
        micros = rows.split([*sizes])
        try:
            again, scaled = self.gradient(rows), self.gradient(rows, _FACTOR)
            full, *parts = [self.gradient(own) for own in (rows, *micros)]
        except Exception as error:
            raise _not_samples(f"{shown(error)}, in {name}", 2 * self.whole) from error
        used = self.left_by(lambda: self.loop([self.part(own) for own in micros]))
        products = self.products([full, used, again, scaled, *parts])
        # Roundings of adding up ``.grad`` in its own type.
        adding = max(torch.finfo(p.dtype).eps for p in self.parameters)
        bug = "steps" if self.put_back() else _bug(products, self.whole, adding)
        ratio, cosine = _ratio_and_cosine(products)
        words = _WORDS[bug].format(parts=len(sizes), whole=self.whole, ratio=ratio)
        return Window(name, tuple(sizes), ratio, cosine, bug, words)

    def part(self, rows: Tensor) -> Any:
        """Copies of some samples, which the loss may change."""
        return _pytree.tree_map(partial(_take, rows), self.batch)

    def left_by(self, work: Callable[[], object]) -> list[Tensor]:
        """Copies of this process's parts of the gradients that some work leaves, all real."""
        for p in self.parameters:
            p.requires_grad_().grad = None
        work()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return [values(local(grad).to_dense()).clone() for grad in grads]

    def gradient(self, rows: Tensor, factor: float = 1.0) -> list[Tensor]:
        """Gradient of the loss of samples."""
        batch = self.part(rows)
        return self.left_by(lambda: torch.autograd.backward(factor * self.loss(self.model, batch)))

    def products(self, vectors: Sequence[Sequence[Tensor]]) -> Tensor:
        """Inner products over all parameters on all ranks, with shape ``(vectors, vectors)``."""
        columns = []
        for tensors in zip(*vectors, strict=True):
            pieces = zip(*(x.reshape(-1).split(_CHUNK) for x in tensors), strict=True)
            rows = (torch.stack(piece).to(exact(piece[0].device)) for piece in pieces)
            columns.append(torch.stack([x @ x.T for x in rows]).sum(0))
        products = torch.stack(columns, dim=-1)
        return self.sum.of_all(products.flatten(0, 1)).sum(-1).cpu().view(products.shape[:2])


def _bug(products: Tensor, whole: int, adding: float) -> str:
    """Name of the bug of a window, by the products of its gradients."""
    parts, lengths, square = len(products) - _PARTS, products.diagonal(), products[0, 0]
    if not 0 < float(square + lengths[_AGAIN]) < math.inf:
        return "nothing"
    # A micro-batch without a gradient, as one without labels, says nothing of its weight.
    least = 1e-12 * float(lengths[_PARTS:].nan_to_num(0, 0, 0).max())
    seen = [i for i in range(parts) if least < float(lengths[_PARTS + i]) < math.inf]
    (right, left), (used, unused) = (_fit(products, seen, i) for i in (_WHOLE, _USED))
    again, scaled = (
        _share(square + lengths[i] / factor**2 - 2 * products[_WHOLE, i] / factor, square)
        for i, factor in ((_AGAIN, 1.0), (_SCALED, _FACTOR))
    )
    # Far below any bug, and far above the roundings of sums in another order.
    floor = max(math.sqrt(torch.finfo(torch.float32).eps), 4 * adding)
    # Roundings of the parts, together, are no larger than the whole batch's.
    tolerance = max(floor, 4 * scaled)
    # Random numbers look like large roundings, but come with the same factor too.
    if again > max(floor, scaled / 4):
        return "random"
    # Half of the smallest bug: one micro-batch too few.
    if tolerance > 0.5 / whole:
        return "rounding"
    ratio, cosine = _ratio_and_cosine(products)
    near = partial(math.isclose, rel_tol=tolerance)
    if not math.isfinite(ratio):
        return "overflow"
    if near(ratio, 1) and near(cosine, 1):
        return ""
    if left > tolerance:
        return "batch"
    if unused > tolerance:
        return "other"
    if float(used.abs().min()) <= tolerance * float(used.abs().max()):
        return "lost"
    is_even, should_be_even = (
        float((x - x.mean()).abs().max() / x.abs().max()) <= tolerance for x in (used, right)
    )
    if not near(cosine, 1) or (is_even and not should_be_even):
        return "means" if is_even else "weights"
    factors = {"sum": parts, "twice": 1 / parts, "short": parts / whole}
    return next((bug for bug, factor in factors.items() if near(ratio, factor)), "factor")


def _ratio_and_cosine(products: Tensor) -> tuple[float, float]:
    """Ratio and cosine of the loop's gradient to the whole batch's."""
    whole, used = products[_WHOLE, _WHOLE].sqrt(), products[_USED, _USED].sqrt()
    return float(used / whole), float(products[_WHOLE, _USED] / (whole * used))


def _fit(products: Tensor, seen: Sequence[int], vector: int) -> tuple[Tensor, float]:
    """Least-squares weights of the micro-batches' gradients in a vector, and the residual."""
    parts = products[_PARTS:, _PARTS:][seen][:, seen]
    with_it = products[_PARTS:, vector][seen].nan_to_num(0, 0, 0)
    weights: Tensor = torch.linalg.lstsq(parts, with_it[:, None], driver="gelsd").solution[:, 0]
    fitted = 2 * weights @ with_it - weights @ parts @ weights
    return weights, _share(products[vector, vector] - fitted, products[vector, vector])


def _share(square: Tensor, whole: Tensor) -> float:
    return float((square / whole.clamp(min=1e-300)).clamp(min=0).sqrt())


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Puts all back at the end; the function puts weights and buffers back: had weights changed?"""
    grads = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    # Buffers by their places: a forward pass may put another tensor in one's.
    places: list[dict[str, Any]] = [dict(model.named_parameters())]
    places += [module._buffers for module in model.modules()]
    held = [(place, name, x) for place in places for name, x in place.items() if x is not None]
    copies = [x.detach().clone() for *_, x in held]

    @torch.no_grad()
    def put_back() -> bool:
        stepped = False
        for (place, name, x), was in zip(held, copies, strict=True):
            # Written only where they differ: graphs that hold them stay valid.
            if not torch.equal(local(x.detach()), local(was)):
                x.copy_(was)
                stepped = stepped or isinstance(x, nn.Parameter)
            place[name] = x
        return stepped

    # The loop's own ``model.train()`` changes nothing.
    stay = patch.object(model, "train", lambda mode=True: model)
    try:
        with stay, torch.random.fork_rng():
            yield put_back
    finally:
        put_back()
        for p, grad, is_trained in grads:
            p.requires_grad_(is_trained).grad = grad


_WORDS = {
    "": "The same gradient.",
    "nothing": "",
    "random": "The loss is random. Remedy: turn dropout off (model.eval()).",
    "rounding": "Roundings are too large. Remedy: the check in float32, or earlier in training.",
    "batch": "A sample's loss depends on the other samples (BatchNorm), or it is no sample.",
    "steps": "The loop changes the weights, which were put back. Remedy: leave the step out.",
    "lost": "Some micro-batches are not in the gradient. Remedy: clear and clip once a window.",
    "overflow": "The accumulated gradient alone is not finite. Remedy: look for divisions by zero.",
    "sum": "Losses are added up: the gradient is {parts} times too large. Remedy: divide each.",
    "twice": "The gradient is {parts} times too small. Remedy: leave one of two divisions out.",
    "short": "The loop divides by {whole} where the window has {parts} micro-batches.",
    "means": "A mean of means. Remedy: add up all losses, and divide once by the window's number.",
    "factor": "The gradient has the right direction, and {ratio:.4g} times the right length.",
    "weights": "Micro-batches have other weights than in the whole batch's gradient.",
    "other": "The gradient is no sum of the micro-batches': look for clipping, or leftovers.",
}
