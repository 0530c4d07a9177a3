"""Holds `steadygrad advise` against an exhaustive sweep over batch sizes with tuned learning rates.

The sweep trains the task from scratch at every batch size and learning rate, with several seeds,
and counts the samples until the validation loss reaches a target: what the best smallest-batch
run reaches at the length of run that `advise` speaks of. A batch size is good when it needs at
most 20 % more samples than the best one. `advise` is right when its recommendation lies within a
factor of two of the largest good one. Ladders of learning rates are widened until the best is
inside them; every run warms its learning rate up over the same number of samples.

Run: python benchmarks/advise_vs_sweep.py [--task char-lm] [--budget 5m] [--workers 2] [--save]
"""

import argparse
import datetime
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from side_by_side import hardware, save

TOLERANCE = 0.2
LONGER = 1.5  # runs go on to this multiple of the target's length
EVALUATIONS = 36
STEP = 2**0.5
WARMUP = 1 / 16  # of the target's length


@dataclass(frozen=True)
class Job:
    """One training run of the sweep."""

    task: str
    batch_size: int
    lr: float
    seed: int
    samples: int


def train(job: Job) -> list[tuple[int, float]]:
    """Validation loss along one run; ends early when it diverges."""
    import torch

    from steadygrad.studies.deadline import Deadline
    from steadygrad.studies.distributed import DistributedContext
    from steadygrad.studies.order import main_order
    from steadygrad.studies.trainer import Diverged, Trainer
    from steadygrad.tasks import load_task

    torch.set_num_threads(1)
    warmup = int(WARMUP * job.samples / LONGER)
    task = load_task(job.task)
    task = replace(task, lr=job.lr, batch_size=job.batch_size, warmup_samples=warmup)
    context = DistributedContext(Deadline())
    trainer = Trainer(task, seed=job.seed, dtype="float32", context=context)
    order, every = main_order(len(task.train), job.seed), job.samples / EVALUATIONS
    curve, due = [], every
    try:
        for seen in trainer.run(order, 0, job.samples, job.batch_size):
            if seen >= due:
                curve.append((seen, trainer.evaluate()))
                due = seen + every
    except Diverged:
        pass
    return curve


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Seeds averaged; then the lowest loss so far, so that it falls everywhere."""
    points, lowest = [], math.inf
    for rows in zip(*curves, strict=False):
        lowest = min(lowest, fmean(loss for _, loss in rows))
        points.append((rows[0][0], lowest))
    return points


def samples_to(curve: Sequence[tuple[int, float]], target: float) -> float:
    """Samples until the loss reaches the target, interpolated; infinite if it never does."""
    for (s0, l0), (s1, l1) in pairwise(curve):
        if l1 <= target:
            return s0 + (s1 - s0) * (l0 - target) / (l0 - l1) if l0 > target else float(s0)
    return math.inf


class Sweep:
    """Runs and remembers (batch size, learning rate) averaged over seeds."""

    def __init__(self, pool, task: str, samples: int, seeds: int, path: Path | None) -> None:
        self.pool, self.task, self.samples, self.seeds = pool, task, samples, seeds
        self.path = path
        kept = json.loads(path.read_text()) if path and path.exists() else []
        self.curves: dict[tuple[int, int], list[tuple[int, float]]] = {
            (b, r): c for b, r, c in kept
        }

    def fill(self, wanted: Sequence[tuple[int, int]], lr_of) -> None:
        """Trains what is missing; a rung is a power of the square root of two."""
        missing = [key for key in dict.fromkeys(wanted) if key not in self.curves]
        jobs = [
            Job(self.task, size, lr_of(rung), seed, int(self.samples * LONGER))
            for size, rung in missing
            for seed in range(self.seeds)
        ]
        done = self.pool.imap(train, jobs, chunksize=1)
        for key in missing:
            self.curves[key] = mean_curve([next(done) for _ in range(self.seeds)])
            self.keep()

    def keep(self) -> None:
        """Writes the curves down, so that other advice can be held against them later."""
        if self.path:
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps([[b, r, c] for (b, r), c in self.curves.items()]))
            part.replace(self.path)

    def best(self, size: int, measure) -> int:
        """The rung of a batch size with the least of a measure."""
        rungs = [rung for b, rung in self.curves if b == size]
        return min(rungs, key=lambda rung: measure(self.curves[size, rung]))

    def tune(self, sizes: Sequence[int], start, lr_of, measure) -> None:
        """Widens every batch size's ladder until its best rung is inside it."""
        wanted = [(b, start(b) + d) for b in sizes for d in (-1, 0, 1)]
        for _ in range(6):
            self.fill(wanted, lr_of)
            wanted = []
            for b in sizes:
                rungs = sorted(rung for size, rung in self.curves if size == b)
                best = self.best(b, measure)
                if best in (rungs[0], rungs[-1]):
                    wanted += [(b, best + d) for d in (-1, 1)]
            wanted = [key for key in wanted if key not in self.curves]
            if not wanted:
                return


def advise(task: str, budget: str) -> dict:
    """Runs the command as a user would, and returns its summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "steadygrad", "advise", task, "--budget", budget]
        command += ["--out", str(Path(folder) / "run"), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)


def report(options, summary: dict | None, sweep: Sweep, sizes, length: int, lr_of) -> str:
    """The table, and whether the recommendation holds."""
    end = lambda curve: next((loss for s, loss in curve if s >= length), math.inf)
    target = min(end(c) for (b, _), c in sweep.curves.items() if b == sizes[0])
    need = {
        b: min(samples_to(sweep.curves[b, r], target) for s, r in sweep.curves if s == b)
        for b in sizes
    }
    least = min(need.values())
    good = max(b for b in sizes if need[b] <= (1 + TOLERANCE) * least)
    if summary is None:
        return f"Target loss {target:.4f}; samples to it by batch size: {need}; good: {good}."
    advice = summary["recommendation"]
    size = advice["batch_size"]
    tried = f"{sweep.seeds} seeds; {len(sweep.curves)} pairs of batch size and learning rate"
    lines = [
        f"Task {options.task}; {tried}.",
        f"Target loss {target:.4f}: the best of batch {sizes[0]} at {length} samples.",
        "",
        "| batch | best lr | samples to target | over the least | loss at the target's length |",
        "| --- | --- | --- | --- | --- |",
    ]
    for b in sizes:
        rung = sweep.best(b, lambda c: (samples_to(c, target), end(c)))
        lines.append(
            f"| {b} | {lr_of(rung):.2e} | {need[b]:.0f} | {need[b] / least - 1:+.1%} | "
            f"{end(sweep.curves[b, rung]):.4f} |"
        )
    lines += ["", f"Largest batch with at most {TOLERANCE:.0%} more samples: **{good}**."]
    command = f"`steadygrad advise {options.task} --budget {options.budget}`"
    if size is None:
        return "\n".join([*lines, f"{command} recommends no batch size."])
    ratio = size / good
    verdict = "within" if 0.5 <= ratio <= 2 else "NOT within"
    lines += [
        f"{command} recommends",
        f"**{size}** ({advice['basis']}), {ratio:g} times the sweep's, {verdict} a factor of two.",
        *(f"- {line}" for line in summary["words"]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="char-lm")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--largest", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--summary", help="a summary.json, instead of running advise")
    parser.add_argument("--curves", type=Path, help="the sweep's curves: kept there, or read")
    parser.add_argument("--samples", type=int, help="length of run; default: what advise says")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()

    from steadygrad.tasks import load_task

    task = load_task(options.task)
    summary = None
    if options.summary:
        summary = json.loads(Path(options.summary).read_text())
    elif not options.samples:
        summary = advise(options.task, options.budget)
    length = options.samples or summary["recommendation"]["samples"]
    sizes = [task.batch_size]
    while sizes[-1] * 2 <= options.largest:
        sizes.append(sizes[-1] * 2)
    lr_of = lambda rung: task.lr * STEP**rung
    exponent = {"sqrt": 1, "linear": 2, "constant": 0}[task.lr_rule]
    start = lambda b: exponent * round(math.log2(b / task.batch_size))
    last = lambda curve: curve[-1][1] if len(curve) >= EVALUATIONS // LONGER else math.inf
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        sweep = Sweep(pool, options.task, length, options.seeds, options.curves)
        sweep.tune(sizes, start, lr_of, last)
    today = datetime.date.today().isoformat()
    text = f"# Advice against a sweep: {options.task}, {today}\n\n{hardware()}.\n\n"
    text += report(options, summary, sweep, sizes, length, lr_of) + "\n"
    print(text)
    if options.save:
        print(save(f"advise-vs-sweep-{options.task}", text, today))


if __name__ == "__main__":
    main()
