"""LAMB in float64, one parameter and one line of the equation at a time."""

from dataclasses import dataclass

import numpy as np

from tests.reference.codes import used
from tests.reference.lans import Lans


@dataclass
class Lamb(Lans):
    """Algorithm 2 of You et al. 2020, with bias correction; NVLAMB's global norm if asked for.

    Options, bounds and ratios are those of LANS, which came later.
    """

    max_grad_norm: float | None = None
    adapt: bool = True

    def step(self, weights: list[np.ndarray], gradients: list[np.ndarray | None]) -> None:
        total = np.sqrt(sum((g**2).sum() for g in gradients if g is not None))
        scale = 1.0 if self.max_grad_norm is None else max(1.0, total / self.max_grad_norm)
        super().step(weights, [None if g is None else g / scale for g in gradients])

    def update(self, state: dict, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Update of one parameter, over the learning rate."""
        beta1, beta2 = self.betas
        g = -g if self.maximize else g
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
        v = used(state, self.betas)
        r = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + self.eps)
        u = r + self.weight_decay * x
        return self.ratio(x, u) * u if self.adapt else u
