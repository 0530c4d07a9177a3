"""The ladder before the referee: rungs of a quarter of N at most, judged by what is true at N.

    python benchmarks/ladder_replay.py benchmarks/results/2026-11-27-advise-referee.md --save

``advise`` is told that no training over N fits: it predicts N's critical batch size from its rungs.
Truths, and what today's studies of whole trainings advised and cost, are those of the table. The
search and the trials are the program's own. A study that is there is not made again.
"""

import argparse
import json
import math
import multiprocessing
import shutil
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
from advise_referee import BOLD, ERRORS, LENGTHS, Truth, grid, said_true, share, trained
from advise_replay import STUDY, TOLERANCE, Recorded, read, study, swept
from msgspec.structs import replace
from side_by_side import hardware, save

from steadygrad.studies.advise import trials
from steadygrad.studies.advise.plan import FEW, FEWEST_STEPS, SHORTER
from steadygrad.studies.advise.schema import Plan

# N over the longest rung; samples of a study, in longest rungs; a factor that is near enough.
PART, WORK, NEAR = 4, 54, 1.5
NOTES = f"""A study's longest rung is N / {PART}, and it has shorter ones of a quarter and a \
sixteenth of that where these are {FEW} steps of the smallest batch (none of these tasks has one, \
so that the slope is the prior's). It ends when it is complete, or after about {WORK} times the \
samples of the longest rung.

**The truth is at the rates of the task's rule; the ladder searches the rates.** They are \
two questions: where the rule's rates do not suit, the two critical sizes differ at any length. \
The true size is where the table's overheads exceed {TOLERANCE:.0%} for good, by interpolation in \
the logarithm of the size, in brackets with {ERRORS:g} standard errors on either side; of "over \
128", where no recorded size is beyond, only that bound is judged. *Safe* is the batch that is \
advised for the rung (none: the smallest one is used), with its overhead over N. Cost is all \
samples trained on, over N. Today's studies have the same seed, and train over N itself."""


def rungs(plan: Plan) -> Plan:
    """The plan for whole trainings, as it would be if the longest that fits were a part of N."""
    batch = plan.arms[0]
    parts = (PART * times for times in (1, *sorted(SHORTER)))
    longest, *shorter = (plan.samples // part // batch * batch for part in parts)
    arms = tuple(size for size in plan.arms if size <= longest // FEWEST_STEPS)
    known = tuple(n for n in reversed(shorter) if n >= FEW * batch)
    of_n = {"target": plan.samples, "work": WORK * longest}
    return replace(plan, arms=arms, samples=longest, shorter=known, **of_n)


def make_study(key: tuple[str, int], out: Path) -> None:
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
    whole = trials.plan_for
    trials.plan_for = lambda *given, **named: rungs(whole(*given, **named))
    study((*key, WORK * LENGTHS[key[0]] // PART, out))


def critical(truth: Mapping[int, Truth], errors: float = 0.0) -> float:
    """The size beyond which all overheads exceed the tolerance; infinite if none does."""
    sizes = sorted(truth)
    found = [truth[size].overhead + errors * truth[size].error for size in sizes]
    last = max(i for i, overhead in enumerate(found) if overhead <= TOLERANCE)
    if last == len(sizes) - 1:
        return math.inf
    ends = slice(last, last + 2)
    return math.exp(np.interp(TOLERANCE, found[ends], np.log(sizes[ends])))


def row(key: tuple[str, int], recorded: Recorded, out: Path) -> dict:
    """A study beside the truth."""
    found, truth = json.loads((out / "summary.json").read_text()), recorded.truths[key[0]]
    size, grown = found["recommendation"]["batch_size"], found["growth"]["predicted"]
    true, least, most = (critical(truth, errors) for errors in (0.0, ERRORS, -ERRORS))
    judged, bound = dict.fromkeys(("covered", "overlaps", "near")), min(true, max(truth))
    if grown:
        grown = {name: float(value) for name, value in grown.items()}
        judged["covered"] = grown["low"] <= true and bound <= grown["high"]
        judged["overlaps"] = grown["low"] <= most and min(least, bound) <= grown["high"]
        if grown["high"] < math.inf:
            judged["near"] = bound / NEAR <= grown["batch_size"] <= NEAR * true
    told = [f"{s:.1f}" if s < math.inf else f"over {max(truth)}" for s in (true, least, most)]
    known = {"key": key, "true": told, "size": size, "safe": truth[size or min(truth)]}
    now = recorded.costs[key] * swept(key[0], truth) / LENGTHS[key[0]]
    cost, ended = trained(out) / LENGTHS[key[0]], found["status"]
    return {**known, **judged, "grown": grown, "cost": cost, "ended": ended, "now": now}


def cells(row: Mapping, today: Mapping[tuple[str, int], str]) -> list[str]:
    true, least, most = row["true"]
    grown, verdict = row["grown"], {True: "yes", False: "NO", None: "-"}
    likely = "{batch_size:.1f} ({low:.1f} to {high:.1f})".format(**grown) if grown else "not known"
    words = [row["key"][0], str(row["key"][1]), f"{true} ({least} to {most})"]
    words += [str(row["size"] or "none"), said_true(row["safe"]), likely]
    words += [verdict[row[name]] for name in ("covered", "overlaps", "near")]
    return [*words, f"{row['cost']:.1f}", row["ended"], today[row["key"]], f"{row['now']:.0f}"]


def page(rows: list[dict], table: Path) -> str:
    of = lambda name: share(r[name] for r in rows if r[name] is not None)
    unknown = lambda name: share(r[name] is None for r in rows)
    over = lambda errors: (r["safe"].overhead - errors * r["safe"].error for r in rows)
    bold = [share(least > BOLD * TOLERANCE for least in over(errors)) for errors in (0, ERRORS)]
    widths = [r["grown"]["high"] / r["grown"]["low"] for r in rows if r["grown"]]
    costs = (median(r[name] for r in rows) for name in ("cost", "now"))
    summed = [
        ("likely's interval holds the true size", of("covered")),
        ("it and the truth's own interval overlap", of("overlaps")),
        (f"likely is within a factor of {NEAR}", of("near")),
        ("median of its upper over its lower end", f"{median(widths):.1f}"),
        ("likely, safe are not known", f"{unknown('grown')}, {unknown('size')}"),
        (f"safe is beyond {BOLD * TOLERANCE:.0%} over N, surely so", ", ".join(bold)),
        ("cost in runs over N: median, today's", ", ".join(f"{cost:.1f}" for cost in costs)),
    ]
    today = {(s[1], int(s[2])): s[3] for s in STUDY.finditer(table.read_text())}
    head = "task | seed | truth | safe | its overhead | likely | covered | with the truth's error"
    head += f" | within {NEAR} | cost | ended | today | its cost"
    called = f"`python benchmarks/ladder_replay.py {table} --save`; {hardware()}."
    tables = grid("what | found", summed), grid(head, (cells(r, today) for r in rows))
    return "\n\n".join(("# The ladder before the referee", called, NOTES, *tables)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/ladder-replay"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    recorded = read(options.table)
    keys = [(name, seed) for seed in range(options.seeds) for name in LENGTHS]
    outs = [options.out / f"{name}-{seed}" for name, seed in keys]
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
        pool.starmap(make_study, zip(keys, outs, strict=True), chunksize=1)
    rows = [row(key, recorded, out) for key, out in zip(keys, outs, strict=True)]
    text = page(rows, options.table)
    print(text)
    if options.save:
        save("ladder-replay", text, date.today().isoformat())


if __name__ == "__main__":
    main()
