"""Finds the learning rate with the lowest expected loss after a world's horizon.

Run: python -m benchmarks.truth.tune
"""

import numpy as np
from benchmarks.truth.exact import expected_curve, scratch
from benchmarks.truth.worlds import FAMILIES, World
from scipy.optimize import minimize_scalar


def final_loss(world: World, lr: float, replicas: int = 512) -> float:
    """Expected loss after the horizon; Adam's replicas have the same noise at every rate."""
    steps = world.horizon // world.batch_size
    curve = expected_curve(world, scratch(world), world.batch_size, lr, steps, replicas=replicas)
    return float(curve.loss[-1])


def tuned(world: World) -> float:
    """The best learning rate, to a few percent."""
    grid = np.geomspace(0.5, 2, 5) * world.lr
    losses = [final_loss(world, lr) for lr in grid]
    while not 0 < (i := int(np.argmin(losses))) < len(grid) - 1:
        step = grid[1] / grid[0] if i else grid[0] / grid[1]
        new = grid[i] * step
        place = len(grid) if i else 0
        grid, losses = np.insert(grid, place, new), [*losses]
        losses.insert(place, final_loss(world, new))
    if world.optimizer == "adam":  # the valley is flat, and replicas are noisy
        a, b, _ = np.polyfit(np.log(grid[i - 1 : i + 2]), losses[i - 1 : i + 2], 2)
        return float(np.exp(-b / (2 * a)))
    found = minimize_scalar(
        lambda log: final_loss(world, np.exp(log)), bounds=np.log(grid[[i - 1, i + 1]])
    )
    return float(np.exp(found.x))


if __name__ == "__main__":
    for name, world in FAMILIES.items():
        print(f"{name:16} {tuned(world):.3g}", flush=True)
