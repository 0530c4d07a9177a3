"""Whether moments in eight bits train as those in float32 do, by the test of `compare`.

An optimizer's learning rate is tuned once, in float32: octaves from its default until the best one
has worse neighbours. Both kinds of states then train at that rate on the same fresh seeds, as long,
with `compare`'s schedule. As they share the rate, its choice adds no variance to their difference.

Run: python benchmarks/eight_bits_train.py [--tasks char-lm] [--optimizers lans] [--seeds 10]
"""

import argparse
import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from side_by_side import hardware

from steadygrad.optim.codes import is_coded
from steadygrad.studies.compare.optimizers import Entry, entries_of
from steadygrad.studies.compare.schema import Settings
from steadygrad.studies.course import Order, Rate
from steadygrad.studies.distributed import Deadline, DistributedContext
from steadygrad.studies.paired import ALPHA, compare
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.tasks import load_task

STEPS = {"char-lm": 600, "digits-autoencoder": 1500, "digits-classifier": 1500}
HEAD = "optimizer | rate | float32, its spread | 8-bit less float32 | of the loss | verdict"


def train(trainer: Trainer, entry: Entry, lr: float, seed: int) -> float:
    """Validation loss after a training; infinite if it diverged."""
    task = trainer.task
    size, samples = task.batch_size, STEPS[task.name] * task.batch_size
    trainer.task = entry.task(task, lr, samples)
    try:
        trainer.restart(seed)
        trainer.seed_everything("run", seed)
        order = Order(len(task.train), trainer.seed, f"main-{seed}" if seed else "main")
        list(trainer.run(order, 0, samples, size, rate=Rate(total=samples)))
        return trainer.evaluate()
    except Diverged:
        return math.inf
    finally:
        trainer.task = task


def pairs(trainer: Trainer, entry: Entry, seeds: int) -> tuple[float, np.ndarray]:
    """The tuned rate, and losses with shape ``(seeds, 2)``: in float32, in eight bits."""
    best, losses = 0, dict[int, float]()
    while missing := {best - 1, best, best + 1} - losses.keys():
        # Seed 0 is that of `compare`'s searches.
        losses |= {octave: train(trainer, entry, entry.lr * 2.0**octave, 0) for octave in missing}
        best = min(losses, key=losses.__getitem__)
    lr, coded = entry.lr * 2.0**best, replace(entry, make=partial(entry.make, state_dtype="8bit"))
    kinds, fresh = (entry, coded), range(1, 1 + seeds)
    return lr, np.array([[train(trainer, kind, lr, seed) for kind in kinds] for seed in fresh])


def judge(trainer: Trainer, names: list[str], seeds: int) -> None:
    """Prints a task's table; all its intervals hold together."""
    name, sizes = trainer.task.name, {p: p.numel() for p in trainer.model.parameters()}
    coded = sum(size for p, size in sizes.items() if is_coded(p, {"state_dtype": "8bit"}))
    entries = entries_of(Settings(optimizers=",".join(names)), trainer.task)
    rates, losses = zip(*(pairs(trainer, entries[key], seeds) for key in names), strict=True)
    share = f"{coded / sum(sizes.values()):.1%} of {sum(sizes.values()):,} are coded"
    print(f"\n{name}, {STEPS[name]:,} steps: {share}.\n\n| {HEAD} |\n{'| --- ' * 6}|")
    alpha = ALPHA / len(names)
    for key, lr, x in zip(names, rates, losses, strict=True):
        mean, spread = x[:, 0].mean(), x[:, 0].std(ddof=1)
        found = compare(*np.where(np.isfinite(x), x, np.nan).T, alpha)
        apart, half = found.mean[-1], found.half[-1]
        low, high = apart - half, apart + half
        verdict = "cannot tell" if low <= 0 <= high else "better" if high < 0 else "worse"
        text = f"{apart:+.2g} ({1 - alpha:.1%}: {low:+.2g} to {high:+.2g})"
        part = f"{low / mean:+.2%} to {high / mean:+.2%}"
        print(f"| {key} | {lr:.3g} | {mean:.4g}, {spread:.2g} | {text} | {part} | {verdict} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--optimizers", nargs="+", default=["lans", "scaledadam", "lamb"])
    parser.add_argument("--seeds", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{hardware()}.")
    for name in asked.tasks:
        context = DistributedContext(Deadline())
        trainer = Trainer(load_task(name), seed=0, dtype="float32", context=context)
        judge(trainer, asked.optimizers, asked.seeds)
