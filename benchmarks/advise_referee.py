"""``steadygrad advise`` before a referee: what it says over real tasks, and what is true.

    python benchmarks/advise_referee.py --studies --truth --report --save

The plan is in `advise_referee_plan.md`, and was committed before its first study ran. Each step
goes on where it was interrupted: a study has a folder, and a run of the truth has a file. The truth
is at the learning rates of the task's rule, as the studies were then; now they search the rates.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from side_by_side import hardware, save

HERE = Path(__file__).parent
# Time for a study; the tasks whose runs take a second or less have less of it.
BUDGETS = {"digits": "3m", "marriages": "3m", "words": "3m"}
# Samples of the training that the advice is for, by task.
LENGTHS = {
    "chars": 9216,
    "digits": 9216,
    "autoencoder": 18432,
    "mnist": 6144,
    "batchnorm": 9216,
    "population": 18432,
    "marriages": 4608,
    "glucose": 12288,
    "words": 9216,
    "lora": 9216,
}
MULTIPLES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Of a run in the sweep.
FEWEST_STEPS = 32
# Overheads that the smallest batch's complete runs stand for: of N / (1 + overhead) samples.
GRID = (-0.3, -0.15, 0.0, 0.1, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0)
DECAYING_GRID = (-0.25, 0.0, 0.2, 0.5, 1.0, 2.0)
ENDS = (0.92, 0.94, 0.96, 0.98, 1.0)
FIRST_SEED = 2000  # no study uses it, and the rates and lengths were chosen with others
DRAWS = 400
BOLD = 1.25  # times the tolerance
NOTHING = dict.fromkeys(("batch_size", "samples", "overhead", "low", "high"))
NO_SUMMARY = {"recommendation": NOTHING, "tolerance": 0.2, "checked": []}
KNOWN = 0.6  # the largest overhead that a study tells from larger ones
ERRORS = 2.0  # standard errors of the truth that are allowed
POWERS = {"sqrt": 0.5, "linear": 1.0, "constant": 0.0}


class Truth(NamedTuple):
    """A batch size's overhead, and its standard error over seeds."""

    overhead: float
    error: float


@dataclass(frozen=True)
class Run:
    """One training from scratch; ``lengths``: samples that its losses are wanted for."""

    task: str
    batch_size: int
    lengths: tuple[int, ...]
    warmup_samples: int
    seed: int

    @property
    def path(self) -> Path:
        parts = [self.batch_size, self.lengths[-1], self.warmup_samples, self.seed]
        return Path(self.task) / f"{'-'.join(map(str, parts))}.json"


@cache
def load(name: str):
    import referee_tasks

    return getattr(referee_tasks, name)()


def loss_now(task, model) -> float:
    """The validation loss, with the model and the random numbers left as they were."""
    import torch

    state = torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        if task.evaluate is not None:
            value = float(task.evaluate(model, task.valid))
        else:
            parts = torch.arange(len(task.valid)).split(256)
            losses = [task.per_sample_loss(model, task.valid.batch(part)) for part in parts]
            value = torch.cat(losses).double().mean().item()
    model.train()
    torch.set_rng_state(state)
    return value


def train(run: Run) -> dict[int, float]:
    """Trains by a plain loop; the loss of each length, which is the mean over its end.

    A rate that decays has one length, and its end alone counts. Runs with one seed begin with the
    same weights and see the same samples in the same order, whatever their batch size.
    """
    import torch

    torch.set_num_threads(1)
    task = load(run.task)
    torch.manual_seed(run.seed)
    model = task.make_model().train()
    first = {"parameters": list(model.parameters()), "model": model}
    first["named_parameters"] = list(model.named_parameters())
    optimizer = task.make_optimizer(first[task.optimizer_takes], task.lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    size, total = run.batch_size, run.lengths[-1]
    ends = ENDS if task.lr_decay == "none" else (1.0,)
    marks = {n: [round(part * (n // size)) for part in ends] for n in run.lengths}
    wanted, found = {step for steps in marks.values() for step in steps}, {}
    orders = torch.Generator().manual_seed(run.seed)
    queue = torch.empty(0, dtype=torch.int64)
    grown = (size / task.batch_size) ** POWERS[task.lr_rule]
    for step in range(1, total // size + 1):
        seen = (step - 0.5) * size
        factor = grown
        if seen < run.warmup_samples:
            factor = 1 + (grown - 1) * seen / run.warmup_samples
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor * task.lr_factor(seen, total)
        while len(queue) < size:
            queue = torch.cat([queue, torch.randperm(len(task.train), generator=orders)])
        indices, queue = queue[:size], queue[size:]
        loss = task.per_sample_loss(model, task.train.batch(indices)).mean()
        if not math.isfinite(loss.item()):
            return dict.fromkeys(run.lengths, math.inf)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in wanted:
            value = loss_now(task, model)
            found[step] = value if math.isfinite(value) else math.inf
    return {n: float(np.mean([found[step] for step in steps])) for n, steps in marks.items()}


def train_and_keep(run: Run, folder: Path) -> None:
    path = folder / run.path
    if path.exists():
        return
    load(run.task)
    # Of this process alone: whatever else the machine does does not count.
    began = time.process_time()
    losses = train(run)
    seconds = time.process_time() - began
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"losses": losses, "seconds": seconds}))
    part.replace(path)


def reference(task, samples: int) -> tuple[list[float], list[tuple[int, ...]]]:
    """The grid of overheads, and the lengths of each run of the smallest batch that it takes."""
    grid = GRID if task.lr_decay == "none" else DECAYING_GRID
    unit = task.batch_size
    lengths = sorted(round(samples / (1 + part) / unit) * unit for part in grid)
    runs = [tuple(lengths)] if task.lr_decay == "none" else [(n,) for n in lengths]
    return [samples / n - 1 for n in lengths], runs


def overhead_of(lengths: np.ndarray, losses: np.ndarray, ends: np.ndarray, samples: int) -> Truth:
    """Overhead of a batch size, and its standard error by a bootstrap over the seeds.

    Args:
        lengths: Samples of complete runs of the smallest batch, ascending, shape ``(M,)``.
        losses: Their losses, shape ``(seeds, M)``.
        ends: Losses of the other batch size over ``samples``, shape ``(seeds,)``.
        samples: Samples of the training that the advice is for.

    Returns:
        The overhead, no less and no more than the lengths reach.
    """
    from sklearn.isotonic import isotonic_regression

    def overhead(pick: np.ndarray) -> float:
        with np.errstate(invalid="ignore"):
            end = ends[pick].mean()
        if not math.isfinite(end):
            return samples / lengths[0] - 1
        falling = isotonic_regression(losses[pick].mean(0), increasing=False)
        needed = np.exp(np.interp(-end, -falling, np.log(lengths)))
        return samples / needed - 1

    seeds, generator = len(ends), np.random.default_rng(0)
    drawn = [overhead(generator.integers(seeds, size=seeds)) for _ in range(DRAWS)]
    return Truth(float(overhead(np.arange(seeds))), float(np.std(drawn)))


def truth_runs(name: str, samples: int, sizes: Mapping[int, int], seeds: int) -> list[Run]:
    """All runs of a task; ``sizes``: the warm-up of each batch size."""
    lengths = reference(load(name), samples)[1]
    smallest = min(sizes)
    keys = [(size, (samples,), warmup) for size, warmup in sizes.items() if size > smallest]
    keys += [(smallest, part, 0) for part in lengths]
    return [Run(name, *key, FIRST_SEED + i) for key in keys for i in range(seeds)]


def sizes_of(task, samples: int, studies: Sequence[dict]) -> dict[int, int]:
    """Batch sizes of the sweep and those that studies checked, with the warm-up of most of them."""
    rows = [row for s in studies for row in s["checked"]]
    common = Counter(row["warmup_samples"] for row in rows).most_common(1)
    warmup = common[0][0] if common else 0
    most = min(len(task.train), samples // FEWEST_STEPS)
    swept = {int(task.batch_size * part) for part in MULTIPLES}
    every = {size for size in swept if size <= most} | {row["batch_size"] for row in rows}
    return {size: 0 if size == task.batch_size else warmup for size in sorted(every)}


def read_truth(name: str, samples: int, sizes: Mapping[int, int], seeds: int, folder: Path):
    """Each batch size's truth; the smallest one's own is 0 by definition, and is not measured."""
    task = load(name)
    _, parts = reference(task, samples)

    def losses(size: int, lengths: tuple[int, ...], warmup: int) -> np.ndarray:
        runs = [Run(name, size, lengths, warmup, FIRST_SEED + i) for i in range(seeds)]
        kept = [json.loads((folder / run.path).read_text())["losses"] for run in runs]
        return np.array([[row[str(n)] for n in lengths] for row in kept])

    lengths = np.array([n for part in parts for n in part], dtype=float)
    falls = np.concatenate([losses(task.batch_size, part, 0) for part in parts], axis=1)
    found = {task.batch_size: Truth(0.0, 0.0)}
    for size, warmup in sizes.items():
        if size > task.batch_size:
            ends = losses(size, (samples,), warmup)[:, 0]
            found[size] = overhead_of(lengths, falls, ends, samples)
    return found


def best_of(truth: Mapping[int, Truth], tolerance: float) -> int:
    """The batch size of fewest steps to the smallest one's loss, of those in the tolerance."""
    good = [size for size, true in truth.items() if true.overhead <= tolerance]
    return min(good, key=lambda size: steps(truth, size))


def steps(truth: Mapping[int, Truth], size: int) -> float:
    """Optimizer steps to a loss, over those of the smallest batch to the same loss."""
    return (1 + truth[size].overhead) * min(truth) / size


def judge(size: int | None, truth: Mapping[int, Truth], tolerance: float) -> dict:
    """What is wrong with a recommended batch size; None: not known, so the smallest is used."""
    used = min(truth) if size is None else size
    overhead, error = truth[used]
    surely = [s for s, true in truth.items() if true.overhead + ERRORS * true.error <= tolerance]
    best = best_of(truth, tolerance)
    wasted = max(0.0, overhead - tolerance) / (1 + tolerance)
    saved = max(0.0, steps(truth, used) / steps(truth, best) - 1)
    return {
        "overhead": overhead,
        "error": error,
        "best": best,
        "known": size is not None,
        "bold": overhead - ERRORS * error > BOLD * tolerance,
        "timid": size is not None and max(surely, default=0) >= 2 * used,
        "samples": wasted,
        "steps": saved,
        "regret": wasted + saved,
    }


def is_covered(row: Mapping, true: Truth, ends: tuple[float, float], errors: float) -> bool:
    """Whether an interval holds the truth, both cut off where the smallest batch's runs end."""
    low, high = (float(np.clip(float(row[name]), *ends)) for name in ("low", "high"))
    return low - errors * true.error <= true.overhead <= high + errors * true.error


def reaches(row: Mapping, true: Truth) -> bool:
    """The same where "0 %" is none or less, and "more than 60 %" is all above."""
    low, high = float(row["low"]), float(row["high"])
    below = low == 0 or min(low, KNOWN) - ERRORS * true.error <= true.overhead
    return below and true.overhead <= high + ERRORS * true.error


def rules(truth: Mapping[int, Truth], samples: int, noise: float | None) -> dict[str, int | None]:
    """Batch sizes by three rules of thumb, rounded down to a size of the sweep."""
    floor = lambda value: max((s for s in truth if s <= value), default=min(truth))
    return {
        "as large as fits": max(truth),
        "noise scale at the end": None if noise is None else floor(noise),
        "root of the samples": floor(math.sqrt(samples)),
    }


def trained(folder: Path) -> int:
    """Samples that a study trained on, by its record."""
    rows = [json.loads(path.read_text()) for path in (folder / "results").rglob("*.json")]
    return sum(row["samples"] for row in rows)


def busy(folder: Path) -> float:
    """The part of its budget that a study's trials took."""
    if not (folder / "header.json").exists():
        return 0.0
    times = [json.loads(path.read_text())["time"] for path in (folder / "results").rglob("*.json")]
    budget = json.loads((folder / "header.json").read_text())["settings"]["budget"]
    return math.fsum(time["seconds"] for time in times) / budget


def noise_at_end(summary: dict) -> float | None:
    found = summary.get("noise", ())
    value = float(found[-1]["value"]) if found and found[-1]["resolved"] else math.nan
    return value if math.isfinite(value) else None


def command(name: str, seed: int, budget: str | None, out: Path) -> list[str]:
    """One study, on one core."""
    words = [sys.executable, "-m", "steadygrad", "advise", f"{HERE / 'referee_tasks.py'}:{name}"]
    words += ["--samples", str(LENGTHS[name]), "--seed", str(seed)]
    words += ["--budget", budget or BUDGETS.get(name, "5m")]
    return [*words, "--workers", "1", "--threads", "1", "--out", str(out)]


def make_study(name: str, seed: int, options: argparse.Namespace) -> None:
    """Runs a study to its end; one that was cut off begins anew, with its whole budget."""
    out = options.runs / "studies" / f"{name}-{seed}"
    if is_over(out):
        return
    shutil.rmtree(out, ignore_errors=True)
    words, env = command(name, seed, options.budget, out), {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    print(name, seed, done.stderr.strip()[-300:] if done.returncode else "done", flush=True)


def is_over(out: Path) -> bool:
    path = out / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] != "interrupted"


def read_studies(name: str, options: argparse.Namespace) -> dict[int, dict]:
    """The summaries that are there, by seed."""
    outs = {seed: options.runs / "studies" / f"{name}-{seed}" for seed in options.seeds}
    return {i: json.loads((o / "summary.json").read_text()) for i, o in outs.items() if is_over(o)}


def sweep_of(name: str, options: argparse.Namespace) -> dict[int, int]:
    studies = [*read_studies(name, options).values()]
    return sizes_of(load(name), LENGTHS[name], studies)


def runs_of(name: str, options: argparse.Namespace) -> list[Run]:
    return truth_runs(name, LENGTHS[name], sweep_of(name, options), options.truth_seeds)


def make_truth(options: argparse.Namespace) -> None:
    """Trains what is not there yet, the longest runs first."""
    runs = [run for name in options.tasks for run in runs_of(name, options)]
    runs.sort(key=lambda run: run.lengths[-1] / run.batch_size, reverse=True)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        keep = partial(train_and_keep, folder=options.runs / "truth")
        for _ in pool.imap_unordered(keep, runs):
            pass


def cases(name: str, options: argparse.Namespace) -> tuple[dict[int, Truth], list[dict]]:
    """A task's truth, and each of its studies beside it."""
    samples, sizes = LENGTHS[name], sweep_of(name, options)
    truth = read_truth(name, samples, sizes, options.truth_seeds, options.runs / "truth")
    task = load(name)
    overheads = reference(task, samples)[0]
    ends = min(overheads), max(overheads)
    swept = sum(run.lengths[-1] for run in runs_of(name, options))
    rows = []
    studies = read_studies(name, options)
    for seed in options.seeds:
        summary = studies.get(seed, NO_SUMMARY)
        advice, tolerance = summary["recommendation"], summary["tolerance"]
        # An answer for a training of another length is none to the question.
        size = advice["batch_size"] if advice["samples"] == samples else None
        folder = options.runs / "studies" / f"{name}-{seed}"
        intervals = [
            {
                **row,
                "true": truth[row["batch_size"]],
                "covered": is_covered(row, truth[row["batch_size"]], ends, ERRORS),
                "reached": reaches(row, truth[row["batch_size"]]),
                "strictly": is_covered(row, truth[row["batch_size"]], ends, 0.0),
                "width": np.ptp(np.clip([float(row["low"]), float(row["high"])], *ends)),
            }
            for row in summary["checked"]
        ]
        rules_say = rules(truth, samples, noise_at_end(summary))
        rows.append(
            {
                "task": name,
                "seed": seed,
                "size": size,
                "said": advice,
                **judge(size, truth, tolerance),
                "intervals": intervals,
                "cost": trained(folder) / swept,
                "busy": busy(folder),
                "rules": {r: s and (s, judge(s, truth, tolerance)) for r, s in rules_say.items()},
            }
        )
    return truth, rows


def page(options: argparse.Namespace) -> str:
    """Every case, and what they add up to."""
    found = {name: cases(name, options) for name in options.tasks}
    rows = [row for _, part in found.values() for row in part]
    called = f"python benchmarks/advise_referee.py --studies --truth --report {asked(options)}"
    words = [
        "# advise before a referee",
        f"`{called} --save`; {hardware()}.",
        "Plan: `benchmarks/advise_referee_plan.md`. Truths are given with their standard error.",
        "## What it adds up to",
        summed(rows),
        "## Rules of thumb beside it",
        ruled(rows),
        "## Truth",
        *(truths(name, truth, options) for name, (truth, _) in found.items()),
        "## Studies",
        grid(
            "task | seed | advised | said | 95 % | truth | best | bold | timid | steps | cost"
            " | busy",
            map(study_cells, rows),
        ),
        "## Intervals of the batch sizes that were checked",
        grid(
            "task | seed | batch | said | 95 % | truth | covered",
            (interval_cells(row, part) for row in rows for part in row["intervals"]),
        ),
    ]
    return "\n\n".join(words) + "\n"


def asked(options: argparse.Namespace) -> str:
    seeds = f"--seeds {len(options.seeds)} --truth-seeds {options.truth_seeds}"
    budget = f" --budget {options.budget}" if options.budget else ""
    return f"--tasks {','.join(options.tasks)}{budget} {seeds}"


def grid(head: str, rows) -> str:
    lines = [f"| {head} |", "| --- " * (head.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def span(row: Mapping) -> str:
    if row["low"] is None:
        return "-"
    return f"{float(row['low']):+.0%} to {float(row['high']):+.0%}"


def said_true(true: Truth) -> str:
    return f"{true.overhead:+.1%} ± {true.error:.1%}"


def study_cells(row: Mapping) -> list[str]:
    said = row["said"]["overhead"]
    return [
        row["task"],
        str(row["seed"]),
        str(row["size"] or "not known"),
        "-" if said is None else f"{float(said):+.0%}",
        span(row["said"]),
        said_true(Truth(row["overhead"], row["error"])),
        str(row["best"]),
        "BOLD" if row["bold"] else "no",
        "TIMID" if row["timid"] else "no",
        f"{row['steps']:+.0%}",
        f"{row['cost']:.2f}",
        f"{row['busy']:.0%}",
    ]


def interval_cells(row: Mapping, part: Mapping) -> list[str]:
    size, said = str(part["batch_size"]), f"{float(part['overhead']):+.0%}"
    covered = "yes" if part["covered"] else "NO"
    return [row["task"], str(row["seed"]), size, said, span(part), said_true(part["true"]), covered]


def share(values: Sequence) -> str:
    values = list(values)
    part = f" ({np.mean(values):.0%})" if values else ""
    return f"{sum(map(bool, values))} of {len(values)}{part}"


def quantiles(values: Sequence[float]) -> str:
    return f"{np.median(values):.1%}, {np.quantile(values, 0.95):.1%}"


def summed(rows: Sequence[Mapping]) -> str:
    parts = [part for row in rows for part in row["intervals"]]
    own = [p for r in rows for p in r["intervals"] if p["batch_size"] == r["size"]]
    widths = [f"{100 * np.median([p['width'] for p in kind]):.0f}" for kind in (parts, own) if kind]
    lines = [
        ("intervals that hold the truth", share(part["covered"] for part in parts)),
        ("with 0 % as none or less", share(part["reached"] for part in parts)),
        ("without the truth's own error", share(part["strictly"] for part in parts)),
        ("median width in points: all, the advised", ", ".join(widths)),
        ("too bold", share(row["bold"] for row in rows)),
        ("too timid by a factor of 2", share(row["timid"] for row in rows)),
        ("not known", share(not row["known"] for row in rows)),
        ("regret: median, 95th percentile", quantiles([row["regret"] for row in rows])),
        ("of it in steps", quantiles([row["steps"] for row in rows])),
        ("of it in samples", quantiles([row["samples"] for row in rows])),
        ("cost over the sweep's: median, largest", cost(rows)),
        ("the budget's part in trials: median, smallest", shares(rows)),
    ]
    return grid("what | found", lines)


def cost(rows: Sequence[Mapping]) -> str:
    parts = [row["cost"] for row in rows]
    return f"{np.median(parts):.3f}, {max(parts):.3f}"


def shares(rows: Sequence[Mapping]) -> str:
    parts = [row["busy"] for row in rows]
    return f"{np.median(parts):.0%}, {min(parts):.0%}"


def ruled(rows: Sequence[Mapping]) -> str:
    own = {"advise": [row for row in rows if row["known"]]}
    for row in rows:
        for rule, answer in row["rules"].items():
            own.setdefault(rule, [])
            if answer:
                own[rule].append(answer[1])
    head = "rule | answers | too bold | too timid | regret: median, 95th percentile"
    return grid(
        head,
        (
            [
                rule,
                str(len(kind)),
                share(case["bold"] for case in kind),
                share(case["timid"] for case in kind),
                quantiles([case["regret"] for case in kind]) if kind else "-",
            ]
            for rule, kind in own.items()
        ),
    )


def truths(name: str, truth: Mapping[int, Truth], options: argparse.Namespace) -> str:
    task, folder = load(name), options.runs / "truth"
    runs = runs_of(name, options)
    kept = [json.loads((folder / run.path).read_text()) for run in runs]
    speed = {
        size: np.median(
            [
                run.lengths[-1] / row["seconds"]
                for run, row in zip(runs, kept, strict=True)
                if run.batch_size == size
            ]
        )
        for size in truth
    }
    warmups = {run.warmup_samples for run in runs if run.batch_size > min(truth)}
    text = (
        f"**{name}**: {LENGTHS[name]:,} samples, {len(task.train):,} to train on, rate "
        f"{task.lr:g} at {task.batch_size}, rule {task.lr_rule}, decay {task.lr_decay}, warm-up of "
        f"larger batches {', '.join(map(str, sorted(warmups)))}. SHA-256 "
        f"`{task.provenance['sha256']}` of {task.provenance['corpus']}."
    )
    cells = (
        [
            str(size),
            said_true(true),
            f"{steps(truth, size):.3f}",
            f"{speed[size]:,.0f}",
        ]
        for size, true in truth.items()
    )
    return f"{text}\n\n{grid('batch | overhead | steps | samples a second', cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for step in ("studies", "truth", "report"):
        parser.add_argument(f"--{step}", action="store_true")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=[*LENGTHS])
    parser.add_argument("--seeds", type=lambda text: range(int(text)), default=range(4))
    parser.add_argument("--budget", help="of each study; default: that of the plan")
    parser.add_argument("--truth-seeds", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="studies, or runs, at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/advise-referee"))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    if options.studies:
        with ThreadPoolExecutor(options.workers) as pool:
            for seed in options.seeds:  # so that an interrupted referee has seen every task
                for name in options.tasks:
                    pool.submit(make_study, name, seed, options)
    if options.truth:
        make_truth(options)
    if options.report:
        text = page(options)
        print(text)
        if options.save:
            print(save("advise-referee", text, date.today().isoformat()))


if __name__ == "__main__":
    main()
