"""Cost of a gradient watch in a training step of the language model while all is well.

The sums are of order tokens times width and the step is of order tokens times width squared: the
built-in model's width of 96 is the worst case. On one thread the processor's own time is taken, of
the shortest of five steps in each turn: other programs on the machine change that least. Watched
and plain steps are the same model's, which lies alike in memory.

Run: python benchmarks/watch_overhead.py [--rounds 40] [--threads 1] [--compiled] [--device cuda]
    [--save]
"""

import argparse
import datetime
import statistics
import time
from contextlib import nullcontext

import torch
from side_by_side import Timing, hardware, save, table

from steadygrad.tasks.char_lm import char_lm
from steadygrad.tasks.samples import to_device
from steadygrad.watch import GradientWatch

STEPS = 5


class Step:
    """A training step of a model."""

    def __init__(self, width, batch_size, device, *, compiled) -> None:
        self.task = char_lm(width=width)
        torch.manual_seed(0)
        self.model = self.task.make_model().to(device)
        self.batch = to_device(self.task.train.batch(torch.arange(batch_size)), self.model)
        self.optimizer = self.task.make_optimizer(self.model.parameters(), self.task.lr)
        self.called = torch.compile(self.model) if compiled else self.model

    def __call__(self) -> None:
        self.task.per_sample_loss(self.called, self.batch).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, clock) -> float:
        """The time of the shortest of some steps, after one that is not counted."""
        times = []
        for _ in range(STEPS + 1):
            began = clock()
            self()
            times.append(clock() - began)
        return min(times[1:])


def device_time() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def compare(width, batch_size, rounds, device, *, compiled=False):
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    clock = device_time if device == "cuda" else clock
    plain = watched = Step(width, batch_size, device, compiled=compiled)
    if compiled:
        # Of another model: each new watch would be compiled anew.
        watched = Step(width, batch_size, device, compiled=True)
        watch = GradientWatch(watched.called)
        watched.seconds(clock)
    plain.seconds(clock)
    pairs = []
    for _ in range(rounds):
        before = plain.seconds(clock)
        with nullcontext() if compiled else GradientWatch(watched.called):
            pairs.append((before, watched.seconds(clock)))
    assert not compiled or watch.report() is None
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiled", action="store_true", help="compiled steps as well")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = ((96, 8), (96, 32), (384, 8))
    given = args.rounds, args.device
    text = [compare(*size, *given) for size in sizes]
    if args.compiled:
        text += [compare(*size, *given, compiled=True) for size in sizes]
    date = datetime.date.today().isoformat()
    report = "\n\n".join(
        [f"# Gradient watch: cost of a step, {date}", f"{hardware(args.device)}.", *text]
    )
    print(report)
    if args.save:
        print(save(f"watch-overhead-{args.device}", report + "\n", date))


if __name__ == "__main__":
    main()
