"""Expected losses of a world.

SGD has closed forms: the weights' second moments after a step follow from those before it. Adam
has none; its expected loss is the mean over many replicas, drawn at once.
"""

import math
from dataclasses import dataclass

import numpy as np
from benchmarks.truth.worlds import BETAS, EPS, World
from numba import njit

__all__ = [
    "Curve",
    "expected_curve",
    "scratch",
    "steps_curve",
]

REPLICAS = 256
CHUNK = 2**22  # random numbers drawn at once


def scratch(world: World) -> np.ndarray:
    """Weights of the untrained model; by symmetry their signs change no expected loss."""
    return world.initial


@dataclass(frozen=True)
class Curve:
    """Expected loss against samples.

    Attributes:
        samples: Ascending, from 0.
        loss: Expected validation loss after them.
        error: Standard error of ``loss``; zero where it is exact.
    """

    samples: np.ndarray
    loss: np.ndarray
    error: np.ndarray


def expected_curve(
    world: World,
    start: np.ndarray,
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
    start: np.ndarray,
    batches: np.ndarray,
    rates: np.ndarray,
    replicas: int,
    simulate: bool = False,
) -> Curve:
    samples = np.concatenate([[0], np.cumsum(batches)])
    multiplicative = world.kind == "regression"
    if world.optimizer == "adam" or simulate:
        mean, spread = _simulated(world, start, batches, rates, replicas)
        return Curve(samples, mean, spread / math.sqrt(replicas))
    loss = _moments(
        start**2,
        world.curvatures,
        world.covariance,
        world.noise**2,
        multiplicative,
        batches,
        rates,
    )
    return Curve(samples, loss, np.zeros_like(loss))


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
    state = [np.broadcast_to(part, shape).astype(np.float32) for part in (start, zeros, zeros)]
    sums = np.zeros((2, steps + 1))
    sums[0, 0] = float(world.loss(start)) * replicas
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
            world.optimizer == "adam", t, batches[part], rates[part], normals,
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
