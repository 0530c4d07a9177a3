"""Small runs of ``compare`` with a plan made by hand, and records that are made up."""

import math
import random
from functools import partial
from pathlib import Path

import msgspec

from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.compare import trials
from steadygrad.studies.compare.findings import summarize
from steadygrad.studies.compare.optimizers import entries_of
from steadygrad.studies.compare.plan import make_trials
from steadygrad.studies.compare.schema import Header, Plan, Run, Settings, Speed
from steadygrad.studies.folder import Results
from steadygrad.studies.work import Workplace
from tests.unit.studies import framework
from tests.unit.studies.framework import make_trainer
from tests.unit.studies.results import make_header

ALL = ("adamw", "scaledadam", "lans", "lamb", "sgd", "muon")
PLAN = Plan(
    batch_size=4,
    optimizers=("adamw", "lans", "sgd"),
    multiples=(1,),
    horizons=(32, 64, 128),
    full=True,
    seeds=3,
    samples_per_second=200.0,
    work=1,
    span=1,
)
ADDED = Path(__file__).parent / "added.py"


def planned(**fields):
    """The plan with other fields."""
    return msgspec.structs.replace(PLAN, **fields)


begin = partial(framework.begin, plan=PLAN, study="compare", kind=Settings)


class Places:
    """Trials in this process."""

    def __init__(self, task=None, **settings):
        self.trainer, self.told = make_trainer(task), []
        self.entries = entries_of(Settings(**settings), self.trainer.task)
        self.place = Workplace(
            self.trainer, Checkpoints.__new__(Checkpoints), lambda n, what: self.told.append(n)
        )
        self.place.tools = self.entries

    def train(self, optimizer, *, step=0, repeat=1, samples=128, multiple=1):
        key = optimizer, multiple, samples, step, repeat
        return trials.training(PLAN, self.place, *key)


def header_of(plan):
    return make_header(kind=Header, study="compare", settings=Settings(), plan=plan)


def result_of(plan, job, loss_of):
    """What a trial gives; its loss is a function of optimizer, multiple, samples and so on."""
    if job["kind"] == "speed":
        places = {name: place for place, name in enumerate(plan.optimizers)}
        return Speed(
            state_bytes={name: 8.0 - place for name, place in places.items()},
            time={name: 1.0 + place / 4 for name, place in places.items()},
        )
    fields = {name: value for name, value in job.items() if name != "kind"}
    loss = loss_of(**fields)
    curve = ((fields["samples"], loss),)
    return Run(**fields, lr=1e-3 * 2.0 ** fields["step"], loss=loss, curve=curve)


def record(plan, loss_of, keep=lambda result: True):
    """The results of a study; ``keep`` says which of them are there in the end."""
    found = Results()
    for trial in make_trials(plan, 64):
        if job := trial.job(found):
            found.add(result_of(plan, job, loss_of))
    return Results(filter(keep, found))


def noisy(shifts, spread=0.01, fall=0.2):
    """Losses that fall with the samples; ``shifts`` of an optimizer by horizon."""

    def loss_of(optimizer, multiple, samples, step, repeat):
        own = shifts.get(optimizer, {}).get(samples, 0.0)
        noise = random.Random(f"{optimizer}{samples}{repeat}{multiple}").gauss(0, spread)
        common = random.Random(f"{repeat}").gauss(0, 0.1)
        return 2 - fall * math.log2(samples) + own + noise + common + 0.05 * step**2

    return loss_of


def by(**shifts):
    """Losses of optimizers that differ from AdamW by so much at both lengths."""
    return noisy({name: {64: shift, 128: shift} for name, shift in shifts.items()})


def summary(plan, loss_of, status="complete", **options):
    """The summary of such a study."""
    return summarize(header_of(plan), record(plan, loss_of, **options), status)
