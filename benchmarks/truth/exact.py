"""Expected losses of a world, and what they say about batch sizes.

SGD has closed forms: the weights' second moments after a step follow from those before it. Adam
has none; its expected loss is the mean over many replicas, drawn at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from benchmarks.truth.worlds import BETAS, EPS, World, weights_of
from numba import njit
from scipy.optimize import isotonic_regression
from torch import nn
from torch.optim import Optimizer

from steadygrad.noise.schedule import learning_rate

__all__ = [
    "Critical",
    "Curve",
    "Start",
    "critical_batch",
    "expected_curve",
    "fall_over_spread",
    "from_scratch_overhead",
    "overhead",
    "scratch",
    "start_of",
    "steps_curve",
    "steps_overhead",
]

CAP = 3.0  # an overhead of at least this much is a divergence
REACH = 1.5  # how far past a length the smallest batch's curve goes
LEAST_STEPS = 4  # of the largest batch size looked at
REPLICAS = 256
CHUNK = 2**22  # random numbers drawn at once

Stages = Sequence[tuple[int, int, float]]


@dataclass(frozen=True)
class Start:
    """Where training goes on from.

    Attributes:
        weights: Measured from the best ones, with shape ``(size,)``.
        first: Adam's average gradient; None for zero.
        second: Adam's average squared gradient; None for zero.
        steps: Steps that these averages are of.
    """

    weights: np.ndarray
    first: np.ndarray | None = None
    second: np.ndarray | None = None
    steps: int = 0


def scratch(world: World) -> Start:
    """The untrained model; by symmetry the signs of its weights change no expected loss."""
    return Start(world.initial)


def start_of(model: nn.Module, optimizer: Optimizer) -> Start:
    """Where a task's model and optimizer are."""
    state = optimizer.state.get(model.weight, {})
    if "exp_avg" not in state:
        return Start(weights_of(model).copy())
    first, second = (state[name].double().numpy().copy() for name in ("exp_avg", "exp_avg_sq"))
    return Start(weights_of(model).copy(), first, second, int(state["step"]))


@dataclass(frozen=True)
class Curve:
    """Expected loss against samples.

    Attributes:
        samples: Ascending, from 0.
        loss: Expected validation loss after them.
        error: Standard error of ``loss``; zero where it is exact.
        spread: Standard deviation of a single run's loss; zero where it is not known.
    """

    samples: np.ndarray
    loss: np.ndarray
    error: np.ndarray
    spread: np.ndarray

    def at(self, samples: float) -> float:
        return float(np.interp(samples, self.samples, self.loss))

    def error_at(self, samples: float) -> float:
        return float(np.interp(samples, self.samples, self.error))

    def samples_at(self, loss: float) -> float:
        """Samples after which the curve is first as low as a loss; infinite if it never is."""
        lowest = np.minimum.accumulate(self.loss)
        if self.error.any():  # the lowest of many noisy losses is too low
            lowest = isotonic_regression(self.loss, increasing=False).x
        if not loss >= lowest[-1]:
            return math.inf if loss < lowest[-1] else 0.0
        i = int(np.argmax(lowest <= loss))
        if i == 0:
            return 0.0
        part = (lowest[i - 1] - loss) / (lowest[i - 1] - lowest[i])
        return float(self.samples[i - 1] + part * (self.samples[i] - self.samples[i - 1]))


def expected_curve(
    world: World,
    start: Start,
    batch_size: int,
    lr: float,
    n_steps: int,
    *,
    replicas: int = REPLICAS,
) -> Curve:
    """The expected loss after every step at one batch size."""
    batches = np.full(n_steps, batch_size, dtype=np.int64)
    return _curve(world, start, batches, np.full(n_steps, float(lr)), replicas)


def steps_curve(
    world: World, batches: np.ndarray, rates: np.ndarray, replicas: int = REPLICAS
) -> Curve:
    """The expected loss after steps of given batch sizes and rates from the untrained model."""
    return _curve(world, scratch(world), batches, rates, replicas)


def _curve(
    world: World,
    start: Start,
    batches: np.ndarray,
    rates: np.ndarray,
    replicas: int,
    simulate: bool = False,
) -> Curve:
    samples = np.concatenate([[0], np.cumsum(batches)])
    multiplicative = world.kind == "regression"
    if world.optimizer == "adam" or simulate:
        mean, spread = _simulated(world, start, batches, rates, replicas)
        return Curve(samples, mean, spread / math.sqrt(replicas), spread)
    loss = _moments(
        start.weights**2,
        world.curvatures,
        world.covariance,
        world.noise**2,
        multiplicative,
        batches,
        rates,
    )
    return Curve(samples, loss, np.zeros_like(loss), np.zeros_like(loss))


@njit(cache=True)
def _moments(squares, h, covariance, variance, multiplicative, batches, rates):
    """Expected losses from the weights' expected squares.

    With features ``x ~ N(0, H)``, ``E[x x' M x x'] = 2 H M H + tr(H M) H``.
    """
    squares, loss = squares.copy(), np.empty(len(batches) + 1)
    loss[0] = (variance + (h * squares).sum()) / 2
    for t in range(len(batches)):
        rate, share = rates[t], 1.0 / batches[t]
        noise, own = variance, 1.0
        if multiplicative:
            noise, own = 2 * loss[t], 1 + share
        squares = squares * ((1 - rate * h) ** 2 + (own - 1) * (rate * h) ** 2)
        squares += share * rate**2 * noise * covariance
        loss[t + 1] = (variance + (h * squares).sum()) / 2
    return loss


def _simulated(world, start, batches, rates, replicas):
    """Mean and standard deviation of the losses of many runs."""
    generator = np.random.default_rng([len(batches), int(batches.sum()), replicas])
    shape, steps = (replicas, world.size), len(batches)
    zeros = np.zeros(world.size)
    state = [
        np.broadcast_to(zeros if part is None else part, shape).astype(np.float32)
        for part in (start.weights, start.first, start.second)
    ]
    sums = np.zeros((2, steps + 1))
    sums[0, 0] = float(world.loss(start.weights)) * replicas
    sums[1, 0] = sums[0, 0] ** 2 / replicas
    stride = max(1, CHUNK // (replicas * world.size))
    h, roots = (a.astype(np.float32) for a in (world.curvatures, np.sqrt(world.covariance)))
    for t in range(0, steps, stride):
        part = slice(t, min(t + stride, steps))
        count = part.stop - t
        normals = generator.standard_normal((count, *shape), dtype=np.float32)
        squares = np.ones((count, replicas), dtype=np.float32)
        if world.kind == "regression":
            # Mean of the squares of a batch's residuals, over their expectation.
            freedom = batches[part, None].astype(np.float64)
            squares = (generator.chisquare(freedom, (count, replicas)) / freedom).astype(np.float32)
        _advance(
            *state, h, roots, np.float32(world.noise), world.kind == "regression",
            world.optimizer == "adam", start.steps + t, batches[part], rates[part], normals,
            squares, sums[:, t + 1 : part.stop + 1],
        )  # fmt: skip
    mean = sums[0] / replicas
    return mean, np.sqrt(np.maximum(sums[1] / replicas - mean**2, 0.0))


@njit(cache=True, fastmath={"contract", "reassoc", "arcp", "nsz"})
def _advance(
    weights, first, second, h, roots, noise, multiplicative, adam, done, batches, rates,
    normals, squares, sums,
):  # fmt: skip
    """Steps of all replicas, in place; adds the losses and their squares to ``sums``.

    The gradient of a regression's batch is drawn without its samples: given the residuals, whose
    mean square is ``s**2 * chi2``, the features are ``H e r / s**2 + z``, with ``z`` normal and of
    covariance ``H - H e e' H / s**2``.
    """
    one = np.float32(1)
    fast, slow = np.float32(BETAS[0]), np.float32(BETAS[1])
    gradient = np.empty_like(h)
    for t in range(len(batches)):
        over = np.float32(noise / np.sqrt(batches[t]))
        rate, root, eps = np.float32(rates[t]), one, np.float32(EPS)
        if adam:
            rate = np.float32(rates[t] / (1 - BETAS[0] ** (done + t + 1)))
            root = np.float32(1 / np.sqrt(1 - BETAS[1] ** (done + t + 1)))
        for r in range(len(weights)):
            e, z = weights[r], normals[t, r]
            drift, along = one, np.float32(0)
            if multiplicative:
                signal, product = np.float32(0), np.float32(0)
                for j in range(len(h)):
                    signal += h[j] * e[j] * e[j]
                    product += roots[j] * e[j] * z[j]
                s = np.sqrt(signal + noise * noise)
                drift = squares[t, r]
                over = s * np.sqrt(drift / np.float32(batches[t]))
                along = (one - noise / s) / max(signal, np.float32(1e-30)) * product
            total = np.float32(0)
            for j in range(len(h)):
                normal = z[j] - along * roots[j] * e[j]
                gradient[j] = drift * h[j] * e[j] + over * roots[j] * normal
            if adam:
                m, v = first[r], second[r]
                for j in range(len(h)):
                    m[j] = fast * m[j] + (one - fast) * gradient[j]
                    v[j] = slow * v[j] + (one - slow) * gradient[j] * gradient[j]
                    e[j] -= rate * m[j] / (np.sqrt(v[j]) * root + eps)
                    total += h[j] * e[j] * e[j]
            else:
                for j in range(len(h)):
                    e[j] -= rate * gradient[j]
                    total += h[j] * e[j] * e[j]
            loss = np.float64(noise * noise + total) / 2
            sums[0, t] += loss
            sums[1, t] += loss * loss


def _at_size(world: World, start: Start, batch_size: int, length: float, replicas: int) -> Curve:
    """The curve at the rule's learning rate, over at least a length."""
    lr = learning_rate(world.lr, batch_size, world.batch_size, world.rule)
    steps = math.ceil(length / batch_size)
    more = replicas * min(4, batch_size // world.batch_size)  # its steps are fewer
    return expected_curve(world, start, batch_size, lr, steps, replicas=more)


def base_curve(world: World, start: Start, n: float, replicas: int = REPLICAS) -> Curve:
    """The smallest batch's curve, somewhat past a length."""
    return _at_size(world, start, world.batch_size, REACH * n, replicas)


def overhead(
    world: World,
    start: Start,
    batch_size: int,
    n: float,
    base: Curve | None = None,
    *,
    replicas: int = REPLICAS,
) -> float:
    """Samples that a batch size wastes in ``n``, as a fraction of what the smallest one needs.

    At least -1/3, which stands for "or less"; infinite where the loss ends above the smallest
    batch's at a quarter of the length.
    """
    base = base or base_curve(world, start, n, replicas)
    curve = _at_size(world, start, batch_size, n, replicas)
    return _overhead(base, curve.at(n), n)


def _overhead(base: Curve, loss: float, n: float) -> float:
    if not loss <= base.at(n / (1 + CAP)):
        return math.inf
    samples = min(base.samples_at(loss), REACH * n)
    return n / samples - 1 if samples > n / (1 + CAP) else math.inf


@dataclass(frozen=True)
class Critical:
    """The critical batch size at one start.

    Attributes:
        value: In samples; infinite when no batch size of a few steps exceeds the tolerance.
        error: Standard error of ``log(value)``; zero where it is exact, infinite when not resolved.
        best: Batch size with the lowest loss at the same length.
        overheads: Overhead over the best size, by batch size.
    """

    value: float
    error: float
    best: int
    overheads: dict[int, float]


def critical_batch(
    world: World,
    start: Start,
    length: float,
    tolerance: float = 0.2,
    *,
    replicas: int = REPLICAS,
) -> Critical:
    """The smallest batch size, above the best one, whose overhead exceeds a tolerance."""
    base = base_curve(world, start, length, replicas)
    most, size, low = length / LEAST_STEPS, world.batch_size, {}
    raw: dict[int, float] = {}

    def look(size: int) -> float:
        curve = _at_size(world, start, size, length, replicas) if size > world.batch_size else base
        low[size] = curve.at(length), math.hypot(curve.error_at(length), base.error_at(length))
        raw[size] = _overhead(base, low[size][0], length)
        return raw[size]

    while size <= most:
        if math.isinf(look(size)):
            break
        size *= 2
    best = min(raw, key=lambda size: low[size][0])
    limit = (1 + tolerance) * (1 + raw[best]) - 1
    above = next((size for size in sorted(raw) if size > best and raw[size] > limit), None)
    value, error = math.inf, 0.0
    if above is not None:
        below = max(size for size in raw if size < above)
        # Integers between them; replicas' noise makes the last halvings useless.
        finest = 1.0 if world.optimizer == "sgd" else max(1.0, below / 16)
        while above - below > finest:
            middle = (above + below) // 2
            below, above = (middle, above) if look(middle) <= limit else (below, middle)
        slope = min(raw[above], CAP) - raw[below]
        value = below + (above - below) * (limit - raw[below]) / slope
        moved = _overhead(base, low[below][0] + low[below][1], length) - raw[below]
        error = moved / slope * (above - below) / value
    relative = {
        size: (1 + raw[size]) / (1 + raw[best]) - 1 if size > best else 0.0 for size in sorted(raw)
    }
    return Critical(value, error, best, relative)


def fall_over_spread(world: World, start: Start, n: float, replicas: int = 512) -> float:
    """Fall of the smallest batch's loss over the last three quarters, in one run's deviations."""
    steps = math.ceil(n / world.batch_size)
    batches = np.full(steps, world.batch_size, dtype=np.int64)
    curve = _curve(world, start, batches, np.full(steps, world.lr), replicas, simulate=True)
    return (curve.at(n / (1 + CAP)) - curve.at(n)) / float(curve.spread[-1])


def from_scratch_overhead(
    world: World,
    stages: int | Stages,
    n: float,
    *,
    warmup: float = 0.0,
    replicas: int = REPLICAS,
) -> float:
    """Overhead of a whole run over the smallest batch's, both from the untrained model.

    Args:
        world: The world.
        stages: A batch size, at the rule's learning rate, or ``(from_samples, batch_size, lr)``
            for each stage; a stage begins with the first step that starts there or later.
        n: Length of the run, in samples.
        warmup: Samples over which the run's learning rates rise in proportion to the samples seen;
            the smallest batch has none.
        replicas: Of Adam's.
    """
    if isinstance(stages, int):
        lr = learning_rate(world.lr, stages, world.batch_size, world.rule)
        stages = [(0, stages, lr)]
    batches, rates = _steps(stages, n, warmup)
    curve = _curve(world, scratch(world), batches, rates, replicas)
    return _overhead(_scratch_curve(world, n, replicas), curve.at(n), n)


def steps_overhead(
    world: World,
    batches: np.ndarray,
    rates: np.ndarray,
    n: float,
    replicas: int = REPLICAS,
    marks: Sequence[int] = (),
) -> float:
    """Overhead of steps with given batch sizes and learning rates over the smallest batch's run.

    At the end of the run, or on the mean over the first steps that reach each of ``marks``.

    Args:
        world: The world.
        batches: Batch size of each step.
        rates: Learning rate of each step.
        n: Length of the smallest batch's run, in samples.
        replicas: Of Adam's.
        marks: Samples seen.
    """
    curve = _curve(world, scratch(world), batches, rates, replicas)
    base, marks = _scratch_curve(world, n, replicas), marks or (int(curve.samples[-1]),)
    last = len(curve.samples) - 1
    ends = sorted({min(int(np.searchsorted(curve.samples, mark)), last) for mark in marks})
    # A mean over places on a bent curve is not the loss at the mean place.
    bend = float(np.mean([base.at(mark) for mark in marks])) - base.at(float(np.mean(marks)))
    loss, places = float(curve.loss[ends].mean()), float(curve.samples[ends].mean())
    return _overhead(base, loss - bend, places)


def _steps(stages: Stages, n: float, warmup: float) -> tuple[np.ndarray, np.ndarray]:
    """Batch sizes and learning rates of the steps up to a length."""
    batches, rates, seen = [], [], 0
    while seen < n:
        _, size, lr = max(stage for stage in stages if stage[0] <= seen)
        seen += size
        batches.append(size)
        rates.append(lr * (min(1.0, seen / warmup) if warmup else 1.0))
    return np.array(batches, dtype=np.int64), np.array(rates)


@lru_cache(maxsize=64)
def _scratch_curve(world: World, n: float, replicas: int) -> Curve:
    return base_curve(world, scratch(world), n, replicas)
