"""``advise`` before the referee again: studies of the recorded cost, judged by the recorded truths.

    python benchmarks/advise_replay.py benchmarks/results/2026-11-27-advise-referee.md --save

A table of `advise_referee.py` has the truth of every batch size, and what each study cost. Here
each study trains on as many samples as the one in the table did, however long that takes, so that
two versions of the program are compared at one cost. A study that is there is not made again.
Truths are at the learning rates of the task's rule, while today's studies search the rates.
"""

import argparse
import json
import multiprocessing
import re
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
from advise_referee import (
    ERRORS,
    HERE,
    LENGTHS,
    Truth,
    grid,
    is_covered,
    judge,
    load,
    reaches,
    reference,
)
from side_by_side import hardware, save

TRUTH = re.compile(r"\| (\d+) \| ([+-][\d.]+)% ± ([\d.]+)% \|")
STUDY = re.compile(r"\| (\w+) \| (\d) \| (\d+|not known) \|(?:[^|]*\|){7} ([\d.]+) \| \d+% \|")
SEEDS = 16  # of the recorded truth
TOLERANCE = 0.2
REPLAYED = "Each study trains on as many samples as that of the table did; truths are the table's."
RATES = "They are at the learning rates of the task's rule, while the study searches its rates."


class Recorded(NamedTuple):
    """A table's truths by task and batch size, and costs of studies by task and seed."""

    truths: dict[str, dict[int, Truth]]
    costs: dict[tuple[str, int], float]


def read(path: Path) -> Recorded:
    truths, costs, task = defaultdict(dict), {}, ""
    for line in path.read_text().splitlines():
        if named := re.match(r"\*\*(\w+)\*\*", line):
            task = named[1]
        elif row := TRUTH.match(line):
            truths[task][int(row[1])] = Truth(float(row[2]) / 100, float(row[3]) / 100)
        elif row := STUDY.match(line):
            costs[row[1], int(row[2])] = float(row[4])
    return Recorded(dict(truths), costs)


def swept(name: str, truth: dict[int, Truth]) -> int:
    """Samples of all trainings of a truth, whose part a cost is."""
    samples, lengths = LENGTHS[name], reference(load(name), LENGTHS[name])[1]
    return SEEDS * ((len(truth) - 1) * samples + sum(part[-1] for part in lengths))


class Limit:
    """Watches a study, and ends it after so many samples of training."""

    def __init__(self, samples: float, end) -> None:
        self.left, self.end = samples, end

    def begin(self, total: int, done: int) -> None:
        pass

    def advance(self, samples: int, what: str) -> None:
        self.left -= samples
        if self.left <= 0:
            self.end()

    def say(self, line: str) -> None:
        print(line, flush=True)


def study(job: tuple[str, int, float, Path]) -> None:
    name, seed, samples, out = job
    if (out / "summary.json").exists():
        return
    from steadygrad.studies import work
    from steadygrad.studies.advise.schema import Settings
    from steadygrad.studies.distributed import Deadline
    from steadygrad.studies.run import start

    # What is limited is training.
    work.evaluation_cost = lambda samples: 0
    deadline = Deadline()
    monitor = Limit(samples, lambda: deadline.limit(-1e9))
    known = {"samples": LENGTHS[name], "seed": seed, "budget": 1e6, "workers": 1, "threads": 1}
    settings = Settings(task=f"{HERE / 'referee_tasks.py'}:{name}", device="cpu", **known)
    outcome = start("advise", settings, out, deadline=deadline, monitor=monitor)
    if outcome.failure:
        raise outcome.failure
    print(name, seed, "done", flush=True)


def row(name: str, seed: int, recorded: Recorded, out: Path) -> dict:
    """A study beside the truth."""
    found, truth = json.loads((out / "summary.json").read_text()), recorded.truths[name]
    overheads = reference(load(name), LENGTHS[name])[0]
    ends, advice = (min(overheads), max(overheads)), found["recommendation"]
    size = advice["batch_size"] if advice["samples"] == LENGTHS[name] else None
    intervals = [
        (truth[r["batch_size"]], r, np.ptp(np.clip([float(r["low"]), float(r["high"])], *ends)))
        for r in found["checked"]
        if r["batch_size"] in truth
    ]
    return {
        "name": name,
        "seed": seed,
        "size": size,
        **judge(size, truth, TOLERANCE),
        "covered": [is_covered(r, true, ends, ERRORS) for true, r, _ in intervals],
        "reached": [reaches(r, true) for true, r, _ in intervals],
        "widths": [float(width) for _, _, width in intervals],
        "width": [float(w) for _, r, w in intervals if r["batch_size"] == size],
    }


def page(rows: list[dict], table: Path) -> str:
    covered, reached, widths, width = (
        [x for r in rows for x in r[name]] for name in ("covered", "reached", "widths", "width")
    )
    regrets = [r["regret"] for r in rows]
    share = lambda flags: f"{sum(flags)} of {len(flags)} ({np.mean(flags):.0%})"
    summed = [
        ("intervals that hold the truth", share(covered)),
        ("with 0 % as none or less", share(reached)),
        ("median width in points", f"{100 * np.median(widths):.0f}, {100 * np.median(width):.0f}"),
        ("too bold", share([r["bold"] for r in rows])),
        ("too timid by a factor of 2", share([r["timid"] for r in rows])),
        ("not known", share([not r["known"] for r in rows])),
        (
            "regret: median, 95th percentile",
            f"{np.median(regrets):.1%}, {np.quantile(regrets, 0.95):.1%}",
        ),
    ]
    cells = (
        (
            r["name"],
            str(r["seed"]),
            str(r["size"] or "not known"),
            f"{r['overhead']:+.1%} ± {r['error']:.1%}",
            str(r["best"]),
            f"{r['steps']:+.0%}",
        )
        for r in rows
    )
    words = [
        f"# advise before the referee, at the cost of {table.name}",
        f"`python benchmarks/advise_replay.py {table} --save`; {hardware()}.",
        f"{REPLAYED} {RATES}",
        grid("what | found", summed),
        grid("task | seed | advised | truth | best | steps", cells),
    ]
    return "\n\n".join(words) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/advise-replay"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    recorded = read(options.table)
    wanted = sorted((key for key in recorded.costs if key[1] < options.seeds), key=lambda k: k[1])
    outs = {key: options.runs / f"{key[0]}-{key[1]}" for key in wanted}
    jobs = [
        (*key, recorded.costs[key] * swept(key[0], recorded.truths[key[0]]), outs[key])
        for key in wanted
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
        for _ in pool.imap_unordered(study, jobs):
            pass
    text = page([row(*key, recorded, outs[key]) for key in wanted], options.table)
    print(text)
    if options.save:
        save("advise-replay", text, date.today().isoformat())


if __name__ == "__main__":
    main()
