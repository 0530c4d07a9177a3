"""LAMB in float64, one parameter and one line of the equation at a time."""

from dataclasses import dataclass

import numpy as np

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
        m, d = self.moments(state, -g if self.maximize else g)
        u = m / d + self.weight_decay * x
        return self.ratio(x, u) * u if self.adapt else u
