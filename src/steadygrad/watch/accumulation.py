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
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError, check_count, shown
from steadygrad._names import plain_name
from steadygrad._nests import row_counts, take_rows
from steadygrad.numerics import exact
from steadygrad.shards import PackedSum, local

__all__ = ["AccumulationCheck", "Window", "check_accumulation"]

Loss = Callable[[nn.Module, Any], Tensor]
Accumulate = Callable[[Sequence[Any]], object]

# Elements of a parameter whose inner products are taken at a time.
_CHUNK = 2**20
# A factor that no binary type holds exactly.
_OTHER_SCALE = 0.7
# The vectors before those of the micro-batches: the gradients of the whole batch, the loop, the
# whole batch again, and of its samples in another order.
_WHOLE, _USED, _AGAIN, _MIXED, _PARTS = range(5)


@dataclass(frozen=True)
class Window:
    """One way of cutting the batch, and how its gradient compares with the whole one's.

    Attributes:
        name: Name of the way.
        sizes: Samples of each micro-batch.
        ratio: Norm of the accumulated gradient over that of the whole batch's.
        cosine: Cosine of the angle between them.
        layers: Ratio and cosine of each module that has weights.
        bug: Name of the bug; empty where both are equal.
        words: Description of the bug, and the remedy.
    """

    name: str
    sizes: tuple[int, ...]
    ratio: float
    cosine: float
    layers: Mapping[str, tuple[float, float]]
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
            found = f"ratio {w.ratio:.4g}, cosine {w.cosine:.4g}"
            lines.append(f"{w.name} ({cut}): {found}. {w.words}")
        return "\n".join(lines)


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
    numbers are afterwards as they were. Dropout is turned off meanwhile. The memory is that of
    ``2 * micro_batches + 12`` gradients.

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
        A window for each cut whose samples have a gradient; none beside one that shows that the
        loss cannot be cut.

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
    count = (samples or least) if split else _count(batch, least, samples)
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
        "ragged micro-batches": _ragged(count, micro_batches),
        "short last window": equal[:-1],
    }
    with _as_it_was(model) as put_back:
        loop, is_split = accumulate or by_mean, split is not None
        judge = _Judge(model, loss_fn, loop, part, micro_batches, is_split, put_back)
        whole()
        changed = put_back()
        windows: list[Window] = []
        for name, sizes in ways.items():
            window = judge(name, sizes)
            if window.bug == "random" and not windows:
                _settle(model, whole, changed)
                window = judge(name, sizes)
            # Samples without labels, say.
            if window.bug == "nothing" and windows:
                continue
            if window.bug in ("nothing", "unknown"):
                raise InputError(
                    "Expected finite gradients, not all of them zero. Found others, in the window "
                    f"of {name}. Remedy: GradientWatch(model) names the layer."
                )
            # Of the loss, not of the loop: other windows fit by chance, or would show nothing new.
            windows = [*(windows if window.bug != "batch" else ()), window]
            if window.bug in ("random", "batch", "rounding"):
                break
        return AccumulationCheck(windows)


def _count(batch: Any, least: int, given: int | None) -> int:
    """The number of a nest's samples: a length of at least ``least`` that all that it holds has."""
    lengths = row_counts(batch) if given is None else [given]
    found = str(lengths[0]) if lengths else type(batch).__name__
    for count in dict.fromkeys(length for length in lengths if length >= least):
        try:
            take_rows(batch, count, torch.arange(0, device="cpu"))
        # Sparse and nested tensors of some kinds cannot be cut.
        except (LookupError, RuntimeError) as error:
            found = f"{str(error).splitlines()[0]} beside {count} samples"
        else:
            return count
    raise _not_samples(found, least)


def _not_samples(found: str, least: int) -> InputError:
    return InputError(
        f"Parameter `batch` should hold at least {least} samples, one in each row of all its "
        f"tensors, arrays and lists, in any order. Found {found}. Remedy: a larger batch; or "
        "`split=`, a function from the batch and indices to a micro-batch of these samples."
    )


def _ragged(count: int, parts: int) -> list[int]:
    """Sizes that grow by equal steps, as nearly as whole numbers do."""
    more = count - parts
    ends = [round(more * i * (i + 1) / (parts * (parts + 1))) for i in range(parts + 1)]
    return [1 + stop - start for start, stop in pairwise(ends)]


@dataclass
class _Judge:
    """Takes the gradients of one window, and names their fault."""

    model: nn.Module
    loss: Loss
    loop: Accumulate
    part: Callable[[Tensor], Any]
    micro_batches: int
    is_split: bool
    put_back: Callable[[], list[Tensor]]

    def __post_init__(self) -> None:
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.layers = [plain_name(name).rpartition(".")[0] for name, _ in named]
        self.parameters = [p for _, p in named]
        self.sum = PackedSum(self.parameters)
        # Far below any bug, and far above the roundings of sums in another order and of adding up
        # ``.grad`` in its own type.
        adding = max(torch.finfo(p.dtype).eps for p in self.parameters)
        self.floor = max(math.sqrt(torch.finfo(torch.float32).eps), 4 * adding)

    def __call__(self, name: str, sizes: Sequence[int]) -> Window:
        products, squares = self._products(*self._gradients(name, sizes))
        total, lengths = products.sum(-1), products.sum(-1).diagonal()
        # A micro-batch without a gradient, as one without labels, says nothing of its weight.
        least = 1e-12 * float(lengths[_PARTS:].nan_to_num(0, 0, 0).max())
        seen = [i for i, x in enumerate(lengths) if i < _PARTS or least < float(x) < math.inf]
        total, squares = total[seen][:, seen], squares.sum(-1)[seen]
        ratio, cosine = _compared(total)
        layers = {
            layer: _compared(products[..., [n == layer for n in self.layers]].sum(-1))
            for layer in dict.fromkeys(self.layers)
        }
        (right, _), (got, _) = _fit(total, _WHOLE), _fit(total, _USED)
        own, parts = squares[_WHOLE], right.square() @ squares[_PARTS:]
        rounding = (torch.stack([own, own + parts]) / total[_WHOLE, _WHOLE]).sqrt().tolist()
        bug = _bug(total, self.floor, rounding, len(sizes), self.micro_batches)
        if squares[_USED]:
            bug = "steps"
        if bug == "order":
            raise _not_samples(
                f"another gradient in another order, in {name}", 2 * self.micro_batches
            )
        if bug == "batch" and not lengths.isfinite().all():
            bug = "unknown"
        used, needed = (", ".join(f"{x:.3g}" for x in found.tolist()) for found in (got, right))
        amounts = got.abs().tolist()
        words = _WORDS.get(bug, "").format(
            parts=len(sizes),
            whole=self.micro_batches,
            ratio=ratio,
            left=sum(10 * x > max(amounts) for x in amounts),
            used=used,
            right=needed,
        )
        return Window(name, tuple(sizes), ratio, cosine, layers, bug, words)

    def _gradients(
        self, name: str, sizes: Sequence[int]
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Gradients in the order of the constants, and squares: roundings, and the loop's steps."""
        rows = torch.arange(sum(sizes), device="cpu")
        # Each row at another place than before.
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0), device="cpu")
        moved = rows if self.is_split else rows[order.roll(1)[order.argsort()]]
        micros = rows.split([*sizes])
        try:
            again, mixed = (self._gradient(self.backward, self.part(x)) for x in (rows, moved))
            measured = [self._measured(own) for own in (rows, *micros)]
        except Exception as error:
            if self.is_split:
                raise
            raise _not_samples(f"{shown(error)}, in {name}", 2 * self.micro_batches) from error
        (whole, *parts), (noise, *noises) = zip(*measured, strict=True)
        used = self._gradient(self.loop, [self.part(own) for own in micros])
        steps = torch.zeros_like(noise)
        steps += any(isinstance(changed, nn.Parameter) for changed in self.put_back())
        return [whole, used, again, mixed, *parts], [noise, steps, noise, noise, *noises]

    def backward(self, batch: Any, factor: float = 1.0) -> None:
        """A backward pass of the loss of a batch."""
        torch.autograd.backward(factor * self.loss(self.model, batch))

    def _measured(self, rows: Tensor) -> tuple[list[Tensor], Tensor]:
        """Gradient of samples, and squares of its roundings, with shape ``(parameters)``."""
        # Another factor of the loss makes other roundings all the way back.
        gradient = self._gradient(self.backward, self.part(rows))
        scaled = self._gradient(partial(self.backward, factor=_OTHER_SCALE), self.part(rows))
        pairs = zip(gradient, scaled, strict=True)
        apart = [x.to(exact(x.device)) - y.to(exact(y.device)) / _OTHER_SCALE for x, y in pairs]
        return gradient, torch.stack([x.square().sum() for x in apart])

    def _gradient(self, work: Callable[[Any], object], batches: Any) -> list[Tensor]:
        """Copies of this process's parts of the gradients that some work leaves, all real."""
        for p in self.parameters:
            p.requires_grad_().grad = None
        work(batches)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        found = [local(grad.detach()).to_dense().clone() for grad in grads]
        return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]

    def _products(
        self, vectors: Sequence[Sequence[Tensor]], squares: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Inner products, shape ``(vectors, vectors, parameters)``, and squares, of all ranks."""
        columns = []
        for tensors in zip(*vectors, strict=True):
            pieces = zip(*(x.reshape(-1).split(_CHUNK) for x in tensors), strict=True)
            rows = (torch.stack(piece).to(exact(piece[0].device)) for piece in pieces)
            columns.append(torch.stack([x @ x.T for x in rows]).sum(0))
        products = torch.stack(columns, dim=-1)
        packed = self.sum.of_all(torch.cat([products.flatten(0, 1), torch.stack([*squares])])).cpu()
        return packed[: -len(squares)].view(products.shape), packed[-len(squares) :]


def _bug(products: Tensor, floor: float, rounding: list[float], parts: int, whole: int) -> str:
    """Name of the fault of a window of ``parts`` micro-batches where ``whole`` are set.

    ``floor`` is the least relative difference that counts; ``rounding`` are the relative roundings
    of the whole batch's gradient, and with its parts' as well.
    """
    tolerance = max(floor, 3 * rounding[1])
    near = partial(math.isclose, rel_tol=tolerance)
    ratio, cosine = _compared(products)
    square, lengths = products[_WHOLE, _WHOLE], products.diagonal()
    again, mixed = (square + lengths - 2 * products[_WHOLE])[[_AGAIN, _MIXED]]
    if not 0 < float(square + lengths[_AGAIN]) < math.inf:
        return "unknown" if square else "nothing"
    if ratio == 0:
        return "lost" if len(lengths) > _PARTS else "batch"
    # Random numbers look like large roundings, but come with the same factor too.
    if _share(again, square) > max(floor, rounding[0] / 4):
        return "random"
    # Half of the smallest bug: one micro-batch too few.
    if tolerance > 0.5 / whole:
        return "rounding"
    if not _share(mixed, square) <= tolerance:
        return "order"
    if not math.isfinite(ratio):
        return "overflow"
    if near(ratio, 1) and near(cosine, 1):
        return ""
    (right, left), (used, unused) = _fit(products, _WHOLE), _fit(products, _USED)
    if left > tolerance:
        return "batch"
    if unused > tolerance:
        return "other"
    largest = float(used.abs().max())
    if float(used.abs().min()) < tolerance * largest:
        return "lost"
    alike = [float((x - x.mean()).abs().max() / x.abs().max()) <= tolerance for x in (used, right)]
    if near(cosine, 1) and alike != [True, False]:
        found = {"sum": parts, "twice": 1 / parts, "short": parts / whole}
        return next((bug for bug, factor in found.items() if near(ratio, factor)), "factor")
    return "means" if alike[0] else "weights"


def _compared(products: Tensor) -> tuple[float, float]:
    """Ratio and cosine of vector 1 to vector 0; both are 1 for two zeros."""
    whole, used = products[0, 0].sqrt(), products[1, 1].sqrt()
    if float(whole) == float(used) == 0.0:
        return 1.0, 1.0
    return float(used / whole), float(products[0, 1] / (whole * used))


def _fit(products: Tensor, vector: int) -> tuple[Tensor, float]:
    """Least-squares weights of the micro-batches' gradients in a vector, and the residual."""
    inner, with_it = products[_PARTS:, _PARTS:], products[_PARTS:, vector].nan_to_num(0, 0, 0)
    weights: Tensor = torch.linalg.lstsq(inner, with_it[:, None], driver="gelsd").solution[:, 0]
    fitted = 2 * weights @ products[_PARTS:, vector] - weights @ inner @ weights
    return weights, _share(products[vector, vector] - fitted, products[vector, vector])


def _share(square: Tensor, whole: Tensor) -> float:
    return float((square / whole.clamp(min=1e-300)).clamp(min=0).sqrt())


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[Callable[[], list[Tensor]]]:
    """Puts all back at the end; the function puts weights and buffers back, and returns which."""
    grads = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    # Buffers by their names: a forward pass may put another tensor in one's place.
    places: list[tuple[Any, str, Tensor | None]] = [({"": p}, "", p) for p, *_ in grads]
    places += [(m._buffers, name, x) for m in model.modules() for name, x in m._buffers.items()]
    kept = [(place, name, x, x.detach().clone()) for place, name, x in places if x is not None]
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

    # The loop's own ``model.train()`` changes nothing.
    stay = patch.object(model, "train", lambda mode=True: model)
    try:
        with stay, torch.random.fork_rng():
            for p, *_ in grads:
                p.grad = None
            yield put_back
    finally:
        put_back()
        for p, grad, is_trained in grads:
            p.requires_grad_(is_trained).grad = grad
        for module, training, dropout in settings:
            module.training = training
            if isinstance(module, nn.RNNBase):
                module.dropout = dropout


def _settle(model: nn.Module, work: Callable[[], object], changed: list[Tensor]) -> None:
    """Turns dropout off: evaluation mode, but for modules with statistics, which a pass changed.

    If the loss fails in evaluation mode, only innermost modules are in it.
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


_WORDS = {
    "": "The same gradient.",
    "random": "The whole batch has another gradient each time. Remedy: for this check, turn off "
    "random numbers, and modules that each pass changes (spectral norm).",
    "rounding": "The rounding error of this gradient is too large for a comparison. Remedy: make "
    "the check in float32, without autocast, or earlier in training.",
    "batch": "The whole batch's gradient is not a weighted sum of the micro-batches' gradients: a "
    "sample's loss depends on the other samples (BatchNorm, a contrastive loss), or what was cut "
    "is no sample. Remedy: statistics that do not depend on the batch, or no accumulation.",
    "steps": "The loop changes the weights, which were put back; an optimizer's state was not. "
    "Remedy: leave the step out of `accumulate`.",
    "lost": "Only {left} of {parts} micro-batches are in the gradient with their weight. Remedy: a "
    "backward pass for each, gradients cleared once a window, before the first, and no clipping "
    "between them.",
    "overflow": "The accumulated gradient is not finite, and the whole batch's is. Remedy: look "
    "for a division by zero, as for a micro-batch without labels.",
    "sum": "The gradient is {parts} times too large: losses are added up. Remedy: divide each by "
    "the number of micro-batches.",
    "twice": "The gradient is {parts} times too small: it is divided by the number of micro-"
    "batches twice. Remedy: leave one of the two divisions out.",
    "short": "The loop divides by {whole} where the window has {parts} micro-batches. Remedy: "
    "divide by the number that it has.",
    "means": "All micro-batches have the same weight although they contribute different parts of "
    "the loss (a mean of means). Remedy: add up the losses of all samples or tokens, and divide "
    "once by their number in the whole window.",
    "factor": "The gradient is {ratio:.4g} times as large as it should be, in the right "
    "direction. Remedy: look for what the losses are divided by.",
    "weights": "Micro-batches have the weights ({used}) where ({right}) would be right. Remedy: "
    "look for what each micro-batch's loss is divided by, and for clipping between them.",
    "other": "The accumulated gradient is not made of the micro-batches' gradients. Remedy: look "
    "for gradients that were left from before, clipping, or another loss in the loop.",
}
