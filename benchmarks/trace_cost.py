"""Cost of a trace: of steps that are traced and of those between them, and the size of its files.

Steps of one model with and without a trace in turn, as in watch_overhead.py, on one thread.

Run: python benchmarks/trace_cost.py [--rounds 20] [--device cuda] [--save]
"""

import argparse
import datetime
import statistics
import tempfile
import time
from pathlib import Path

import torch
from side_by_side import Timing, hardware, save, table
from watch_overhead import STEPS, Step, device_time

from steadygrad.trace import Trace


class Traced:
    """Steps of a model with a trace that sees every step, or only the first one."""

    def __init__(self, step, folder, every) -> None:
        self.step, self.trace = step, Trace(step.model, step.optimizer, folder, every=every)

    def seconds(self, clock):
        times = []
        for _ in range(STEPS + 1):
            began = clock()
            self.step.task.per_sample_loss(self.step.model, self.step.batch).mean().backward()
            self.step.optimizer.step()
            self.trace.step()
            self.step.optimizer.zero_grad()
            times.append(clock() - began)
        return min(times[1:])


def compare(width, batch_size, rounds, device):
    clock = device_time if device == "cuda" else time.process_time
    step, rows = Step(width, batch_size, device, compiled=False), []
    step.seconds(clock)
    with tempfile.TemporaryDirectory() as root:
        for i in range(rounds):
            folder = Path(root, str(i))
            plain = step.seconds(clock)
            traced = Traced(step, folder, 1)
            rows.append((plain, traced.seconds(clock)))
            traced.trace.close()
            size = max(p.stat().st_size for p in folder.iterdir())
            plain = step.seconds(clock)
            between = Traced(step, Path(root, f"{i}-between"), 10**6)
            rows[-1] += (plain, between.seconds(clock))
            between.trace.close()
    count = sum(p.numel() for p in step.model.parameters())
    columns = [*zip(*rows, strict=True)]
    traced = statistics.quantiles([b / a for a, b, *_ in rows], n=4)
    between = statistics.quantiles([d / c for *_, c, d in rows], n=4)
    medians = [statistics.median(column) for column in columns]
    results = {
        "plain training step": Timing(medians[0], 1.0, 1.0, 1.0),
        "traced": Timing(medians[1], traced[1], traced[0], traced[2]),
        "between two that are traced": Timing(medians[3], between[1], between[0], between[2]),
    }
    title = f"width {width}, batch of {batch_size}, {count:,} weights"
    more = f"A file has {size / 1000:.0f} kB."
    return f"{table(results, title)}\n\n{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = [compare(*size, args.rounds, args.device) for size in ((96, 32), (384, 32))]
    date = datetime.date.today().isoformat()
    head = f"# Trace: cost of a step, {date}"
    report = "\n\n".join([head, f"{hardware(args.device)}.", *text])
    print(report)
    if args.save:
        print(save(f"trace-cost-{args.device}", report + "\n", date))


if __name__ == "__main__":
    main()
