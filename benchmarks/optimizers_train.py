"""Whether ScaledAdam and LANS train: the language model's validation loss after the same steps.

Every optimizer sees the same weights, the same batches in the same order and the same schedule:
a linear warm-up, then a linear decay to zero. A learning rate is found by doubling and halving it
until the loss is worse on either side, on a seed of its own; the table's seeds are others.

Run: python benchmarks/optimizers_train.py [--steps 800] [--long-steps 6000] [--seeds 3] [--save]
"""

import argparse
import datetime
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean
from textwrap import fill

import torch
from side_by_side import hardware, save
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from steadygrad.formulas.schedules import warmup_hold_decay
from steadygrad.optim import LANS, ScaledAdam
from steadygrad.tasks import Task, load_task

WARMUP = 0.1
SWEEP_SEED = 0
MOST_RATES = 9

Make = Callable[[Iterable[Tensor], float], Optimizer]


@dataclass
class Contender:
    """An optimizer and what came out.

    Attributes:
        make: Makes it from parameters and a learning rate.
        default: What a user gets who says nothing, or a common choice; the search begins there.
        has_default: Whether it is the former, and so is in the table in any case.
        searched: Whether there is a search.
        sweep: Loss by learning rate, on the seed of the sweep.
        losses: Losses of the table's seeds by learning rate.
    """

    make: Make
    default: float
    has_default: bool = True
    searched: bool = True
    sweep: dict[float, float] = field(default_factory=dict)
    losses: dict[float, list[float]] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The learning rate with the lowest loss in the sweep."""
        if not self.searched:
            return self.default
        return min(self.sweep, key=self.sweep.__getitem__)


def contenders(task: Task) -> dict[str, Contender]:
    """All of them."""
    return {
        "SGD": Contender(lambda p, lr: SGD(p, lr=lr), 1e-3, searched=False),
        "SGD, momentum 0.9": Contender(lambda p, lr: SGD(p, lr=lr, momentum=0.9), 0.1, False),
        "AdamW": Contender(task.make_optimizer, task.lr),
        "ScaledAdam": Contender(lambda p, lr: ScaledAdam(p, lr=lr), 3e-2),
        "LANS": Contender(lambda p, lr: LANS(p, lr=lr), 1e-3),
    }


class Training:
    """Training runs of one task that differ in optimizer, learning rate and seed only."""

    def __init__(self, task: Task, steps: int, batch: int) -> None:
        self.task, self.steps, self.batch = task, steps, batch

    def loss(self, make: Make, lr: float, seed: int) -> float:
        """Validation loss at the end; infinite if training diverged."""
        torch.manual_seed(seed)
        model = self.task.make_model()
        optimizer = make(model.parameters(), lr)
        schedule = LambdaLR(optimizer, self.factor)
        order = torch.Generator().manual_seed(seed)
        for _ in range(self.steps):
            chosen = torch.randint(len(self.task.train), (self.batch,), generator=order)
            loss = self.task.per_sample_loss(model, self.task.train.batch(chosen)).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return self._validation(model)

    def factor(self, step: int) -> float:
        """The schedule: no step of the run is at a learning rate of zero."""
        total = self.steps + 1
        return warmup_hold_decay(step + 1, total=total, warmup=WARMUP * total, hold=0)

    @torch.no_grad()
    def _validation(self, model: nn.Module) -> float:
        model.eval()
        everything = torch.arange(len(self.task.valid))
        loss = self.task.per_sample_loss(model, self.task.valid.batch(everything)).mean().item()
        return loss if math.isfinite(loss) else math.inf


def search(training: Training, name: str, one: Contender) -> None:
    """Fills in ``sweep``: by factors of two, until both sides are worse or enough is tried."""
    if not one.searched:
        return
    one.sweep[one.default] = _say(training, name, one, one.default, SWEEP_SEED)
    for factor in (2.0, 0.5):
        while len(one.sweep) < MOST_RATES:
            lr = one.best * factor
            if lr in one.sweep:
                break
            one.sweep[lr] = _say(training, name, one, lr, SWEEP_SEED)
            if one.best != lr:
                break


def repeat(training: Training, name: str, one: Contender, seeds: int) -> None:
    """Fills in ``losses``, at the best rate and at the default one."""
    for lr in dict.fromkeys([one.best] + [one.default] * one.has_default):
        one.losses[lr] = [
            _say(training, name, one, lr, seed)
            for seed in range(SWEEP_SEED + 1, SWEEP_SEED + 1 + seeds)
        ]


def _say(training: Training, name: str, one: Contender, lr: float, seed: int) -> float:
    loss = training.loss(one.make, lr, seed)
    print(f"{name:<18} lr {lr:<9.4g} seed {seed}: {loss:.4f}", flush=True)
    return loss


def losses_table(found: dict[str, Contender]) -> str:
    """Mean and spread over seeds, and the difference from AdamW at its best rate."""
    adamw = found["AdamW"].losses[found["AdamW"].best]
    lines = [
        "| optimizer | learning rate | mean loss | least to greatest | minus AdamW's, by seed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, one in found.items():
        for lr, losses in sorted(one.losses.items()):
            apart = " ".join(f"{a - b:+.3f}" for a, b in zip(losses, adamw, strict=True))
            lines.append(
                f"| {name} | {lr:.4g} ({_kind(one, lr)}) | {mean(losses):.3f} "
                f"| {min(losses):.3f} to {max(losses):.3f} | {apart} |"
            )
    return "\n".join(lines)


def _kind(one: Contender, lr: float) -> str:
    default, best = one.has_default and lr == one.default, one.searched and lr == one.best
    return " and ".join(["default"] * default + ["best"] * best)


def sweep_table(found: dict[str, Contender]) -> str:
    """Every learning rate tried."""
    lines = ["| optimizer | learning rate: loss, on the search's seed |", "| --- | --- |"]
    for name, one in ((name, one) for name, one in found.items() if one.searched):
        tried = ", ".join(f"{lr:.4g}: {loss:.3f}" for lr, loss in sorted(one.sweep.items()))
        lines.append(f"| {name} | {tried} |")
    return "\n".join(lines)


def verdicts(found: dict[str, Contender]) -> str:
    """In words, what was asked and what came out."""
    lines = []
    for name in ("ScaledAdam", "LANS"):
        one = found[name]
        for at, lr, other in (
            ("its default rate", one.default, "SGD"),
            ("its default rate", one.default, "SGD, momentum 0.9"),
            ("its best rate", one.best, "AdamW"),
        ):
            against = found[other].losses[found[other].best]
            gaps = [a - b for a, b in zip(one.losses[lr], against, strict=True)]
            which = "best" if found[other].searched else "default"
            yes, way = ("yes", "lower") if mean(gaps) < 0 else ("**no**", "higher")
            lines.append(
                f"- {name} at {at} lower than {other} at its {which} one: {yes}. "
                f"{abs(mean(gaps)):.3f} {way} in the mean, lower in "
                f"{sum(gap < 0 for gap in gaps)} of {len(gaps)} seeds."
            )
    return "\n".join(lines)


def longer(training: Training, found: dict[str, Contender]) -> str:
    """The same rates in a longer run, on one seed: what was tuned is not tuned for it."""
    seed, lines = SWEEP_SEED + 1, ["| optimizer | learning rate | loss |", "| --- | --- | --- |"]
    for name, one in found.items():
        rates = [one.best] + [one.default] * (name == "LANS")
        for lr in rates if one.searched else []:
            loss = _say(training, name, one, lr, seed)
            lines.append(f"| {name} | {lr:.4g} | {loss:.3f} |")
    return "\n".join(lines)


def reach(training: Training, long: Training, one: Contender) -> str:
    """What the learning rate of LANS has to do with the length of a run."""
    total, longer = (
        sum(some.factor(step) for step in range(some.steps)) for some in (training, long)
    )
    return (
        "The learning rate of LANS is the length of a step relative to the weight's norm. At its "
        f"default of {one.default:.4g}, which is MXNet's, the steps of this run add up to "
        f"{one.default * total:.2g} times the norm at most, and a tensor that begins at zero grows "
        f"by a factor of {math.exp(one.default * total):.2g} at most after its first step; at "
        f"{one.best:.4g} they add up to {one.best * total:.2g} times. In {long.steps} steps the "
        f"default's add up to {one.default * longer:.2g} times. Runs of that length on the table's "
        "first seed, with the rates found above, which are not tuned for it:"
    )


def report(training: Training, long: Training, found: dict[str, Contender], date: str) -> str:
    """The whole text; trains the longer runs."""
    task = training.task
    setting = (
        f"Validation loss in nats a character after {training.steps} steps on batches of "
        f"{training.batch} {task.sample}s. {task.provenance['corpus']}, SHA-256 "
        f"{task.provenance['sha256'][:12]}. Weights, batches, their order and the schedule (linear "
        f"warm-up over {WARMUP:.0%} of the steps, then linear decay to zero) are the same for all. "
        "The best rate is the one of a search by factors of two on a seed that is not in the "
        "table. AdamW's default is the rate that the task is tuned for, SGD's is torch's."
    )
    parts = [
        f"# ScaledAdam and LANS train: {task.name}, {date}",
        f"{hardware()}.",
        fill(setting, 100),
        losses_table(found),
        verdicts(found),
        fill(reach(training, long, found["LANS"]), 100),
        longer(long, found),
        "Every learning rate of the search:",
        sweep_table(found),
    ]
    return "\n\n".join(parts) + "\n"


def run(training: Training, seeds: int) -> dict[str, Contender]:
    """Searches and repeats."""
    found = contenders(training.task)
    for name, one in found.items():
        search(training, name, one)
    for name, one in found.items():
        repeat(training, name, one, seeds)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="char-lm")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--long-steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    today = datetime.date.today().isoformat()
    task = load_task(options.task)
    training = Training(task, options.steps, options.batch)
    long = Training(task, options.long_steps, options.batch)
    text = report(training, long, run(training, options.seeds), today)
    print(text)
    if options.save:
        print(save(f"optimizers-train-{options.task}", text, today))
