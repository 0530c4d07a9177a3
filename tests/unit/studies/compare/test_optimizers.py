"""The table of optimizers, those of other libraries and of a user's own, and what is refused."""

from dataclasses import replace
from importlib import metadata
from shlex import quote
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.compare import optimizers
from steadygrad.studies.compare.optimizers import entries_of
from steadygrad.studies.compare.schema import Settings, Traits
from steadygrad.studies.compare.trials import plan_for, tried
from steadygrad.studies.record import trusted
from tests.unit.studies.compare import added
from tests.unit.studies.compare.runs import ADDED, ALL, Places
from tests.unit.studies.framework import make_trainer
from tests.unit.studies.tiny_task import make_model, make_task

SCHEDULE_FREE, OWN_RATE = (f"{added.__name__}:{name}" for name in ("ScheduleFree", "OwnRate"))


@pytest.fixture(autouse=True, scope="module")
def installed():
    """As if the module of the two above were a package's."""
    packages = {**metadata.packages_distributions(), "tests": ["torch"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "packages_distributions", lambda: packages)
        yield


def entries(optimizers="lans", add="", task=None):
    return entries_of(Settings(optimizers=optimizers, add=add), task or make_task())


def attempt(name, task=None):
    """The entry of a library's optimizer, or of the function of a user, after its step."""
    task = task or make_task()
    found = entries(name, task=task) if ":" in name else entries("adamw", f"{ADDED}:{name}")
    return replace(found[name], traits=tried(make_trainer(task), name, found[name])[0])


KNOWN = entries(",".join(ALL))


class Tied(nn.Module):
    """An embedding that is the last layer as well, a matrix, a bias and a kernel."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.hidden = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight


def test_muon_has_the_matrices_and_adamw_all_else():
    model = Tied()
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, adamw = KNOWN["muon"].make(model, 0.01).parts
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    held = [{names[p] for p in part.param_groups[0]["params"]} for part in (muon, adamw)]
    assert held == [
        {"hidden.weight"},
        {"tokens.weight", "convolution.weight", "convolution.bias", "hidden.bias"},
    ]
    with pytest.raises(InputError, match="--optimizers"):
        KNOWN["muon"].make(nn.Linear(8, 1), 0.01)


def test_joined_optimizers_step_as_they_do_alone():
    model, twin = make_model(), make_model()
    twin.load_state_dict(model.state_dict())
    joined = KNOWN["muon"].make(model, 0.01)
    (matrix, *others) = list(twin.parameters())
    options = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}
    alone = [
        torch.optim.Muon([matrix], lr=0.01, **options),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1),
    ]
    for step in range(3):
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        # A rate that is set on the groups acts.
        for group in [g for part in (joined, *alone) for g in part.param_groups]:
            group["lr"] = 0.01 / (step + 1)
        for part in (joined, *alone):
            part.step()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)
    assert set(joined.state) == set(model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_frozen_parameters_are_left_out(name):
    model = make_model()
    model[0].weight.requires_grad_(name == "muon")
    optimizer = KNOWN[name].make(model, 0.01)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == {p for p in model.parameters() if p.requires_grad}


def test_all_have_one_schedule():
    task = replace(make_task(), lr_rule="linear", warmup_samples=7, lr_decay="cosine")
    for entry in entries(",".join((*ALL, "task")), task=task).values():
        own = entry.task(task, 0.02, 1000)
        factors = [own.lr_factor(samples, 1000) for samples in (50, 100, 550, 1000)]
        assert factors == pytest.approx([0.5, 1, 0.5, 0])
        assert own.optimizer(make_model(), own.lr).param_groups[0]["lr"] == 0.02


def test_names_and_default_rates():
    assert list(entries("LANS, adamw ,task")) == ["adamw", "lans", "task"]
    # Of the task's optimizer, and of added ones: the task's.
    found = entries("task", f"{ADDED}:adamax, {ADDED}:grouped", make_task(lr=0.25))
    rates = {name: entry.lr for name, entry in found.items()}
    assert rates == {"adamw": 1e-3, "task": 0.25, "adamax": 0.25, "grouped": 0.25}


@pytest.mark.parametrize(
    ("optimizers", "add", "match"),
    [
        ("adamw", "", "Found none"),
        ("lans,lans", "", "--optimizers .*'lans' twice"),
        ("lans", str(ADDED), "--add"),
        ("lans", "nowhere.py:adamax", "--add .*nowhere"),
        ("lans", f"{ADDED}:adamax,{ADDED}:adamax", "--add .*'adamax'"),
    ],
)
def test_optimizers_that_cannot_be_compared(optimizers, add, match):
    with pytest.raises(InputError, match=match):
        entries(optimizers, add)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("raises", "it broke"),
        ("of_others", "no gradient"),
        ("deaf", "0.001 for 0.001 and for"),
        ("freezes", "frozen"),
        ("hooks", "with other hooks"),
        ("no_step", "optimizer no_step .*no step"),
        ("sets_rate", "optimizer of sets_rate .*of its own"),
        ("torch:LBFGS", "closure"),
        ("torch:Muon", "torch:Muon: ValueError"),
        ("not_there_at_all.x:Y", "No module named 'not_there_at_all'"),
    ],
)
def test_optimizers_that_do_not_work_are_found_before_the_study(name, match):
    with pytest.raises(InputError, match=match):
        attempt(name)


@pytest.mark.parametrize(
    ("name", "lr", "traits"),
    [
        ("torch:NAdam", 0.002, {}),
        (SCHEDULE_FREE, 0.05, {"own_schedule": True}),
        (OWN_RATE, 0.05, {"own_rate": True}),
    ],
)
def test_a_step_shows_what_an_optimizer_is(name, lr, traits):
    settings = Settings(optimizers=name, budget=600.0)
    plan = plan_for(settings, make_trainer(), speed=2000.0, workers=1)
    assert plan.traits == {name: Traits(version=metadata.version("torch"), **traits)}
    assert entries(name)[name].lr == lr


def test_a_schedule_of_its_own_is_left_alone_and_evaluated_at_its_own_weights():
    places = Places(optimizers=SCHEDULE_FREE)
    places.entries[SCHEDULE_FREE] = attempt(SCHEDULE_FREE)
    run = places.train(SCHEDULE_FREE, samples=640)
    assert set(places.trainer.optimizer.rates) == {0.05}
    # At weights of zero the loss is the targets' mean square, and training goes on elsewhere.
    targets = places.trainer.task.valid.batch(torch.arange(64))[1]
    assert run.loss == pytest.approx(float(targets.square().mean()))
    assert all(p.any() for p in places.trainer.model.parameters())


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
        ("schedulefree:AdamWScheduleFree", {"own_schedule": True}),
        ("prodigyopt:Prodigy", {"own_rate": True}),
        ("timm:adan", {}),
        pytest.param("heavyball:SFAdamW", {"own_schedule": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_libraries_themselves(name, traits):
    pytest.importorskip(name.partition(":")[0], reason="of the dependency group optimizers")
    places = Places(optimizers=name)
    places.entries[name] = entry = attempt(name)
    assert entry.traits == Traits(version=entry.traits.version, **traits)
    first, run = places.train(name, samples=4), places.train(name, samples=1280)
    assert run.loss < first.loss
    assert places.train(name, samples=1280) == run
