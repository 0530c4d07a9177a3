"""Optimizers of other libraries: what a step of them shows, and how each kind is trained."""

import math
from importlib import metadata
from shlex import quote
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.compare import libraries, words
from steadygrad.studies.compare.optimizers import Joined, entries_of, switch
from steadygrad.studies.compare.schema import Edge, Run, Settings, Traits
from steadygrad.studies.compare.trials import plan_for, tried
from steadygrad.studies.files import trusted
from steadygrad.studies.folder import read_run
from steadygrad.studies.page import render
from tests.unit.report.conftest import no_charts  # noqa: F401
from tests.unit.studies.compare import library
from tests.unit.studies.compare.runs import Places, begin, planned
from tests.unit.studies.framework import make_trainer
from tests.unit.studies.tiny_task import make_task

HERE = library.__name__


@pytest.fixture(autouse=True, scope="module")
def installed():
    """As if the module were a package's."""
    packages = {**metadata.packages_distributions(), "tests": ["tests"]}

    def release(name):
        return "" if name == "tests" else metadata.version(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "packages_distributions", lambda: packages)
        patch.setattr(libraries, "version", release)
        yield


def named(*names):
    return ",".join(f"{HERE}:{name}" for name in names)


def attempt(name, task=None):
    """The entry of a library's optimizer after its step."""
    task = task or make_task()
    entry = entries_of(Settings(optimizers=name), task)[name]
    return tried(make_trainer(task), name, entry)


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("Plain", {}),
        ("Consuming", {}),
        ("Rateless", {}),
        ("ScheduleFree", {"own_schedule": True}),
        ("OwnRate", {"own_rate": True}),
        ("Matrices", {"matrices": True}),
        ("MatricesInSteps", {"matrices": True}),
    ],
)
def test_a_step_shows_what_an_optimizer_is(name, traits):
    entry = attempt(named(name))
    assert entry.traits == Traits(**traits)
    # Without a default rate the task's.
    lr = {"OwnRate": 1.0, "Matrices": 0.02, "Rateless": 0.001}.get(name, 0.05)
    assert entry.lr == lr


@pytest.mark.parametrize(
    ("kind", "traits"), [(library.Plain, {}), (library.ScheduleFree, {"own_schedule": True})]
)
def test_a_step_shows_what_the_tasks_own_optimizer_is(kind, traits):
    def make_optimizer(parameters, lr):
        optimizer = kind(parameters, lr=lr)
        switch(optimizer, "train")
        return optimizer

    trainer = make_trainer(make_task(make_optimizer=make_optimizer))
    settings = Settings(optimizers="task", budget=600.0)
    plan = plan_for(settings, trainer, speed=2000.0, workers=1)
    assert plan.traits == {"task": Traits(**traits)}


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (named("Closure"), "closure"),
        (named("Wrapper"), "base_optimizer"),
        ("torch:Muons", "'torch:Muons': TypeError"),
        ("not_there_at_all.x:Y", "No module named 'not_there_at_all'"),
        (":Plain", "Found ':Plain'"),
        # Not because it were one for matrices.
        (named("Ignoring"), "Found 0.1 for 0.1 and for 0.2"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(name, match):
    with pytest.raises(InputError, match=match):
        attempt(name)


def test_a_module_of_no_package_is_refused(monkeypatch):
    """Nothing would tell a resumed run that it has changed."""
    monkeypatch.setattr(libraries, "packages_distributions", dict)
    with pytest.raises(InputError, match="library:Plain"):
        attempt(named("Plain"))


def test_a_schedule_of_its_own_is_left_alone_and_evaluated_at_its_own_weights():
    name = named("ScheduleFree")
    places = Places(optimizers=name)
    places.entries[name] = attempt(name)
    run = places.train(name, samples=640)
    assert set(places.trainer.optimizer.rates) == {0.05}
    # At weights of zero the loss is the targets' mean square, and training goes on elsewhere.
    targets = places.trainer.task.valid.batch(torch.arange(64))[1]
    assert [loss for _, loss in run.curve] == pytest.approx([float(targets.square().mean())] * 4)
    assert places.trainer.optimizer.param_groups[0]["train_mode"]
    assert all(p.any() for p in places.trainer.model.parameters())


def test_gradients_that_are_consumed_change_nothing():
    names = named("Plain"), named("Consuming")
    places = Places(optimizers=",".join(names))
    plain, consuming = (places.train(name) for name in names)
    assert consuming.curve == plain.curve


def test_adamw_has_what_is_no_matrix_at_a_rate_that_follows():
    entry, model = attempt("torch:Muon"), make_trainer().model
    optimizer = entry.ready(model, 4 * entry.lr)
    assert isinstance(optimizer, Joined)
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(16, 8)]
    assert [part.param_groups[0]["lr"] for part in (muon, adamw)] == [4 * entry.lr, 4e-3]
    # Nothing to take.
    with pytest.raises(InputError, match="torch:Muon: ValueError"):
        attempt("torch:Muon", make_task(make_model=lambda: nn.Linear(8, 1)))


def test_a_study_with_one_of_each_kind(tmp_path, no_charts):  # noqa: F811
    names = [named(name) for name in ("ScheduleFree", "OwnRate", "Matrices")]
    traits = {name: attempt(name).traits for name in names}
    plan = planned(optimizers=("adamw", *names), traits=traits, seeds=2)
    outcome, watcher = begin(tmp_path / "run", at=-1, plan=plan, optimizers=",".join(names))
    assert watcher.done == watcher.total
    assert all(math.isfinite(row.loss) for row in outcome.summary.verdicts)
    # One that sets its own rate has no ladder.
    edges = [found for found in outcome.summary.findings if isinstance(found, Edge)]
    assert names[1] not in [edge.optimizer for edge in edges]
    for row in outcome.summary.tuned:
        own, counts = row.optimizer == names[1], [len(losses) for losses in row.tried.values()]
        assert (row.plateau is None) == (row.interior is None) == own
        assert counts == [1, 1, 1] if own else min(counts) >= 3
    run = read_run(tmp_path / "run")
    assert {(r.step, r.lr) for r in run.select(Run) if r.optimizer == names[1]} == {(0, 1.0)}
    page = render(run)
    for name, note in zip(names, words.NOTES.values(), strict=True):
        title = name + " with AdamW" * ("Matrices" in name)
        assert f"<b>{title}.</b> {note}</li>" in page


@pytest.mark.parametrize(
    ("optimizers", "module"),
    [
        ("lans,timm:adan, torch:NAdam", ""),
        ("lans, evil.x:Y", "evil.x:Y"),
        ("torch.x:Y", "torch.x:Y"),
    ],
)
def test_a_module_that_only_a_stranger_names_is_not_imported(tmp_path, optimizers, module):
    settings = Settings(task="char-lm", optimizers=optimizers)
    header = SimpleNamespace(settings=settings, study="compare", time={})
    run = SimpleNamespace(folder=tmp_path, header=header)
    (tmp_path / "header.json").touch()
    if module:
        with pytest.raises(InputError, match=module) as error:
            trusted(run, {})
        command = f"steadygrad compare char-lm --optimizers {quote(optimizers)} --resume {tmp_path}"
        assert str(error.value).endswith(command)
    assert trusted(run, {"optimizers": optimizers} if module else {}) == {}


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("pytorch_optimizer:SOAP", {}),
        ("pytorch_optimizer:Prodigy", {"own_rate": True}),
        ("schedulefree:AdamWScheduleFree", {"own_schedule": True}),
        ("prodigyopt:Prodigy", {"own_rate": True}),
        ("timm:adan", {}),
        ("timm:sgd", {}),
        ("torch:Muon", {"matrices": True}),
        pytest.param("heavyball:SFAdamW", {"own_schedule": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_libraries_themselves(name, traits):
    pytest.importorskip(name.partition(":")[0], reason="group optimizers")
    places = Places(optimizers=name)
    places.entries[name] = entry = attempt(name)
    assert entry.traits == Traits(version=entry.traits.version, **traits)
    assert entry.traits.version
    first, run = places.train(name, samples=4), places.train(name, samples=1280)
    assert run.loss < first.loss
    assert places.train(name, samples=1280) == run
