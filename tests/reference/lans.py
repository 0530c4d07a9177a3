"""LANS in float64, one parameter and one line of the equation at a time."""

from dataclasses import dataclass, field

import numpy as np
from numpy.linalg import norm

from tests.reference.codes import used


@dataclass
class Lans:
    """The fused form: both decay terms take the weight as it was before the step."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    lower_bound: float | None = None
    upper_bound: float | None = None
    clip_value: float | None = None
    maximize: bool = False
    states: dict[int, dict] = field(default_factory=dict)

    def step(self, weights: list[np.ndarray], gradients: list[np.ndarray | None]) -> None:
        for place, (x, g) in enumerate(zip(weights, gradients, strict=True)):
            if g is not None and x.size:
                x -= self.lr * self.update(self.states.setdefault(place, {}), x, g)

    def update(self, state: dict, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Update of one parameter, over the learning rate."""
        g, beta1 = self.normalized(-g if self.maximize else g), self.betas[0]
        m, d = self.moments(state, g)
        u_m = m / d + self.weight_decay * x
        u_g = g / d + self.weight_decay * x
        return beta1 * self.ratio(x, u_m) * u_m + (1 - beta1) * self.ratio(x, u_g) * u_g

    def moments(self, state: dict, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moves both; the first without its bias, and the root of the second with eps."""
        beta1, beta2 = self.betas
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
        d = np.sqrt(used(state, self.betas) / (1 - beta2**t)) + self.eps
        return m / (1 - beta1**t), d

    def normalized(self, g: np.ndarray) -> np.ndarray:
        length = norm(g.ravel())
        g = g / length if length > 0 else np.zeros_like(g)
        return g if self.clip_value is None else np.clip(g, -self.clip_value, self.clip_value)

    def ratio(self, x: np.ndarray, u: np.ndarray) -> float:
        length = norm(x.ravel())
        if self.lower_bound is not None:
            length = max(length, self.lower_bound)
        if self.upper_bound is not None:
            length = min(length, self.upper_bound)
        size = norm(u.ravel())
        return length / size if length > 0 and size > 0 else 1.0
