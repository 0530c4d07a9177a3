"""Runs an optimizer and its slow reference through the same random problem."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

# One parameter at a time equals the second to the bit: `contracts/test_modes` holds it to that.
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}}
SHAPES = [(7, 3), (5,), (), (1,), (2, 3, 2), (0, 4), (1, 1), (7, 3)]


def weights(seed: int) -> list[np.ndarray]:
    """Sizes from tiny to large, zeros, one-element and empty parameters."""
    draw = np.random.default_rng(seed)
    scales = [0.3, 1e-3, 1.0, 5.0, 0.0, 1.0, 0.1, 2.0]
    pairs = zip(SHAPES, scales, strict=True)
    return [np.array(draw.normal(size=shape) * scale) for shape, scale in pairs]


def gradients(seed: int, steps: int, zero: bool = True) -> Iterable[list[np.ndarray | None]]:
    """Loud and quiet steps, a None now and then, a block of zeros, a gradient of zero norm."""
    draw = np.random.default_rng(1000 + seed)
    for step in range(steps):
        loud = 30.0 if step % 7 == 5 else 1.0
        found: list[np.ndarray | None] = [np.array(draw.normal(size=s) * loud) for s in SHAPES]
        if step % 5 == 3:
            found[1] = None
        if zero and step % 4 == 2:
            found[0] = np.zeros(SHAPES[0])
        yield found


def deviation(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    make_reference: Callable[[], Any],
    *,
    seed: int = 0,
    steps: int = 60,
    before: Callable[[int, torch.optim.Optimizer, Any], None] = lambda *_: None,
) -> float:
    """Largest difference of a weight, relative to its parameter's largest weight ever."""
    expected, reference = weights(seed), make_reference()
    params = [torch.tensor(w, dtype=torch.float64, requires_grad=True) for w in expected]
    optimizer = make(params)
    largest = [np.abs(w).max(initial=1e-30) for w in expected]
    worst = 0.0
    for step, grads in enumerate(gradients(seed, steps)):
        before(step, optimizer, reference)
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else torch.tensor(g)
        optimizer.step()
        reference.step(expected, grads)
        for place, (p, w) in enumerate(zip(params, expected, strict=True)):
            largest[place] = max(largest[place], np.abs(w).max(initial=0.0))
            off = np.abs(p.detach().numpy() - w).max(initial=0.0) / largest[place]
            assert not np.isnan(off)
            worst = max(worst, float(off))
    return worst
