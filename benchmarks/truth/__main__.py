"""Prints what is true in each world.

Critical batch sizes are those of branches as long as the training before them, from one run's
weights; overheads are those of whole runs of the horizon's length N, by multiples of the smallest
batch. "Fall" is how far the smallest batch's loss falls over the last three quarters of such a
branch, in standard deviations of one run.

Run: python -m benchmarks.truth [WORLD ...]
"""

import sys
import time

import torch
from benchmarks.truth.exact import (
    critical_batch,
    fall_over_spread,
    from_scratch_overhead,
    start_of,
)
from benchmarks.truth.worlds import WORLDS, World, train

POINTS = (16, 4, 1)
REPLICAS = 128
MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256)
HEAD = ("world", "lr", "B0", *(f"B at {p} (fall)" for p in ("N/16", "N/4", "N")))


def row(world: World) -> list[str]:
    """The world's line of the table."""
    cells, seconds = [world.name, f"{world.lr:.3g}", str(world.batch_size)], 0.0
    places = [world.horizon // part for part in POINTS]
    began = time.process_time()
    for place, (model, optimizer) in zip(places, train(world.task(0), 0, places), strict=True):
        seconds += time.process_time() - began
        start = start_of(model, optimizer)
        found = critical_batch(world, start, place, replicas=REPLICAS)
        error = f"±{found.value * found.error:.0f}" if found.error else ""
        cells.append(
            f"{found.value:.0f}{error} ({fall_over_spread(world, start, place, REPLICAS):.1f})"
        )
        began = time.process_time()
    costs = (
        from_scratch_overhead(world, k * world.batch_size, world.horizon, replicas=REPLICAS)
        for k in MULTIPLES
    )
    cells.append(" ".join(f"{100 * cost:.0f}" for cost in costs))
    return [*cells, f"{1000 * seconds * world.batch_size / world.horizon:.2f}"]


def main() -> None:
    torch.set_num_threads(1)
    overheads = "overhead from scratch, %, k = " + " ".join(map(str, MULTIPLES))
    print("|", " | ".join([*HEAD, overheads, "CPU s per 1000 steps"]), "|")
    print("|", " | ".join("-" * 3 for _ in range(len(HEAD) + 2)), "|")
    for name in sys.argv[1:] or WORLDS:
        print("|", " | ".join(row(WORLDS[name])), "|", flush=True)


if __name__ == "__main__":
    main()
