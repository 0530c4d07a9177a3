"""Signal and noise straight from their definitions, on a full matrix of per-sample gradients."""

import torch
from torch import Tensor


def signal_and_noise(
    gradients: Tensor, counts: list[int], weights: list[float]
) -> tuple[float, float]:
    """Solves the two expectation equations by linear algebra, loop by loop."""
    means = [part.mean(0) for part in gradients.double().split(counts)]
    w = [x / sum(weights) for x in weights]
    mean = sum(wj * gj for wj, gj in zip(w, means, strict=True))
    of_parts = sum(wj / n for wj, n in zip(w, counts, strict=True))
    of_mean = sum(wj**2 / n for wj, n in zip(w, counts, strict=True))
    left = torch.tensor([[1.0, of_parts], [1.0, of_mean]], dtype=torch.float64)
    parts = sum(wj * gj.dot(gj) for wj, gj in zip(w, means, strict=True))
    signal, noise = torch.linalg.solve(left, torch.stack([parts, mean.dot(mean)])).tolist()
    return signal, noise


def fieller_by_search(a: float, b: float, cov: Tensor, q: float) -> tuple[float, float]:
    """The accepted positive ratios on a fine grid: its first and last (inf when never left)."""
    r = torch.logspace(-6, 6, 2_400_001, dtype=torch.float64)
    inside = (a - r * b) ** 2 <= q**2 * (cov[0, 0] - 2 * r * cov[0, 1] + r**2 * cov[1, 1])
    accepted = r[inside]
    if len(accepted) == 0:
        return float("nan"), float("nan")
    high = float("inf") if bool(inside[-1]) else float(accepted[-1])
    return (0.0 if bool(inside[0]) else float(accepted[0])), high
