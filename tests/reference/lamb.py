"""LAMB in float64, one parameter and one line of the equation at a time."""

from dataclasses import dataclass, field

import numpy as np
from numpy.linalg import norm

from tests.reference.codes import used


@dataclass
class Lamb:
    """Algorithm 2 of You et al. 2020, with bias correction; NVLAMB's global norm if asked for."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    lower_bound: float | None = None
    upper_bound: float | None = None
    max_grad_norm: float | None = None
    adapt: bool = True
    maximize: bool = False
    states: dict[int, dict] = field(default_factory=dict)

    def step(self, weights: list[np.ndarray], gradients: list[np.ndarray | None]) -> None:
        total = np.sqrt(sum((g**2).sum() for g in gradients if g is not None))
        scale = 1.0 if self.max_grad_norm is None else max(1.0, total / self.max_grad_norm)
        for place, (x, g) in enumerate(zip(weights, gradients, strict=True)):
            if g is not None and x.size:
                g = (-g if self.maximize else g) / scale
                x -= self.lr * self.update(self.states.setdefault(place, {}), x, g)

    def update(self, state: dict, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Update of one parameter, over the learning rate."""
        beta1, beta2 = self.betas
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
        v = used(state, self.betas)
        r = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + self.eps)
        u = r + self.weight_decay * x
        return self.ratio(x, u) * u if self.adapt else u

    def ratio(self, x: np.ndarray, u: np.ndarray) -> float:
        length = norm(x.ravel())
        if self.lower_bound is not None:
            length = max(length, self.lower_bound)
        if self.upper_bound is not None:
            length = min(length, self.upper_bound)
        size = norm(u.ravel())
        return length / size if length > 0 and size > 0 else 1.0
