"""``steadygrad advise`` for trainings that do not fit, where the truth is known.

    python benchmarks/ladder_truth.py --save

Each study trains rungs of n/16, n/4 and n samples in a world, with about 45 n samples of work, and
predicts the critical batch size over 4, 16 or 64 n. The truth is that of the expected losses over
that length, where each batch size has its best rate to a quarter octave (``tuned``), or the rate by
the task's rule from the smallest batch's best one.

Rates are constant, or fall linearly to zero, as in half of the worlds that are drawn. Adam's truth
is a mean over replicas: its rungs are shorter.
"""

import argparse
import json
import math
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from datetime import date
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
from benchmarks.side_by_side import hardware, save
from benchmarks.truth.compiled import header_of, run_study
from benchmarks.truth.lengths import FreshTrainer, Lengths, LongWorld, best_of
from benchmarks.truth.worlds import WORLDS

from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.growth import rungs_of
from steadygrad.studies.advise.plan import FEWEST_STEPS, sizes_of
from steadygrad.studies.advise.schema import Critical, Header, Plan
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Training

# Steps of the smallest batch over the longest rung, and samples of a study in those of that rung.
STEPS, ADAM_STEPS, WORK = 4096, 1024, {False: 54, True: 69}
RATIOS, ADAM_RATIOS = (4, 16, 64), (4,)
BEYOND, NEAR = 0.25, 1.5
# Octaves by which the best rate over n is lower than over n/16.
DRIFTS = (0.5, 1.0, 2.0, 9.0)
KINDS = ("quadratic", "regression", "normalized", "normalized regression")
NAMED = [
    (world, decays)
    for world in WORLDS.values()
    for decays in ((False, True) if world.optimizer == "adam" else (False,))
    # The mean over Adam's replicas in a regression takes hours.
    if world.optimizer == "sgd" or (" x" not in world.name and world.kind == "quadratic")
]


def kind_of(world: LongWorld) -> str:
    name = "normalized" if world.normalized else world.optimizer
    return f"{name}, {'decaying' if world.decays else 'constant'}"


def drawn(number: int) -> LongWorld:
    """A world of its own for each number; its task's rate is within 1.5 octaves of the best."""
    draw = np.random.default_rng([2026, number])
    kind = KINDS[number % len(KINDS)]
    normal, decay = kind.startswith("normalized"), draw.uniform(0.8, 2.0)
    world = LongWorld(
        normalized=normal,
        decays=number // len(KINDS) % 2 == 0,
        name=f"{kind} {number}",
        kind="regression" if "regression" in kind else "quadratic",
        optimizer="adam" if normal else "sgd",
        lr=0.003 if normal else 0.03,
        noise=float(np.exp(draw.uniform(np.log(0.3), np.log(3.0)))),
        size=int(draw.choice([32, 128, 192])),
        decay=decay,
        # Without noise a long training's loss falls with the length to this power.
        fall=1 + decay * draw.uniform(0.1, 0.6),
        horizon=4 * STEPS,
    )
    best, _ = best_of(world, world.batch_size, world.horizon, 0)
    return replace(world, lr=world.lr * 2.0 ** (best / 4 + draw.uniform(-1.5, 1.5)))


def world_of(number: int) -> LongWorld:
    """The named worlds, then drawn ones."""
    if number >= len(NAMED):
        return drawn(number - len(NAMED))
    world, decays = NAMED[number]
    values = {one.name: getattr(world, one.name) for one in fields(world)}
    steps = ADAM_STEPS if world.optimizer == "adam" else STEPS
    values["horizon"] = world.batch_size * steps
    return LongWorld(**values, decays=decays)


def studies(task: tuple[int, int]) -> list[dict]:
    """All seeds of one world."""
    number, seeds = task
    world = world_of(number)
    ratios = ADAM_RATIOS if world.simulated else RATIOS
    return [study(world, ratios[number % len(ratios)], seed) for seed in range(seeds)]


def share(flags: list[bool]) -> str:
    return f"{sum(flags)}/{len(flags)} ({sum(flags) / len(flags):.0%})" if flags else "-"


def run(world: LongWorld, seed: int, samples: int, **given) -> tuple[Header, Results]:
    """A study of a training over so many samples; ``given``: what its plan has besides."""
    n = world.horizon
    work = WORK[world.decays] * n
    arms = sizes_of(world.batch_size, n // FEWEST_STEPS, 1)
    header = header_of(world, seed, Plan(arms=arms, samples=n, seeds=64, work=work, **given))
    task = msgspec.structs.replace(header.task, lr_decay="linear" if world.decays else "none")
    settings = replace(header.settings, samples=samples)
    header = msgspec.structs.replace(header, settings=settings, task=task)
    return header, run_study(header, FreshTrainer(world, seed), work)


def study(world: LongWorld, ratio: int, seed: int) -> dict:
    """Runs one study and compares it with the truth."""
    n = world.horizon
    target = ratio * n
    header, results = run(world, seed, target, shorter=(n // 16, n // 4), target=target)
    summary = summarize(header, results, "budget")
    truth, safe = Lengths.of(world, target), summary.recommendation.batch_size
    rungs, _ = rungs_of(header, results)
    return {
        "world": {one.name: getattr(world, one.name) for one in fields(world)},
        "kind": kind_of(world),
        "seed": seed,
        "ratio": ratio,
        "why": summary.growth.why,
        "predicted": ends(summary.growth.predicted),
        "slope": summary.growth.slope,
        "agree": summary.growth.agree,
        "truth": both(truth),
        "drift": drift_of(world),
        "safe": safe,
        "advised": summary.recommendation.why,
        "overhead": truth.at(safe or world.batch_size),
        "rungs": [rung_row(world, rung) for rung in rungs],
        "cost": sum(run.samples for run in results.select(Training)) / target,
        "answer": summary.answer,
    }


def drift_of(world: LongWorld) -> float:
    """Octaves by which the smallest batch's best rate is lower over n than over n/16."""
    size, n = world.batch_size, world.horizon
    return (Lengths.of(world, n // 16).rates[size] - Lengths.of(world, n).rates[size]) / 4


def both(truth: Lengths) -> list[float]:
    """The critical size at tuned rates, and by the rule."""
    return [truth.critical(), truth.critical(by_rule=True)]


def ends(found: Critical | None) -> list[float] | None:
    return [found.batch_size, found.low, found.high] if found else None


def rung_row(world: LongWorld, rung) -> dict:
    """What was found on a rung, and what is true."""
    truth = Lengths.of(world, rung.samples)
    return {
        "samples": rung.samples,
        "found": ends(rung.critical),
        "largest": rung.sizes[-1],
        "truth": both(truth),
        "rates": [
            [rung.sizes[arm], step, truth.rates.get(rung.sizes[arm], math.nan) / 4]
            for arm in (0, *rung.pairs)
            if (step := rung.tuned) is not None
        ],
        "pairs": [
            [rung.sizes[arm], len(pairs), *pairs.overheads, truth.at(rung.sizes[arm])]
            for arm, pairs in rung.pairs.items()
        ],
    }


def held(found: list[float], truth: float, largest: float = math.inf) -> bool:
    """Whether the interval holds the truth, or reaches as far as any size that can be tried."""
    return found[1] <= truth and min(truth, largest) <= found[2]


def near(found: list[float], truth: float) -> bool:
    return 1 / NEAR <= found[0] / truth <= NEAR


def summed(name: str, rows: list[dict], which: int) -> list[str]:
    """A row of the table of predictions."""
    ends = [(row["predicted"], row["truth"][which]) for row in rows if row["predicted"]]
    known = [row for row in rows if row["predicted"] and row["predicted"][2] < math.inf]
    pairs = [(row["predicted"], row["truth"][which]) for row in known]
    least = [held(*pair) for pair in ends if pair[0][2] == math.inf]
    reasons = Counter(row["why"] for row in rows if not row["predicted"])
    ratio = [found[0] / truth for found, truth in pairs]
    width = [math.sqrt(found[2] / found[1]) for found, _ in pairs]
    return [
        name,
        str(len(rows)),
        ", ".join(f"{count} {why}" for why, count in reasons.items()) or "0",
        share([held(*pair) for pair in ends]),
        share(least),
        share([near(*pair) for pair in pairs]),
        spread(ratio),
        spread(width),
        share([row["overhead"] > BEYOND for row in rows]),
        share([row["safe"] is None for row in rows]),
        spread([row["slope"] for row in known]),
        spread([true_slope(row, which) for row in rows]),
        spread([row["cost"] for row in rows]),
    ]


def true_slope(row: dict, which: int) -> float:
    """By which the critical size grows from the shortest rung to the target; NaN: not known."""
    first, last = row["rungs"][0]["truth"][which], row["truth"][which]
    return math.log(last / first) / math.log(16 * row["ratio"]) if first < math.inf else math.nan


def rung_rows(rows: list[dict], which: int) -> list[list[str]]:
    """The table of rungs, the shortest first."""
    table = []
    for number, name in enumerate(("n/16", "n/4", "n")):
        rungs = [row["rungs"][number] for row in rows]
        known = [rung for rung in rungs if rung["found"] and rung["found"][2] < math.inf]
        pairs = [(rung["found"], rung["truth"][which]) for rung in known]
        limits = [rung["largest"] for rung in known]
        rates = [own[1] - own[2] for rung in rungs for own in rung["rates"][:1]]
        table.append(
            [
                name,
                f"{len(rungs) - len(pairs)} of {len(rungs)}",
                share([held(*pair, most) for pair, most in zip(pairs, limits, strict=True)]),
                share([near(*pair) for pair in pairs]),
                spread([found[0] / truth for found, truth in pairs]),
                spread([math.sqrt(found[2] / found[1]) for found, _ in pairs]),
                spread(rates),
            ]
        )
    return table


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    if not (values := [value for value in values if math.isfinite(value)]):
        return "-"
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


HEAD = [
    "studies",
    "number",
    "not predicted",
    "interval holds truth",
    "of those with a lower end alone",
    "within 1.5 times",
    "predicted over true",
    "half width, times",
    "safe truly > 25 %",
    "safe not known",
    "slope",
    "true slope",
    "cost, runs over N",
]
RUNGS = ["rung", "not known", "interval holds truth", "within 1.5 times", "found over true"]
RUNGS += ["half width, times", "smallest's rate over the best, octaves"]


def tables(rows: list[dict], which: int) -> list[str]:
    """The tables as lines of Markdown."""
    groups = {"all": rows}
    for row in rows:
        groups.setdefault(row["kind"], []).append(row)
    for row in sorted(rows, key=lambda row: row["ratio"]):
        groups.setdefault(f"N = {row['ratio']} n", []).append(row)
    for row in sorted(rows, key=lambda row: row["drift"]):
        name = next(f"drift up to {most:g} octaves" for most in DRIFTS if row["drift"] <= most)
        groups.setdefault(name, []).append(row)
    first = [summed(name, group, which) for name, group in groups.items()]
    lines = []
    for table in ([HEAD, ["---"] * len(HEAD), *first], [RUNGS, ["---"] * len(RUNGS)]):
        lines += ["| " + " | ".join(row) + " |" for row in table]
        lines += [""] if table[0] is HEAD else []
    return lines + ["| " + " | ".join(row) + " |" for row in rung_rows(rows, which)]


def page(rows: list[dict]) -> str:
    """The result as a Markdown page."""
    about = (
        f"`python benchmarks/ladder_truth.py --save`, {len(rows)} studies with rungs up to "
        f"{STEPS:,} steps of the smallest batch; median and quartiles; {hardware()}."
    )
    ruled = ["", "## By the rule from the smallest batch's best rate", "", *tables(rows, 1)]
    tuned = ["## Rates tuned at each size", "", *tables(rows, 0)]
    return "\n".join(
        ["# advise by a ladder where the truth is known", "", about, "", *tuned, *ruled, ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first world")
    parser.add_argument("--seeds", type=int, default=2, help="studies of each world")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", help="file to append every study's row to, as JSON lines")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    tasks = [
        (number, options.seeds) for number in range(options.first, options.first + options.worlds)
    ]
    rows: list[dict] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for found in pool.map(studies, tasks):
            rows += found
            if options.rows:
                with open(options.rows, "a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    print(page(rows))
    if options.save:
        save("ladder-truth", page(rows), date.today().isoformat())


if __name__ == "__main__":
    main()
