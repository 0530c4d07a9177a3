"""What a gradient watch adds to a training step of the language model while all is well.

The sums are of order tokens times width and the step is of order tokens times width squared: the
built-in model's width of 96 is the worst case. On one thread the processor's own time is taken, of
the shortest of five steps in each turn: other programs on the machine change that least.

Run: python benchmarks/watch_overhead.py [--rounds 100] [--threads 1] [--save]
"""

import argparse
import copy
import datetime
import statistics
import time

import torch
from side_by_side import Timing, hardware, save, table

from steadygrad.tasks.char_lm import char_lm
from steadygrad.watch import GradientWatch

STEPS = 5


class Step:
    """One training step of a copy of the model, watched or not."""

    def __init__(self, task, model, batch_size, *, watched, compiled) -> None:
        self.task, self.model = task, copy.deepcopy(model)
        self.batch = task.train.batch(torch.arange(batch_size))
        self.optimizer = task.make_optimizer(self.model.parameters(), task.lr)
        self.called = torch.compile(self.model) if compiled else self.model
        self.watch = GradientWatch(self.called) if watched else None

    def seconds(self, clock) -> float:
        """The time of the shortest of some steps."""
        times = []
        for _ in range(STEPS):
            began = clock()
            self.step()
            times.append(clock() - began)
        return min(times)

    def step(self) -> None:
        self.task.per_sample_loss(self.called, self.batch).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(width, batch_size, rounds, *, compiled=False):
    task = char_lm(width=width)
    model = task.make_model()
    plain, watched = (
        Step(task, model, batch_size, watched=on, compiled=compiled) for on in (False, True)
    )
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    plain.seconds(clock), watched.seconds(clock)
    pairs = []
    for turn in range(rounds):
        # Either goes first in every other turn.
        order = (plain, watched) if turn % 2 else (watched, plain)
        found = {one: one.seconds(clock) for one in order}
        pairs.append((found[plain], found[watched]))
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    results = {
        "plain training step": Timing(before, 1.0, 1.0, 1.0),
        "GradientWatch": Timing(after, middle, low, high),
    }
    title = f"width {width}, batch of {batch_size}" + (", compiled" if compiled else "")
    return table(results, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="compiled steps as well")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = ((96, 8), (96, 32), (384, 8))
    text = [compare(*size, args.rounds) for size in sizes]
    if args.compiled:
        text += [compare(*size, args.rounds, compiled=True) for size in sizes]
    date = datetime.date.today().isoformat()
    report = "\n\n".join([f"# Gradient watch: cost of a step, {date}", f"{hardware()}.", *text])
    print(report)
    if args.save:
        print(save("watch-overhead-cpu", report + "\n", date))


if __name__ == "__main__":
    main()
