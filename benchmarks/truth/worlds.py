"""The worlds: tasks so simple that their expected loss follows from formulas.

A world has weights ``e``, measured from the best ones, and curvatures ``h``; its expected loss is
``(noise**2 + sum(h * e**2)) / 2``. One sample of a quadratic has the gradient ``h * e + noise * z``
with ``z ~ N(0, C)``. One sample of a regression has features ``x ~ N(0, C)``, whose curvatures are
``C``'s, and the loss ``(x @ e + noise * N(0, 1))**2 / 2``: its gradient noise falls with the loss.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from steadygrad.tasks import Samples, Task, TensorSamples

__all__ = [
    "BETAS",
    "EPS",
    "FAMILIES",
    "TUNED",
    "WORLDS",
    "World",
    "mistuned",
    "train",
    "weights_of",
]

BETAS, EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True, kw_only=True)
class World:
    """A task with known truth.

    Attributes:
        name: What tables call it.
        kind: Where the gradient noise comes from.
        optimizer: ``"sgd"``, with the linear rule, or ``"adam"``, with the square-root rule.
        lr: Learning rate at ``batch_size``.
        noise: Standard deviation of the labels, or of a sample's gradient over ``sqrt(h)``.
        size: Number of weights.
        decay: Power by which curvatures ``h_j`` fall with ``j``, from 1.
        fall: Power by which the initial loss's parts ``h_j * e_j**2`` fall with ``j``, from 1.
        scale: Factor on the initial weights.
        outlier: The first curvature, whose weight's gradient noise is as if it were 1.
        batch_size: The smallest batch, in samples.
        horizon: Samples of a whole run.
    """

    name: str
    kind: Literal["quadratic", "regression"]
    optimizer: Literal["sgd", "adam"]
    lr: float
    noise: float
    size: int = 64
    decay: float = 0.5
    fall: float = 1.2
    scale: float = 1.0
    outlier: float = 1.0
    batch_size: int = 4
    horizon: int = 4 * 8192

    @property
    def rule(self) -> str:
        return "linear" if self.optimizer == "sgd" else "sqrt"

    @property
    def curvatures(self) -> np.ndarray:
        curvatures = np.arange(1.0, self.size + 1) ** -self.decay
        curvatures[0] = self.outlier
        return curvatures

    @property
    def covariance(self) -> np.ndarray:
        """The diagonal of ``C``."""
        return np.minimum(self.curvatures, 1.0)

    @property
    def initial(self) -> np.ndarray:
        """Sizes of the initial weights; their signs are drawn."""
        parts = np.arange(1.0, self.size + 1) ** -self.fall
        return self.scale * np.sqrt(parts / self.curvatures)

    def loss(self, weights: np.ndarray) -> np.ndarray:
        """Expected loss at weights with shape ``(*, size)``."""
        return (self.noise**2 + weights**2 @ self.curvatures) / 2

    def task(self, seed: int, samples_per_second: float = 20_000.0) -> Task:
        """The task, with data of its own for each seed and four times the horizon."""
        generator = torch.Generator().manual_seed(seed)
        roots = torch.as_tensor(self.covariance).sqrt().float()
        count, extra = 4 * self.horizon, int(self.kind == "regression")
        table = torch.randn(count, self.size + extra, generator=generator)
        table[:, : self.size] *= roots
        table[:, self.size if extra else 0 :] *= self.noise
        return Task(
            name=self.name,
            sample="sample",
            make_model=self.task_model,
            train=TensorSamples(table),
            valid=TensorSamples(torch.zeros(1, 1)),
            per_sample_loss=_Quadratic(self) if self.kind == "quadratic" else _squares,
            make_optimizer=_sgd if self.optimizer == "sgd" else _adam,
            lr=self.lr,
            batch_size=self.batch_size,
            lr_rule=self.rule,
            evaluate=self._evaluate,
            samples_per_second=samples_per_second,
        )

    def task_model(self) -> "Weights":
        """A freshly initialised model."""
        return Weights(torch.as_tensor(self.initial).float())

    def _evaluate(self, model: nn.Module, samples: Samples) -> float:
        return float(self.loss(weights_of(model)))


class Weights(nn.Module):
    """A vector of weights with given sizes and random signs."""

    def __init__(self, sizes: Tensor) -> None:
        super().__init__()
        signs = torch.randint(0, 2, sizes.shape) * 2 - 1
        self.weight = nn.Parameter(sizes * signs)


def weights_of(model: nn.Module) -> np.ndarray:
    return model.weight.detach().double().numpy()


def train(
    task: Task, seed: int, points: Sequence[int], batch_size: int | None = None, lr: float = 0.0
) -> Iterator[tuple[nn.Module, Optimizer]]:
    """Trains plainly from scratch and stops at numbers of samples; the batch size's own rate."""
    torch.manual_seed(seed)
    model, size = task.make_model(), batch_size or task.batch_size
    optimizer = task.make_optimizer(model.parameters(), lr or task.lr)
    order, seen = torch.randperm(len(task.train)), 0
    for point in points:
        while seen < point:
            batch = task.train.batch(order[seen : seen + size])
            task.per_sample_loss(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += size
        yield model, optimizer


class _Quadratic:
    def __init__(self, world: World) -> None:
        self.halves = torch.as_tensor(world.curvatures / 2).float()
        self.floor = world.noise**2 / 2

    def __call__(self, model: nn.Module, noise: Tensor) -> Tensor:
        weight = model.weight
        common = torch.dot(self.halves, weight * weight) + self.floor
        return torch.addmv(common, noise, weight)


def _squares(model: nn.Module, table: Tensor) -> Tensor:
    residuals = torch.addmv(table[:, -1], table[:, :-1], model.weight)
    return residuals * residuals / 2


def _sgd(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return SGD(parameters, lr=lr)


def _adam(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return Adam(parameters, lr=lr, betas=BETAS, eps=EPS, fused=True)


# Rates with the lowest expected loss after the horizon, to three digits.
TUNED = {
    "quadratic": 0.0432,
    "edge": 0.00612,
    "regression": 0.0275,
    "adam": 0.00227,
    "adam-regression": 0.00327,
}

_SGD: dict[str, Any] = {"optimizer": "sgd", "size": 128, "decay": 1.3, "fall": 1.25}
_ADAM = {**_SGD, "optimizer": "adam", "noise": 1.0, "size": 32, "decay": 1.75}
FAMILIES = {
    name: World(name=name, lr=TUNED[name], **fields)
    for name, fields in {
        "quadratic": {**_SGD, "kind": "quadratic", "noise": 2.0},
        "edge": {**_SGD, "kind": "quadratic", "noise": 2.0, "decay": 0.75, "outlier": 12.0},
        "regression": {**_SGD, "kind": "regression", "noise": 0.7, "decay": 1.0},
        "adam": {**_ADAM, "kind": "quadratic", "scale": 0.4},
        "adam-regression": {**_ADAM, "kind": "regression", "scale": 0.8},
    }.items()
}


def mistuned(world: World, factor: float) -> World:
    """A world at another learning rate than the tuned one."""
    return replace(world, name=f"{world.name} x{factor:.2g}", lr=world.lr * factor)


_PLAIN = World(name="floor", kind="quadratic", optimizer="sgd", lr=0.05, noise=1.0)
WORLDS = {
    world.name: world
    for world in (
        *FAMILIES.values(),
        # At its noise floor from the first point on, and at the last point only.
        _PLAIN,
        replace(_PLAIN, name="late-floor", lr=0.0028),
        *(
            mistuned(FAMILIES[name], factor)
            for name in ("quadratic", "regression", "adam", "adam-regression")
            for factor in (1 / 3, 3.0)
        ),
    )
}
