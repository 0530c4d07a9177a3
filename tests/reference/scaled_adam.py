"""ScaledAdam in float64, both recipes, one parameter and one number at a time."""

from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np

from tests.reference.codes import used


@dataclass
class Clipper:
    """The threshold that a group's gradient norms are held to."""

    scale: float
    period: int = 100
    recipe: str = "zipformer"
    norms: dict[int, float] = field(default_factory=dict)
    threshold: float = inf
    t: int = 0

    def factor(self, norm: float) -> float:
        """Factor on this step's gradients."""
        t, self.t = self.t, self.t + 1
        if t == 0:
            return 1.0
        self.norms[t % self.period] = norm
        early = [n for n in (10, 20, 40) if n < self.period and self.recipe == "zipformer"]
        # Places of steps that have not been taken count as zeros.
        ring = sorted([*self.norms.values(), *[0.0] * (self.period - len(self.norms))])
        if t in early:
            known = ring[-t:]
            self.threshold = 2 * self.scale * known[min(t - 1, t // 4 * 2)]
        elif t % self.period == 0:
            self.threshold = self.scale * ring[min(self.period - 1, self.period // 4 * 2)]
        return min(1.0, self.threshold / (norm + 1e-20))


@dataclass
class ScaledAdam:
    """One group. A gradient of None is zero."""

    lr: float = 3e-2
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    scalar_lr_scale: float = 0.1
    param_min_rms: float = 1e-5
    param_max_rms: float = 3.0
    scalar_max: float = 10.0
    size_update_period: int = 4
    clipping_scale: float | None = None
    clipping_update_period: int = 100
    recipe: str = "zipformer"
    maximize: bool = False
    t: int = 0
    states: dict[int, dict] = field(default_factory=dict)
    clipper: Clipper | None = None

    def step(self, weights: list[np.ndarray], gradients: list[np.ndarray | None]) -> None:
        sign = -1.0 if self.maximize else 1.0
        pairs = zip(weights, gradients, strict=True)
        grads = [np.zeros_like(p) if g is None else sign * g for p, g in pairs]
        for place, p in enumerate(weights):
            if p.size:
                self.states.setdefault(place, new_state(p, self.size_update_period))
        clip = self.clip(weights, grads)
        for place, (p, g) in enumerate(zip(weights, grads, strict=True)):
            if p.size == 1:
                self.step_scalar(self.states[place], p, g, clip)
            elif p.size:
                self.step_tensor(self.states[place], p, g, clip)
        self.t += 1

    def clip(self, weights: list[np.ndarray], grads: list[np.ndarray]) -> float:
        if self.clipping_scale is None:
            return 1.0
        if self.clipper is None:
            period, recipe = self.clipping_update_period, self.recipe
            self.clipper = Clipper(self.clipping_scale, period, recipe)
        total = 0.0
        for place, (p, g) in enumerate(zip(weights, grads, strict=True)):
            if p.size == 1:
                scale = self.scalar_lr_scale if self.recipe == "zipformer" else 1.0
                total += float((g**2).sum()) * scale**2
            elif p.size:
                total += float(((g * self.states[place]["rms"]) ** 2).sum())
        return self.clipper.factor(sqrt(total))

    def scaled(self, state: dict, g: np.ndarray, always: bool) -> np.ndarray:
        """Moves the second moment; the gradient over its root."""
        beta2 = self.betas[1]
        state["v"] = beta2 * state["v"] + (1 - beta2) * g**2
        correction = 1 - beta2 ** (self.t + 1)
        v = used(state)
        v = v / correction if always or correction < 0.99 else v
        return g / (np.sqrt(v) + self.eps)

    def step_scalar(self, state: dict, p: np.ndarray, g: np.ndarray, clip: float) -> None:
        old, beta1 = self.recipe == "stateless7", self.betas[0]
        step = self.scaled(state, g if old else g * clip, always=old)
        update = -self.lr * self.scalar_lr_scale * step
        state["delta"] = beta1 * state["delta"] + (1 - beta1) * update
        bounded = np.clip(p, -self.scalar_max, self.scalar_max)
        moved = (bounded if old else p) + state["delta"]
        p[...] = moved if old else np.clip(moved, -self.scalar_max, self.scalar_max)

    def step_tensor(self, state: dict, p: np.ndarray, g: np.ndarray, clip: float) -> None:
        old, beta1, period = self.recipe == "stateless7", self.betas[0], self.size_update_period
        state["ring"][self.t % period] = float((p * g * clip).sum())
        turn = self.t % period == period - 1
        if turn:
            state["rms"] = rms(p)
        size = self.size_step(state) if turn and self.t > 0 else 0.0
        step = self.scaled(state, g if old else g * clip, always=False)
        update = -self.lr * max(state["rms"], self.param_min_rms) * step + size * p
        state["delta"] = beta1 * state["delta"] + (1 - beta1) * update
        p += state["delta"]

    def size_step(self, state: dict) -> float:
        period, ring = self.size_update_period, state["ring"]
        beta = self.betas[1] ** period
        state["q"] = beta * state["q"] + (1 - beta) * sum(h**2 for h in ring) / period
        correction = sqrt(1 - beta ** ((self.t + 1) // period))
        lr = self.lr * self.scalar_lr_scale
        step = -lr * correction * sum(ring) / (sqrt(state["q"]) + self.eps)
        if state["rms"] < self.param_min_rms:
            step = 0.0
        if self.recipe == "stateless7":
            return -lr * period if state["rms"] > self.param_max_rms else step
        step = max(-0.1, min(0.1, step))
        room = (self.param_max_rms - state["rms"]) / state["rms"] if state["rms"] else inf
        return min(step, room)


def rms(p: np.ndarray) -> float:
    return sqrt(float((p**2).mean()))


def new_state(p: np.ndarray, period: int) -> dict:
    return {
        "v": np.zeros_like(p),
        "delta": np.zeros_like(p),
        "rms": rms(p),
        "q": 0.0,
        "ring": [0.0] * period,
    }
