"""``steadygrad advise`` where the truth is known: worlds with closed forms, many seeds.

    python benchmarks/advise_truth.py --save

For each world the whole study is run with every seed: search, trials, words.
Its claims are compared with the expected losses of ``benchmarks.truth.exact``:

- the interval of a checked batch size covers its true overhead;
- the recommended batch's true overhead at the stated length;
- the verdict on the learning rate: "low" or "high" must be worth a tenth of the samples in truth.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side import hardware, save
from benchmarks.truth import exact
from benchmarks.truth.compiled import CompiledTrainer, header_of, plan_of, run_study
from benchmarks.truth.worlds import WORLDS

from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import LENGTHS, end_marks, warmup_samples

TOLERANCE = 0.2
# The largest overhead that is told from larger ones.
KNOWN = LENGTHS[0] * TOLERANCE
# Samples of a study, in lengths of its trainings.
WORK = 64
REPLICAS = 512


def study(task: tuple[str, int, int]) -> dict:
    """Runs one study and compares it with the truth."""
    name, seed, horizon = task
    world = WORLDS[name]
    plan = plan_of(world, horizon, seeds=64)
    header = header_of(world, seed, plan)
    results = run_study(header, CompiledTrainer(world, seed), WORK * horizon)
    found, summary = BatchSizes(header, results), summarize(header, results, "budget")
    batch = summary.recommendation.batch_size
    return {
        "world": name,
        "seed": seed,
        "length": found.length,
        "checks": [check_row(world, found, run) for run in summary.checked],
        "batch": batch,
        "best": best_of(world, found),
        "overhead": overhead_of(world, found, batch) if batch else None,
        "rates": [rate_row(world, found, rate) for rate in summary.rates],
        "words": [summary.answer, *summary.remarks],
    }


def best_of(world, found: BatchSizes) -> int:
    """The largest batch size whose true overhead is tolerable, below those whose is not."""
    best = world.batch_size
    for size in found.plan.arms[1:]:
        if overhead_of(world, found, size) > TOLERANCE:
            break
        best = size
    return best


def check_row(world, found: BatchSizes, run) -> dict:
    marks = tuple(end_marks(found.length, decays=False))
    truth = overhead_of(world, found, run.batch_size, marks)
    return {"size": run.batch_size, "seeds": run.seeds, "low": run.low, "high": run.high} | {
        "overhead": run.overhead, "truth": truth
    }  # fmt: skip


def overhead_of(world, found: BatchSizes, size: int, marks: tuple[int, ...] = ()) -> float:
    """True overhead of a batch size over the run with the advised warm-up.

    At its end, or where a measured overhead stands: on the mean over its last evaluations.
    """
    warmup = warmup_samples(found.task, found.length, size, tunes=False)
    return true_overhead(world, size, found.length, warmup, marks=marks)


@cache
def true_overhead(
    world, size: int, length: int, warmup: int, factor: float = 1.0, marks: tuple[int, ...] = ()
) -> float:
    """True overhead of a training from scratch; many seeds ask for the same."""
    top = factor * learning_rate(1.0, size, world.batch_size, world.rule)
    middles = size * (np.arange(length // size) + 0.5)
    parts = np.minimum(1.0, middles / warmup) if warmup else np.ones_like(middles)
    steps = np.full(len(middles), size), world.lr * (1 + (top - 1) * parts)
    return exact.steps_overhead(world, *steps, length, REPLICAS, marks)


def rate_row(world, found: BatchSizes, rate) -> dict:
    size = rate.batch_size
    warmup = warmup_samples(found.task, found.length, size, tunes=False)
    truth = {
        factor: true_overhead(world, size, found.length, warmup, factor)
        for factor in (0.5, 1.0, 2.0)
    }
    return {"verdict": rate.verdict, "size": size, "truth": truth}


def summed(rows: list[dict]) -> list[str]:
    """A world's row of the table."""
    checks = [c for row in rows for c in row["checks"]]
    # An interval that begins at none, or ends beyond what is known, reaches on.
    covered = [
        (c["low"] == 0 or min(c["low"], KNOWN) <= c["truth"]) and c["truth"] <= c["high"]
        for c in checks
    ]
    advised = [row["overhead"] for row in rows if row["overhead"] is not None]
    timid = [2 * row["batch"] <= row["best"] for row in rows if row["batch"]]
    rates = [rate for row in rows for rate in row["rates"]]
    verdicts = [rate["verdict"] or "?" for rate in rates]
    return [
        rows[0]["world"],
        str(len(rows)),
        share(covered),
        share([value <= 0.25 for value in advised]),
        quantiles(advised),
        share(timid),
        " ".join(f"{v} {verdicts.count(v)}" for v in sorted(set(verdicts))),
        share([r for rate in rates if rate["verdict"] and (r := judged_right(rate)) is not None]),
    ]


def judged_right(rate: dict) -> bool | None:
    """Whether a verdict is not contradicted by the truth; None where the truth reaches no further.

    One that fits wastes no more samples than are tolerated.
    """
    own = 1 + rate["truth"][1.0]
    gains = {factor: own / (1 + rate["truth"][factor]) - 1 for factor in (0.5, 2.0)}
    if rate["verdict"] == "fits":
        return max(gains.values()) <= TOLERANCE
    gain = gains[2.0 if rate["verdict"] == "low" else 0.5]
    return gain > 0.0 if gain else None


def share(flags: list[bool]) -> str:
    return f"{sum(flags)}/{len(flags)} ({sum(flags) / len(flags):.0%})" if flags else "-"


def quantiles(values: list[float]) -> str:
    if not values:
        return "-"
    low, middle, high = np.quantile(np.minimum(values, 3.0), (0.05, 0.5, 0.95))
    return f"{middle:+.0%} ({low:+.0%} to {high:+.0%})"


HEAD = [
    "world",
    "seeds",
    "check's interval covers truth",
    "advised batch truly <= 25 %",
    "its true overhead, 5 % to 95 %",
    "half the best size or less",
    "learning rate",
    "verdict right",
]


def page(table: list[list[str]], horizon: int) -> str:
    """The result as a Markdown page."""
    rows = ["| " + " | ".join(row) + " |" for row in (HEAD, ["---"] * len(HEAD), *table)]
    return "\n".join(
        [
            "# advise where the truth is known",
            "",
            (
                f"`python benchmarks/advise_truth.py --save`, runs of up to {horizon:,} samples, "
                f"tolerance {TOLERANCE:.0%}; {hardware()}."
            ),
            "",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--horizon", type=int, default=32768, help="samples of the longest run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", help="file to append every study's row to, as JSON lines")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    names = options.worlds.split(",")
    tasks = [(name, seed, options.horizon) for name in names for seed in range(options.seeds)]
    found: dict[str, list[dict]] = {name: [] for name in names}
    table = []
    with ProcessPoolExecutor(options.workers) as pool:
        for row in pool.map(study, tasks):
            found[row["world"]].append(row)
            if options.rows:
                with open(options.rows, "a") as file:
                    file.write(json.dumps(row) + "\n")
            if len(found[row["world"]]) == options.seeds:
                table.append(summed(found[row["world"]]))
                print(" | ".join(table[-1]), flush=True)
    if options.save:
        save("advise-truth", page(table, options.horizon), date.today().isoformat())


if __name__ == "__main__":
    main()
