"""Verdicts of ``advise``'s comparison on learning rates that are missed on purpose.

    python benchmarks/advise_rates.py --save

Four tasks of the referee are trained at their smallest batch by its plain loop, at rates from an
eighth to eight times the task's own. A study with the rate set to a quarter, half, once, twice or
four times the task's own compares it with its half and its double, as `advise` does at the
smallest batch: looks, at most so many pairs, one verdict. 20 studies with seeds of their own. The
truth is the mean over all pairs that any study trained, those of the verdict among them:

- "too low", "too high" are wrong where the named neighbour is worse;
- "fits" is wrong where a neighbour is better by what the tolerated samples are worth;

each by more than two standard errors, so that small errors are not counted. Where a rate diverges,
`advise` ends with an error at the task's own rate; such a study is not judged.
"""

import argparse
import json
import math
import multiprocessing
from collections import Counter
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

from advise_referee import Run, load, train_and_keep
from side_by_side import hardware, save

from steadygrad.studies.advise.analysis import RATES, other_rate
from steadygrad.studies.advise.findings import verdict
from steadygrad.studies.advise.plan import PAIRS, lengths_of
from steadygrad.studies.paired import next_look
from steadygrad.studies.schema import Training

LENGTHS = {"digits": 4608, "marriages": 4608, "words": 4608, "mnist": 3072}
MISSED = (0.25, 0.5, 1.0, 2.0, 4.0)
STUDIES = 20
FIRST_SEED = 3000
WORDS = {"low": "too low", "high": "too high", "": "not known"}


def run_of(task: str, rate: float, seed: int) -> Run:
    lengths = tuple(lengths_of(LENGTHS[task], 0.2))
    return Run(task, load(task).batch_size, lengths, 0, FIRST_SEED + seed, rate)


def losses(folder: Path, task: str, rate: float, seed: int) -> dict[str, float]:
    """The losses by length; trained where they are not there."""
    run = run_of(task, rate, seed)
    train_and_keep(run, folder)
    return json.loads((folder / run.path).read_text())["losses"]


def training(found: dict[str, float], seed: int) -> Training:
    """The run as `advise` records it, as far as its comparison reads it."""
    curve = tuple((float(n), loss) for n, loss in found.items())
    known = {"arm": 0, "samples": 0, "step": 0.0, "lr": 0.0}
    return Training(seed=seed, loss=curve[-1][1], curve=curve, **known)


def study(job: tuple[str, float, int], folder: Path) -> tuple[str, float, str, int]:
    """One study's verdict, and its pairs."""
    task, missed, number = job
    seeds, known, look = range(number * PAIRS, (number + 1) * PAIRS), {}, 0
    while (look := next_look(look, PAIRS)) and not any(
        found.verdict == "better" for found in known.values()
    ):

        def runs(rate: float, look: int = look) -> dict[int, Training]:
            some = seeds[:look]
            return {i: training(losses(folder, task, missed * rate, i), i) for i in some}

        own = runs(1.0)
        if not all(math.isfinite(run.loss) for run in own.values()):
            return task, missed, "diverged", look
        base = {seed: run.curve for seed, run in own.items()}
        for step in RATES:
            if step not in known or not known[step].verdict:
                known[step] = other_rate(runs(2.0**step), own, base)
    return task, missed, verdict(known), max(found.seeds for found in known.values())


def wrong(task: str, missed: float, said: str, folder: Path) -> bool:
    """Whether the mean over all seeds contradicts a verdict."""
    if said in ("", "diverged"):
        return False
    lengths = [str(n) for n in lengths_of(LENGTHS[task], 0.2)]

    def kept(rate: float) -> dict[int, dict[str, float]]:
        every = range(STUDIES * PAIRS)
        paths = {i: folder / run_of(task, rate, i).path for i in every}
        return {i: json.loads(p.read_text())["losses"] for i, p in paths.items() if p.exists()}

    own = kept(missed)

    def contradicted(rate: float) -> bool:
        other = kept(missed * rate)
        gains = [own[i][lengths[-1]] - other[i][lengths[-1]] for i in own.keys() & other.keys()]
        if said == "fits":
            worth = [own[i][lengths[-2]] - own[i][lengths[-1]] for i in own.keys() & other.keys()]
            gains = [gain - more for gain, more in zip(gains, worth, strict=True)]
        if not all(map(math.isfinite, gains)):
            return said != "fits"  # the neighbour diverged
        error = 2 * stdev(gains) / len(gains) ** 0.5
        return fmean(gains) > error if said == "fits" else fmean(gains) < -error

    return any(contradicted(rate) for rate in {"low": (2.0,), "high": (0.5,)}.get(said, (0.5, 2.0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/advise-rates"))
    parser.add_argument("--studies", type=int, default=STUDIES)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=[*LENGTHS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    # Studies of one number share their seeds' runs: one process trains them.
    groups = [(task, number) for task in options.tasks for number in range(options.studies)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        parts = pool.map(partial(group, folder=options.runs), groups, chunksize=1)
        found = [*chain.from_iterable(parts)]
    rows = []
    for task in options.tasks:
        for missed in MISSED:
            own = [row for row in found if row[:2] == (task, missed)]
            said = Counter(row[2] for row in own)
            count = sum(n for what, n in said.items() if wrong(task, missed, what, options.runs))
            told = ", ".join(f"{WORDS.get(what, what)} {n}" for what, n in sorted(said.items()))
            rows.append([task, f"{missed:g}", told, str(max(row[3] for row in own)), str(count)])
            print(" | ".join(rows[-1]), flush=True)
    errors = sum(int(row[-1]) for row in rows)
    print(f"wrong: {errors} of {len(found)}")
    if options.save:
        head = ["task", "rate over the task's own", "verdicts", "most pairs", "wrong"]
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * 5, *rows)]
        command = f"`python benchmarks/advise_rates.py --save`; {hardware()}."
        title = "# advise: learning rates that are missed on purpose"
        total = f"Wrong: {errors} of {len(found)}."
        text = "\n".join([title, "", command, "", *lines, "", total, ""])
        save("advise-rates", text, date.today().isoformat())


def group(job: tuple[str, int], folder: Path) -> list[tuple[str, float, str, int]]:
    task, number = job
    return [study((task, missed, number), folder) for missed in MISSED]


if __name__ == "__main__":
    main()
