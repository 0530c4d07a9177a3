"""Whether moments in eight bits train as those in float32 do, by the statistics of `compare`.

An optimizer's learning rate is tuned once, in float32: octaves from its default until the best one
has worse neighbours. Both kinds of states then train at that rate on the same fresh seeds, as long,
with `compare`'s schedule. As they share the rate, its choice adds no variance to their difference.

Run: python benchmarks/eight_bits_train.py [--tasks char-lm] [--optimizers lans] [--seeds 10]
    [--save]
"""

import argparse
import datetime
import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from side_by_side import hardware, save

from steadygrad.optim.codes import is_coded
from steadygrad.studies.compare.optimizers import Entry, entries_of
from steadygrad.studies.compare.schema import Settings
from steadygrad.studies.compare.statistics import compare_pairs
from steadygrad.studies.deadline import Deadline
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.order import main_order
from steadygrad.studies.trainer import Diverged, Trainer
from steadygrad.tasks import load_task

STEPS = {"char-lm": 600, "digits-autoencoder": 1500, "digits-classifier": 1500}
HEAD = "optimizer | rate | float32, its spread | 8-bit less float32 | of the loss | verdict"


def train(trainer: Trainer, entry: Entry, lr: float, seed: int) -> float:
    """Validation loss after a training; infinite if it diverged."""
    task = trainer.task
    size, samples = task.batch_size, STEPS[task.name] * task.batch_size
    trainer.task = entry.task(task, lr, 0, samples)
    try:
        trainer.restart(seed)
        trainer.seed_everything("run", seed)
        order = main_order(len(task.train), trainer.seed, seed)
        for _ in trainer.run(order, 0, samples, size, rate=Rate(total=samples)):
            pass
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
    rows = [[train(trainer, e, lr, 1 + i) for e in (entry, coded)] for i in range(seeds)]
    return lr, np.array(rows)


def table(trainer: Trainer, found: dict[str, tuple[float, np.ndarray]], family: int) -> list[str]:
    task, params = trainer.task, list(trainer.model.parameters())
    coded = sum(p.numel() for p in params if is_coded(p, {"state_dtype": "8bit"}))
    count = sum(p.numel() for p in params)
    head = f"{task.name}, {STEPS[task.name]:,} steps: {coded / count:.1%} of {count:,} are coded"
    lines = ["", f"{head}.", "", f"| {HEAD} |", "| --- " * 6 + "|"]
    judged = compare_pairs([x[:, 1] - x[:, 0] for _, x in found.values()], family=family)
    for (name, (lr, x)), d in zip(found.items(), judged, strict=True):
        mean = x[:, 0].mean()
        lines.append(
            f"| {name} | {lr:.3g} | {mean:.4g}, {x[:, 0].std(ddof=1):.2g} | {d.mean:+.2g} "
            f"({d.confidence:.1%}: {d.low:+.2g} to {d.high:+.2g}) | {d.low / mean:+.2%} to "
            f"{d.high / mean:+.2%} | {d.verdict} |"
        )
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--optimizers", nargs="+", default=["lans", "scaledadam", "lamb"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    context, names, results = DistributedContext(Deadline()), asked.optimizers, {}
    trainers = [
        Trainer(load_task(t), seed=0, dtype="float32", context=context) for t in asked.tasks
    ]
    for name in names:
        for trainer in trainers:
            entry = entries_of(Settings(optimizers=name), trainer.task)[name]
            results[trainer.task.name, name] = pairs(trainer, entry, asked.seeds)
            print(trainer.task.name, name, *map(str, results[trainer.task.name, name]), flush=True)
    today = datetime.date.today().isoformat()
    text = [f"# Training with moments in eight bits, {today}", "", f"{hardware()}."]
    for trainer in trainers:
        found = {name: results[trainer.task.name, name] for name in names}
        text += table(trainer, found, len(names))
    print("\n".join(text))
    if asked.save:
        print(save("eight-bit-training", "\n".join(text) + "\n", today))
