"""Small runs of ``compare`` with a plan made by hand, and records that are made up."""

import math
import random
from pathlib import Path

import msgspec
import pytest

from steadygrad.studies.compare import trials
from steadygrad.studies.compare.findings import summarize
from steadygrad.studies.compare.optimizers import entries_of
from steadygrad.studies.compare.schema import Arm, Header, Plan, Settings
from steadygrad.studies.distributed import Deadline
from steadygrad.studies.folder import Results
from steadygrad.studies.run import start
from steadygrad.studies.schema import Training
from steadygrad.studies.work import Workplace, trials_of
from tests.unit.studies.framework import Watcher, checked, make_trainer, speed_in_a_moment, tiny
from tests.unit.studies.results import make_header

ALL = ("adamw", "scaledadam", "lans", "lamb", "sgd", "muon")
PLAN = Plan(arms=(), samples=128, seeds=16, work=1)
ADDED = Path(__file__).parent / "added.py"


def planned(names=("adamw", "lans", "sgd"), sizes=(4,), **fields):
    """A plan for these optimizers at these batch sizes."""
    arms = tuple(Arm(name, size) for size in sizes for name in names)
    return msgspec.structs.replace(PLAN, arms=arms, **fields)


def begin(folder, factory="make_task", *, plan, at, **settings):
    """A run with a hand-made plan, but for its traits; ``at``: see the framework's."""
    deadline = Deadline()
    watcher = Watcher(at, lambda: deadline.limit(-1e9))
    chosen = {"device": "cpu", "threads": 1, "workers": 1, "budget": 1e6, **settings}
    with pytest.MonkeyPatch.context() as patch, speed_in_a_moment():
        patch.setattr(trials, "make_plan", lambda *a, **k: plan)
        settings = Settings(task=tiny(factory), **chosen)
        outcome = start("compare", settings, folder, deadline=deadline, monitor=watcher)
    return checked(outcome), watcher


class Places:
    """Trials in this process: arms are the optimizers at batch size 4, then at 16."""

    def __init__(self, task=None, **settings):
        self.trainer, self.told = make_trainer(task), []
        self.entries = entries_of(Settings(**settings), self.trainer.task)
        self.place = Workplace(self.trainer, self.told.append)
        self.place.tools = self.entries
        self.plan = planned([*self.entries], (4, 16))

    def train(self, optimizer, *, step=0, seed=1, samples=128, size=4):
        arm = self.plan.arms.index(Arm(optimizer, size))
        return trials.training(self.plan, self.place, arm, samples, step, seed)


def header_of(plan):
    return make_header(kind=Header, study="compare", settings=Settings(), plan=plan)


def result_of(plan, trial, loss_of):
    """What a trial gives; its loss is a function of optimizer, size, samples, step and seed."""
    _, arm, samples, step, seed = trial.key
    own = plan.arms[arm]
    loss = loss_of(
        optimizer=own.optimizer, size=own.batch_size, samples=samples, step=step, seed=seed
    )
    lr, key = 1e-3 * 2.0**step, {"arm": arm, "samples": samples, "step": step, "seed": seed}
    # One seed waited for another program.
    seconds = 60.0 if seed == 1 else 1 + arm / 4
    return Training(**key, lr=lr, loss=loss, time={"seconds": seconds})


def record(plan, loss_of, workers=1, most=None, generator=None):
    """The results of a study whose trials end in any order; ``most``: so many at most."""
    found, running, header = Results(), [], header_of(plan)
    while len(found) != most and (wanted := trials_of(header, found)):
        keys = {trial.key for trial in running}
        fresh = [trial for trial in wanted if trial.key not in keys]
        running += fresh[: workers - len(running)]
        place = generator.randrange(len(running)) if generator else 0
        found.add(result_of(plan, running.pop(place), loss_of))
    return found


def noisy(spread=0.01, fall=0.2, **shifts):
    """Losses that fall with the samples; ``shifts`` of optimizers from AdamW's."""

    def loss_of(optimizer, size, samples, step, seed):
        noise = random.Random(f"{optimizer}{samples}{seed}{size}{step}").gauss(0, spread)
        common = random.Random(f"{seed}").gauss(0, 0.1)
        own = shifts.get(optimizer, 0.0) + 0.05 * step**2
        return 2 - fall * math.log2(samples) + own + noise + common

    return loss_of


def summary(plan, loss_of, status="complete", **options):
    """The summary of such a study."""
    return summarize(header_of(plan), record(plan, loss_of, **options), status)
