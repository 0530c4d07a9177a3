"""Compares the gradient that a loop accumulates over micro-batches with the whole batch's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from steadygrad._checks import InputError, check_count, shown
from steadygrad.numerics import exact
from steadygrad.shards import PackedSum, local
from steadygrad.watch.hooks import values

# Elements of a parameter whose inner products are taken at a time.
_CHUNK = 2**20
# A factor that no binary type holds exactly: a loss with it has other roundings all the way back.
_FACTOR = 0.7

_WORDS = {
    "": "The same gradient.",
    "sum": "Losses are added up: the gradient is {parts} times too large. Remedy: divide each.",
    "twice": "The gradient is {parts} times too small. Remedy: leave one of two divisions out.",
    "means": "A mean of means. Remedy: add up all losses, and divide once by the window's number.",
    "lost": "Micro-batches are lost. Remedy: clear, clip and step only after the window.",
    "other": "Not the whole batch's gradient.",
    "batch": "A sample's loss depends on the other samples (BatchNorm), or it is no sample.",
    "unclear": "The whole batch's gradient is another one each time, by dropout (remedy: "
    "model.eval()) or by rounding (remedy: float32, or earlier in training).",
}


@dataclass(frozen=True)
class Window:
    """One way of cutting the batch, and how its gradient compares with the whole one's.

    Attributes:
        sizes: Samples of each micro-batch.
        ratio: Norm of the accumulated gradient over that of the whole batch's.
        cosine: Cosine of the angle between them.
        bug: Empty where both are equal; ``"sum"``, ``"twice"``, ``"means"`` or ``"lost"``, or
            ``"other"`` for any other difference. Where the loss is the reason, not the loop:
            ``"batch"`` and ``"unclear"``.
    """

    name: str
    sizes: tuple[int, ...]
    ratio: float
    cosine: float
    bug: str

    @property
    def words(self) -> str:
        """Description of the bug, and the remedy."""
        return _WORDS[self.bug].format(parts=len(self.sizes))

    def __str__(self) -> str:
        alike = len({*self.sizes}) == 1
        cut = f"{len(self.sizes)} x {self.sizes[0]}" if alike else " + ".join(map(str, self.sizes))
        compared = f"ratio {self.ratio:.4g}, cosine {self.cosine:.4g}"
        return f"{self.name} ({cut}): {compared}. {self.words}"


@dataclass(frozen=True)
class AccumulationCheck:
    """Comparison of the gradients in each window."""

    windows: Sequence[Window]

    @property
    def bugs(self) -> Sequence[str]:
        """Names of the bugs found, each once."""
        return list(dict.fromkeys(window.bug for window in self.windows if window.bug))

    def __str__(self) -> str:
        return "\n".join(map(str, self.windows))


def check_accumulation(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    accumulate: Callable[[Sequence[Any]], object] | None = None,
    micro_batches: int = 4,
) -> AccumulationCheck:
    """Compares one batch's gradient with the accumulated one, for four ways of cutting the batch.

    Weights, ``.grad``, buffers and random numbers are afterwards as they were. The memory is that
    of ``2 * micro_batches + 8`` gradients. With dropout call ``model.eval()`` before.

    Args:
        model: The model.
        loss_fn: ``(model, batch) -> loss``, the loss of a batch as it should be, shape ``()``.
        batch: Dicts and tuples of tensors with a row for each sample, or a tensor of their indices,
            which the loop collates. Numbers, texts and tensors without dimensions are kept.
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
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError("Parameter `model` should have weights that require a gradient.")
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    count = _count(batch, least)
    # Roundings of sums in another order, and of adding up ``.grad`` in its own type.
    rounding = max(1e-3, *(4 * torch.finfo(p.dtype).eps for p in trained))

    def by_mean(micros: Sequence[Any]) -> None:
        for micro in micros:
            (loss_fn(model, micro) / len(micros)).backward()

    windows: list[Window] = []
    for name, sizes in _cuts(count, micro_batches).items():
        with _as_it_was(model):
            products = _products(model, loss_fn, accumulate or by_mean, batch, sizes)
        if not 0 < float(products[0, 0]) < math.inf:
            if windows:
                continue
            raise InputError(
                "Expected finite gradients, not all of them zero. Found others, in the window of "
                f"{name}. Remedy: GradientWatch(model) names the layer."
            )
        bug = _bug(products, micro_batches, rounding)
        if bug == "means" and sum(p.numel() for p in trained) <= len(sizes):
            bug = "other"  # parts of so few weights have any gradient in their span
        if bug == "batch":
            windows.clear()  # others fitted by chance
        norms = products.diagonal().sqrt()
        ratio, cosine = norms[1] / norms[0], products[0, 1] / (norms[0] * norms[1])
        windows.append(Window(name, tuple(sizes), float(ratio), float(cosine), bug))
        if bug in ("batch", "unclear"):
            break  # of the loss, not of the loop: other windows show nothing new
    return AccumulationCheck(windows)


def _cuts(count: int, parts: int) -> dict[str, list[int]]:
    """Sizes of micro-batches by the name of the way in which they are cut."""
    equal, one = [count // parts] * parts, [1] * (parts - 1)
    return {
        "equal micro-batches": equal,
        "one sample at a time": [1] * 2 * parts,
        "ragged micro-batches": [*one, count - len(one)],
        "short last window": equal[1:],
    }


def _count(batch: Any, least: int) -> int:
    """The number of a nest's samples: the length of all that it holds."""
    leaves = _pytree.tree_leaves(batch, is_leaf=lambda part: isinstance(part, list))
    kept = Tensor | int | float | str | None
    lengths = {len(x) for x in leaves if isinstance(x, Tensor) and x.ndim}
    others = [type(x).__name__ for x in leaves if not isinstance(x, kept)]
    if others or len(lengths) != 1 or min(lengths) < least:
        raise _not_samples(", ".join(others or map(str, sorted(lengths))) or "no tensor")
    return lengths.pop()


def _not_samples(found: str) -> InputError:
    return InputError(
        "Parameter `batch` should hold two samples or more for each micro-batch, one in each row "
        f"of all its tensors, in dicts and tuples. Found {found}. Remedy: a larger batch; or a "
        "tensor of the samples' indices, which `loss_fn` and the loop collate."
    )


def _products(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    loop: Callable[[Sequence[Any]], object],
    batch: Any,
    sizes: Sequence[int],
) -> Tensor:
    """Inner products of gradients: the whole batch's, the loop's, a scaled one, and the parts'."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = torch.arange(sum(sizes), device="cpu")
    micros = rows.split([*sizes])

    def left_by(work: Callable[..., object], *given: Any) -> list[Tensor]:
        for p in parameters:
            p.grad = None
        work(*given)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # Copies of this process's parts, all real.
        return [values(local(grad).to_dense()).clone() for grad in grads]

    def backward(rows: Tensor, factor: float = 1.0) -> None:
        torch.autograd.backward(factor * loss_fn(model, _samples(batch, rows)))

    try:
        scaled, full = left_by(backward, rows, _FACTOR), left_by(backward, rows)
        parts = [left_by(backward, own) for own in micros]
    except Exception as error:
        raise _not_samples(f"{shown(error)}, of micro-batches of {[*sizes]}") from error
    used = left_by(loop, [_samples(batch, own) for own in micros])
    columns = []
    for tensors in zip(full, used, scaled, *parts, strict=True):
        pieces = zip(*(x.reshape(-1).split(_CHUNK) for x in tensors), strict=True)
        stacks = (torch.stack(piece).to(exact(piece[0].device)) for piece in pieces)
        columns.append(torch.stack([x @ x.T for x in stacks]).sum(0))
    products = torch.stack(columns, dim=-1)
    total = PackedSum(parameters).of_all(products.flatten(0, 1)).sum(-1)
    return total.view(products.shape[:2]).cpu().double()


def _samples(batch: Any, rows: Tensor) -> Any:
    """Copies of some samples, which the loss may change."""

    def take(part: Tensor) -> Tensor:
        chosen = part.detach().index_select(0, rows.to(part.device)) if part.ndim else part
        return chosen.requires_grad_(part.requires_grad)

    return _pytree.tree_map_only(Tensor, take, batch)


def _bug(products: Tensor, whole: int, tolerance: float) -> str:
    """Name of a window's bug, where ``whole`` micro-batches are set."""
    is_finite = bool(products[1, 1].isfinite())
    # A micro-batch without labels may have a gradient of 0 / 0, which is in no other one.
    products = products.nan_to_num(0, 0, 0)
    full, used, scaled, *parts = torch.eye(len(products), dtype=products.dtype)

    def apart(one: Tensor, other: Tensor) -> float:
        """Distance of two sums of gradients over the length of the other one."""
        square, length = (float(x @ products @ x) for x in (one - other, other))
        return math.sqrt(max(square, 0) / length) if length > 0 else math.inf

    def along(one: Tensor, other: Tensor) -> bool:
        """Whether two sums of gradients have one direction."""
        factor = (one @ products @ other) / (other @ products @ other)
        return bool(factor > 0) and apart(one, factor * other) <= tolerance

    # Roundings of the parts, together, are no larger than the whole batch's.
    tolerance = max(tolerance, 4 * apart(scaled / _FACTOR, full))
    # Half of the smallest bug: one micro-batch too few.
    if tolerance > 0.5 / whole:
        return "unclear"
    if not is_finite:
        return "other"
    if apart(used, full) <= tolerance:
        return ""
    fit = torch.linalg.lstsq(products[3:, 3:], products[3:, :1], driver="gelsd").solution[:, 0]
    if apart(fit @ torch.stack(parts), full) > tolerance:
        return "batch"
    if along(used, full):
        factors = {"sum": len(parts), "twice": 1 / len(parts)}
        near = (name for name, x in factors.items() if apart(used, x * full) <= tolerance)
        return next(near, "other")
    if along(used, torch.stack(parts).sum(0)):
        return "means"
    # Nothing is left, or the last micro-batch alone.
    return "lost" if not products[1, 1] or along(used, parts[-1]) else "other"


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts gradients, weights, buffers and random numbers back at the end."""
    grads = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    # A forward pass may put another tensor in a buffer's place.
    places = [(module._buffers, {**module._buffers}) for module in model.modules()]
    copies = [(x, x.detach().clone()) for x in (*model.parameters(), *model.buffers())]
    try:
        # The loop's own ``model.train()`` changes nothing.
        with patch.object(model, "train", lambda mode=True: model), torch.random.fork_rng():
            yield
    finally:
        for buffers, own in places:
            buffers.update(own)
        with torch.no_grad():
            for x, was in copies:
                # Written only where they differ: graphs that hold them stay valid.
                if not torch.equal(local(x.detach()), local(was)):
                    x.copy_(was)
        for p, grad, is_trained in grads:
            p.requires_grad_(is_trained).grad = grad
