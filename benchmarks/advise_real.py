"""``steadygrad advise`` on real data: what it recommends over seeds, and what that truly costs.

    python benchmarks/advise_real.py --budget 5m --save

For each task and seed the command is run as a user would. Then the recommended batch size is
trained from scratch with many other seeds, as recommended, beside the task's own batch size. Its
true overhead is read off the mean curve of the task's own batch size by interpolation; its
standard error comes from a bootstrap over the seeds.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from side_by_side import hardware, save

TASKS = ("char-lm", "digits-autoencoder", "digits-classifier")
LONGER = 1.4  # the smallest batch's curve goes on to this multiple of the length
POINTS = 32  # its evaluations over the length
FIRST_SEED = 1000  # no study uses it
DRAWS = 1000


@dataclass(frozen=True)
class Job:
    """One run from scratch."""

    task: str
    batch_size: int
    samples: int
    warmup_samples: int
    seed: int
    curve: bool = False


def train(job: Job) -> list[tuple[int, float]]:
    """Samples and validation losses: a whole curve, or the mean over the end of the run."""
    import torch

    from steadygrad.studies.advise.plan import end_marks
    from steadygrad.studies.deadline import Deadline
    from steadygrad.studies.distributed import DistributedContext
    from steadygrad.studies.order import main_order
    from steadygrad.studies.trainer import Rate, Trainer
    from steadygrad.tasks import load_task

    torch.set_num_threads(1)
    task = load_task(job.task)
    trainer = Trainer(task, seed=job.seed, dtype="float32", context=DistributedContext(Deadline()))
    order, rate = (
        main_order(len(task.train), job.seed),
        Rate(job.batch_size, 1.0, job.warmup_samples),
    )
    stop, marks = job.samples, end_marks(job.samples, task.batch_size)
    if job.curve:
        stop = int(LONGER * job.samples)
        marks = [
            job.samples * k // POINTS for k in range(POINTS // 8, stop * POINTS // job.samples)
        ]
    found = []
    for seen in trainer.run(order, 0, stop, job.batch_size, rate=rate):
        if marks and seen >= marks[0]:
            found.append((seen, trainer.evaluate()))
            marks = [mark for mark in marks if mark > seen]
    if job.curve:
        return found
    return [(round(np.mean([x for x, _ in found])), float(np.mean([y for _, y in found])))]


def true_overhead(curves: np.ndarray, places: np.ndarray, finals: np.ndarray, samples: float):
    """Overhead of runs with some final losses, and its standard error over the seeds.

    Args:
        curves: Losses of the smallest batch, shape ``(seeds, M)``.
        places: Their samples, shape ``(M,)``.
        finals: Final losses of the other batch size, shape ``(seeds,)``.
        samples: Samples that these stand for.
    """

    def overhead(pick: np.ndarray) -> float:
        falling = np.minimum.accumulate(curves[pick].mean(0))
        needed = np.interp(-finals[pick].mean(), -falling, places)
        return samples / needed - 1

    seeds, generator = len(finals), np.random.default_rng(0)
    drawn = [overhead(generator.integers(seeds, size=seeds)) for _ in range(DRAWS)]
    return overhead(np.arange(seeds)), float(np.std(drawn))


def study(task: str, seed: int, options) -> dict:
    """The summary of a run of the command; one that is there already is read."""
    folder = options.runs / f"{task}-{seed}"
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "steadygrad", "advise", task, "--seed", str(seed)]
        command += ["--budget", options.budget, "--out", str(folder)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return json.loads((folder / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--truth-seeds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/advise-real"))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    names = options.tasks.split(",")
    rows = [
        {"task": name, "seed": seed, **study(name, seed, options)["recommendation"]}
        for name in names
        for seed in range(options.seeds)
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        add_truth(rows, pool, options.truth_seeds)
    text = page(rows, options)
    print(text)
    if options.save:
        print(save("advise-real", text, date.today().isoformat()))


def add_truth(rows: list[dict], pool, count: int) -> None:
    """Trains what is needed, once, and adds ``truth`` and ``error`` to each row."""
    from steadygrad.tasks import load_task

    jobs = []
    for row in rows:
        row["base"] = load_task(row["task"]).batch_size
        if row["batch_size"] is None:
            continue
        for seed in range(FIRST_SEED, FIRST_SEED + count):
            row_jobs = [Job(row["task"], row["base"], row["samples"], 0, seed, curve=True)]
            size, warmup = row["batch_size"], row["warmup_samples"]
            row_jobs.append(Job(row["task"], size, row["samples"], warmup, seed))
            jobs += row_jobs
    jobs = list(dict.fromkeys(jobs))
    found = dict(zip(jobs, pool.imap(train, jobs, chunksize=1), strict=True))
    for row in rows:
        if row["batch_size"] is None:
            continue
        mine = [job for job in jobs if (job.task, job.samples) == (row["task"], row["samples"])]
        curves = [found[job] for job in mine if job.curve]
        key = row["batch_size"], row["warmup_samples"]
        ends = [found[j] for j in mine if not j.curve and (j.batch_size, j.warmup_samples) == key]
        places = np.array([x for x, _ in curves[0]], dtype=float)
        losses = np.array([[y for _, y in curve] for curve in curves])
        finals = np.array([end[0][1] for end in ends])
        row["truth"], row["error"] = true_overhead(losses, places, finals, ends[0][0][0])


def page(rows: list[dict], options) -> str:
    """The result as a Markdown page."""
    head = ["task", "seed", "length", "batch", "basis", "said", "95% interval", "truth", "inside"]
    lines = [
        "# advise on real data",
        "",
        f"`python benchmarks/advise_real.py --budget {options.budget} --save`; {hardware()}.",
        f"Truth: {options.truth_seeds} other seeds, with its standard error.",
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    for row in rows:
        lines.append("| " + " | ".join(cells(row)) + " |")
    for name in dict.fromkeys(row["task"] for row in rows):
        sizes = [row["batch_size"] for row in rows if row["task"] == name and row["batch_size"]]
        inside = [is_inside(row) for row in rows if row["task"] == name and row["batch_size"]]
        ratio = f"max/min {max(sizes) / min(sizes):g}" if sizes else "no batch size"
        lines += ["", f"{name}: {ratio}; {sum(inside)} of {len(inside)} within the interval."]
    return "\n".join([*lines, ""])


def is_inside(row: dict) -> bool:
    """Whether the truth lies in the interval; the task's own batch size costs nothing."""
    return row["batch_size"] == row["base"] or row["low"] <= row["truth"] <= row["high"]


def cells(row: dict) -> list[str]:
    if row["batch_size"] is None:
        return [row["task"], str(row["seed"]), "-", "not known", *["-"] * 5]
    span = "-" if row["low"] is None else f"{row['low']:+.0%} to {row['high']:+.0%}"
    said = "-" if row["overhead"] is None else f"{row['overhead']:+.0%}"
    truth = f"{row['truth']:+.1%} ± {row['error']:.1%}"
    inside = "-" if row["low"] is None else "yes" if is_inside(row) else "NO"
    size, length = str(row["batch_size"]), str(row["samples"])
    return [row["task"], str(row["seed"]), length, size, row["basis"], said, span, truth, inside]


if __name__ == "__main__":
    main()
