"""How often the noise scale's interval covers the present value while the truth grows.

Synthetic measurements with known truth: |G|² and tr(Σ) of 8 parts of 8 samples, in 64 dimensions.
"Whole history" is the interval of the weighted averages, "present" is what `NoiseScale` gives.

Run: python benchmarks/noise_drift.py [--replicates 1000] [--save]
"""

import argparse
import datetime
import itertools
import math
from typing import NamedTuple

import torch
from side_by_side import hardware, save
from torch import Tensor

from steadygrad.noise.intervals import Ratio, present_ratio, ratio_of_averages

DIM, PARTS, BATCH = 64, 8, 64
# Decay, and measurements kept: 688 hold all but 0.1 % of the weight, 200 are a young history.
HISTORIES = [(0.99, 688), (0.99, 200), (1.0, 400)]
STRENGTHS = {"strong": 2.0, "weak": 16.0}
GROWTHS = ["none", "none, rho 0.5", "exponential", "exponential, slow", "linear", "linear, late"]


class Truth(NamedTuple):
    """Present noise scale over batch, how it came about, and which of the two moved."""

    strength: float
    growth: str
    moves: str = "signal"


def course(growth: str, n: int, span: float) -> Tensor:
    """The noise scale over its present value, the newest first."""
    age = torch.arange(n, dtype=torch.float64)
    return {
        "none": torch.ones_like(age),
        "exponential": 4 ** (-age / span),
        "exponential, slow": 4 ** (-age / (3 * span)),
        "linear": 1 - 0.75 * age / n,
        "linear, late": (1 - 0.75 * age / span).clamp(min=0.25),
    }[growth.split(", rho")[0]]


def draw(truth: Truth, replicates: int, n: int, span: float, seed: int) -> tuple[Tensor, Tensor]:
    """Signals and noises of so many histories, each with shape ``(replicates, n)``."""
    generator = torch.Generator().manual_seed(seed)
    scale = BATCH * truth.strength * course(truth.growth, n, span)
    one = torch.ones_like(scale)
    signal, noise = (1 / scale, one) if truth.moves == "signal" else (one, scale)

    def chi_square(degrees: int) -> Tensor:
        shape = torch.full((replicates, n), degrees / 2, dtype=torch.float64)
        return 2 * torch._standard_gamma(shape, generator=generator)

    normal = torch.randn(replicates, n, generator=generator, dtype=torch.float64)
    per_axis = noise / BATCH / DIM
    along = (signal.sqrt() + per_axis.sqrt() * normal).square()
    degrees = (PARTS - 1) * DIM
    measured_noise = noise * chi_square(degrees) / degrees
    measured_signal = along + per_axis * chi_square(DIM - 1) - measured_noise / BATCH
    if "rho" in truth.growth:
        return tuple(correlate(x) for x in (measured_signal, measured_noise))
    return measured_signal, measured_noise


def correlate(x: Tensor, rho: float = 0.5) -> Tensor:
    """Independent values made into a series with this autocorrelation and the same spread."""
    mean = x.mean()
    rows = [x[:, 0] - mean]
    for column in (x[:, 1:] - mean).unbind(1):
        rows.append(rho * rows[-1] + math.sqrt(1 - rho**2) * column)
    return torch.stack(rows, 1) + mean


def line(decay: float, n: int, name: str, truth: Truth, replicates: int) -> str:
    """One row of the table."""
    # The decay window: the measurements that the weights are worth in the long run.
    span = (1 + decay) / (1 - decay) if decay < 1 else n
    present = BATCH * truth.strength
    signal, noise = draw(truth, replicates, n, span, seed=1)
    weights = decay ** torch.arange(n, dtype=torch.float64)
    whole = ratio_of_averages(noise, signal, weights)
    new = present_ratio(noise, signal, weights)

    def covered(ratio: Ratio) -> str:
        share = ((ratio.low <= present) & (present <= ratio.high)).double().mean()
        return f"{share:.1%} ({(~ratio.resolved).double().mean():.0%})"

    drifting = new.drifting.double().mean()
    return (
        f"| {decay} | {n} | {name} | {truth.moves} | {truth.growth} | {covered(whole)} | "
        f"{covered(new)} | {drifting:.1%} | {new.age.median():.0f} |"
    )


def main() -> None:
    """Prints the table, and saves it if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    today = datetime.date.today().isoformat()
    text = (
        f"# Coverage of the present noise scale, {today}\n\n{hardware()}\n\n"
        f"{args.replicates} replicates a row, nominal 95 %. Unbounded intervals in parentheses. "
        "Exponential growth is\nby 4 within the decay window: 199 measurements at decay 0.99, the "
        "history at decay 1; slow growth takes three times\nas long. Linear growth is by 4 over "
        "the history; late, over the decay window, from a constant value.\n\n"
        "| decay | history | signal | moves | growth | whole history | present | drifting "
        "| median age |\n|---|---|---|---|---|---|---|---|---|"
    )
    print(text)
    for (decay, n), (name, strength) in itertools.product(HISTORIES, STRENGTHS.items()):
        for growth in GROWTHS:
            for moves in ["signal"] if "none" in growth else ["signal", "noise"]:
                row = line(decay, n, name, Truth(strength, growth, moves), args.replicates)
                print(row, flush=True)
                text += "\n" + row
    if args.save:
        print("saved to", save("noise-drift", text + "\n", today))


if __name__ == "__main__":
    main()
