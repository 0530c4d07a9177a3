"""``steadygrad advise`` where the truth is known: whole studies in worlds with closed forms.

    python benchmarks/advise_truth.py --save

The worlds are those of ``ladder_truth.py``, and a study trains over one length, with about 54
trainings' worth of work. The truth are the expected losses over that length, where each batch size
has its best rate to a quarter octave. The best size is the true critical one, or the largest that
can be tried.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ladder_truth import (
    BEYOND,
    STEPS,
    kind_of,
    run,
    rung_row,
    share,
    spread,
    world_of,
)
from benchmarks.side_by_side import hardware, save
from benchmarks.truth.lengths import Lengths

from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.findings import summarize
from steadygrad.studies.advise.plan import LENGTHS

# The largest overhead that is told from larger ones.
KNOWN = 0.2 * LENGTHS[0]


def study(task: tuple[int, int]) -> dict:
    """Runs one study and compares it with the truth."""
    number, seed = task
    world = world_of(number)
    header, results = run(world, seed, world.horizon)
    found, summary = BatchSizes(header, results), summarize(header, results, "budget")
    truth, size = Lengths.of(world, found.samples), summary.recommendation.batch_size
    return {
        "world": asdict(world),
        "kind": kind_of(world),
        "seed": seed,
        "size": size,
        "best": min(truth.critical(), found.sizes[-1]),
        "overhead": truth.at(size) if size else None,
        **rung_row(world, found),
        "words": [summary.answer, *summary.remarks],
    }


def is_held(pair: list[float]) -> bool:
    """Whether an interval holds the truth.

    One that begins at none, or ends beyond what is known, reaches on.
    """
    _, _, _, low, high, truth = pair
    return (low == 0 or min(low, KNOWN) <= truth) and truth <= high


def summed(name: str, rows: list[dict]) -> list[str]:
    """A row of the table."""
    known = [row for row in rows if row["size"]]
    octaves = [found - best for row in rows for _, found, best in row["rates"]]
    return [
        name,
        str(len(rows)),
        str(len(rows) - len(known)),
        share([is_held(pair) for row in rows for pair in row["pairs"]]),
        share([row["overhead"] <= BEYOND for row in known]),
        spread([row["overhead"] for row in known]),
        share([2 * row["size"] <= row["best"] for row in known]),
        spread(octaves),
    ]


HEAD = [
    "studies",
    "number",
    "not known",
    "interval holds truth",
    f"advised truly <= {BEYOND:.0%}",
    "its true overhead",
    "half the best size or less",
    "rates over the best, octaves",
]


def table(rows: list[dict]) -> str:
    """As Markdown."""
    kinds = {"all": rows} | {row["kind"]: [] for row in rows}
    for row in rows:
        kinds[row["kind"]].append(row)
    lines = [HEAD, ["---"] * len(HEAD), *(summed(name, kind) for name, kind in kinds.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(rows: list[dict]) -> str:
    """The result as a Markdown page."""
    about = (
        f"`python benchmarks/advise_truth.py --save`, {len(rows)} studies over {STEPS:,} steps of "
        f"the smallest batch (Adam: fewer); median and quartiles; {hardware()}."
    )
    return "\n\n".join(["# advise where the truth is known", about, table(rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first world")
    parser.add_argument("--seeds", type=int, default=4, help="studies of each world")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", help="file to append every study's row to, as JSON lines")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.worlds)
    tasks, rows = [*product(numbers, range(options.seeds))], []
    with ProcessPoolExecutor(options.workers) as pool:
        # Studies of one world share its truth.
        for row in pool.map(study, tasks, chunksize=options.seeds):
            rows.append(row)
            if options.rows:
                with open(options.rows, "a") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(rows))
    if options.save:
        save("advise-truth", page(rows), date.today().isoformat())


if __name__ == "__main__":
    main()
