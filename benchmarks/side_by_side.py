"""Timing several variants in one run, in turns, so that a drifting machine touches all alike."""

import math
import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch


@dataclass(frozen=True)
class Timing:
    """One variant's outcome.

    Attributes:
        seconds: Median of its rounds.
        ratio: Median over rounds of its time over the baseline's time in the same round.
        low: First quartile of these ratios.
        high: Third quartile.
    """

    seconds: float
    ratio: float
    low: float
    high: float


def measure(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    repeats: int = 1,
    seconds: float = math.inf,
) -> dict[str, Timing]:
    """Runs every variant once a round; the first one is the baseline.

    Args:
        variants: Functions that do one step each.
        rounds: Counted rounds.
        warmup: Rounds before them.
        repeats: Calls in a row that make one timing, divided by their number.
        seconds: After so many no round begins, once one has been counted.

    Returns:
        Each variant's timing.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    names, draw = list(variants), random.Random(0)
    end = time.monotonic() + seconds
    for i in range(warmup + rounds):
        if i > warmup and time.monotonic() > end:
            break
        # A new order each round: what a variant finds in the caches is what another has left.
        for name in draw.sample(names, len(names)):
            start = time.perf_counter()
            for _ in range(repeats):
                variants[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i >= warmup:
                times[name].append((time.perf_counter() - start) / repeats)
    base = times[names[0]]
    return {name: _timing(t, base) for name, t in times.items()}


def _timing(own: list[float], base: list[float]) -> Timing:
    ratios = sorted(a / b for a, b in zip(own, base, strict=True))
    quarter = len(ratios) // 4
    return Timing(median(own), median(ratios), ratios[quarter], ratios[-1 - quarter])


def hardware(device: str = "cpu") -> str:
    """The machine in one line."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = models[0].split(":")[1].strip() if models else name
    text = f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    gpu = f"{torch.cuda.get_device_name()}, " if device == "cuda" else ""
    return f"{gpu}{text}, torch {torch.__version__}, Python {platform.python_version()}"


def table(results: Mapping[str, Timing], title: str) -> str:
    """A Markdown table of the ratios."""
    width = max(len(name) for name in results)
    lines = [
        f"| {title:<{width}} | ratio | quartiles | median ms |",
        f"| {'-' * width} | ----- | --------- | --------- |",
    ]
    for name, t in results.items():
        row = f"{t.ratio:.3f} | {t.low:.3f}-{t.high:.3f} | {1e3 * t.seconds:.1f}"
        lines.append(f"| {name:<{width}} | {row} |")
    return "\n".join(lines)


def save(name: str, text: str, date: str) -> Path:
    """Writes a dated result beside the others."""
    path = Path(__file__).parent / "results" / f"{date}-{name}.md"
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
    return path
