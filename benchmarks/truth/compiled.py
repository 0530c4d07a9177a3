"""``advise`` on a world, trained by compiled loops in the place of torch's.

The plan, the trials, their order, the statistics and the words are the study's own; only the
training steps are others, and these are compared with torch's by a test.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from benchmarks.truth.worlds import BETAS, EPS, World
from numba import njit

from steadygrad.noise.schedule import learning_rate
from steadygrad.studies.advise.plan import FEWEST_STEPS, sizes_of
from steadygrad.studies.advise.schema import Header, Plan, Settings
from steadygrad.studies.advise.trials import TRIALS
from steadygrad.studies.course import Order
from steadygrad.studies.folder import SCHEMA, Results
from steadygrad.studies.schema import Runtime, TaskInfo, seed_for
from steadygrad.studies.trainer import Rate
from steadygrad.studies.work import Workplace, trials_of

__all__ = ["CompiledTrainer", "header_of", "plan_of", "run_study"]


@njit(cache=True)
def _step(weights, first, second, done, rows, h, multiplicative, adam, lr, betas, eps):
    """One step on a batch of rows, in place."""
    count, size = rows.shape[0], len(weights)
    gradient = np.zeros(size)
    for i in range(count):
        factor = 1.0
        if multiplicative:
            factor = rows[i, size]
            for j in range(size):
                factor += rows[i, j] * weights[j]
        for j in range(size):
            gradient[j] += factor * rows[i, j]
    for j in range(size):
        gradient[j] = gradient[j] / count + (0.0 if multiplicative else h[j] * weights[j])
    if not adam:
        for j in range(size):
            weights[j] -= lr * gradient[j]
        return
    rate, root = lr / (1 - betas[0] ** (done + 1)), np.sqrt(1 - betas[1] ** (done + 1))
    for j in range(size):
        first[j] = betas[0] * first[j] + (1 - betas[0]) * gradient[j]
        second[j] = betas[1] * second[j] + (1 - betas[1]) * gradient[j] ** 2
        weights[j] -= rate * first[j] / (np.sqrt(second[j]) / root + eps)


class CompiledTrainer:
    """Stands in for ``Trainer`` where ``advise`` trains a world.

    Args:
        world: The world.
        seed: The study's seed, and that of the data.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self._table, self._curvatures = self.make_table(), world.curvatures
        self._kinds = world.kind == "regression", world.optimizer == "adam"
        self.task = SimpleNamespace(
            batch_size=world.batch_size,
            train=range(len(self._table)),
            valid=range(1),
            lr=world.lr,
            lr_rule=world.rule,
            lr_decay="none",
        )
        self.optimizer = None
        self.context = SimpleNamespace(gather=lambda value: [value], on_main=lambda work: work())
        self.restart()

    def make_table(self) -> np.ndarray:
        """The data that trainings draw from."""
        return self.world.task(self.seed).train.batch(slice(None)).double().numpy()

    def rows(self, order: Order, start: int, count: int) -> np.ndarray:
        """The samples that are next."""
        return self._table[order.take(start, count).numpy()]

    def restart(self, repeat: int = 0) -> None:
        torch.manual_seed(seed_for(self.seed, "init", repeat))
        self.weights = self.world.task_model().weight.detach().double().numpy()
        self.first, self.second = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.steps = 0

    def seed_everything(self, *names: object) -> None:
        pass

    def run(self, order: Order, start: int, stop: int, batch_size: int, *, rate=None, seen=None):
        rate, world = rate or Rate(), self.world
        count, offset = (stop - start) // batch_size, (start if seen is None else seen) - start
        table = self.rows(order, start, count * batch_size)
        top = rate.factor * learning_rate(
            1.0, rate.batch_size or world.batch_size, world.batch_size, world.rule
        )
        for number in range(count):
            reached = start + number * batch_size
            middle, factor = reached + offset + batch_size / 2, top
            if middle < rate.warmup_samples:
                factor = rate.start + (top - rate.start) * middle / rate.warmup_samples
            factor *= self.course(middle, rate)
            self.step(table[number * batch_size : (number + 1) * batch_size], world.lr * factor)
            self.steps += 1
            yield reached + batch_size

    def course(self, seen: float, rate: Rate) -> float:
        """The part of the peak rate after so many samples."""
        return 1.0

    def step(self, rows: np.ndarray, lr: float) -> None:
        """One step on a batch."""
        state = self.weights, self.first, self.second, self.steps
        _step(*state, rows, self._curvatures, *self._kinds, lr, BETAS, EPS)

    def evaluate(self) -> float:
        with np.errstate(all="ignore"):
            loss = float(self.world.loss(self.weights))
        return loss if loss < 1e30 else float("inf")


def plan_of(world: World, samples: int, seeds: int) -> Plan:
    """A plan over so many samples."""
    arms = sizes_of(world.batch_size, samples // FEWEST_STEPS, 1)
    return Plan(arms=arms, samples=samples, seeds=seeds, work=1)


def header_of(world: World, seed: int, plan: Plan) -> Header:
    """The header that the study would write."""
    return Header(
        schema=SCHEMA,
        study="advise",
        task=TaskInfo(
            spec=world.name,
            name=world.name,
            sample="sample",
            batch_size=world.batch_size,
            lr=world.lr,
            lr_rule=world.rule,
            parameters=world.size,
            train_size=4 * world.horizon,
            valid_size=1,
            dependent=True,  # which leaves the noise scale out
        ),
        runtime=Runtime(
            device="cpu",
            dtype="float64",
            world_size=1,
            sharding="none",
            threads=1,
            micro_batch_size=1 << 20,
            workers=1,
        ),
        environment={},
        settings=Settings(task=world.name, seed=seed, samples=plan.samples),
        plan=plan,
    )


def run_study(header: Header, trainer: Any, work: float) -> Results:
    """The results of trials that have trained on ``work`` samples.

    All trials of a look run before the next is planned.
    """
    found = Results()
    place = Workplace(trainer, lambda samples: None, header)
    while work > 0 and (trials := trials_of(header, found)):
        for trial in trials:
            if work > 0:
                kind, *values = trial.key
                work -= trial.cost
                found.add(TRIALS[kind](header.plan, place, *values))
    return found
