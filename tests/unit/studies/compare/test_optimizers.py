"""The table of optimizers, the pair of Muon and AdamW, and optimizers of a user's own."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.compare.optimizers import entries_of
from steadygrad.studies.compare.schema import Settings, knobs_at
from steadygrad.studies.compare.trials import slowdown, tried
from tests.unit.studies.compare.runs import ADDED, ALL
from tests.unit.studies.framework import make_trainer
from tests.unit.studies.tiny_task import make_model, make_task


def entries(optimizers="lans", add="", task=None):
    return entries_of(Settings(optimizers=optimizers, add=add), task or make_task())


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
    joined.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_knobs_reach_the_optimizer_and_stay_within_their_bounds(name):
    entry = KNOWN[name]
    assert knobs_at(entry.knobs, 0) == {}
    found = [knobs_at(entry.knobs, point) for point in range(1, 65)]
    assert len({tuple(knobs.values()) for knobs in found}) == 64
    places = []
    for knob, (low, high) in entry.knobs.items():
        values = [knobs[knob] for knobs in found]
        assert low <= min(values) < max(values) <= high
        # On a logarithmic scale, from 1 where it may be near: a quarter of them in each quarter.
        scale = [math.log(1 - value) if high > 0.5 else math.log(value) for value in values]
        ends = sorted(math.log(1 - e) if high > 0.5 else math.log(e) for e in (low, high))
        parts = [int(4 * (place - ends[0]) / (ends[1] - ends[0])) for place in scale]
        assert all(14 <= parts.count(part) <= 18 for part in range(4))
        places.append(parts)
    # And in each of the squares of both: they do not lie on a line.
    assert len({*zip(*places, strict=True)}) == 16
    model = make_model()
    model[0].weight.requires_grad_(name == "muon")
    optimizer = entry.make(model, 0.01, **found[0])
    group = optimizer.param_groups[0]
    shown = {**group, "beta2": group.get("betas", (0, 0))[1]}
    assert {knob: shown[knob] for knob in found[0]} == found[0]
    # Frozen parameters are left out.
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == {p for p in model.parameters() if p.requires_grad}


def test_all_have_one_schedule():
    task = replace(make_task(), lr_rule="linear", warmup_samples=7, lr_decay="cosine")
    for entry in entries(",".join((*ALL, "task")), task=task).values():
        own = entry.task(task, 0.02, 0, 1000)
        factors = [own.lr_factor(samples, 1000) for samples in (50, 100, 550, 1000)]
        assert factors == pytest.approx([0.5, 1, 0.5, 0])
        assert own.optimizer(make_model(), own.lr).param_groups[0]["lr"] == 0.02


def test_names():
    assert list(entries("LANS, adamw ,task")) == ["adamw", "lans", "task"]
    both = entries("adamw", f"{ADDED}:adamax, {ADDED}:grouped")
    assert list(both) == ["adamw", "adamax", "grouped"]
    # A rate of its own for the task's optimizer and for added ones: the task's.
    found = entries("task", f"{ADDED}:adamax", make_task(lr=0.25))
    assert [entry.lr for entry in found.values()] == [1e-3, 0.25, 0.25]


@pytest.mark.parametrize(
    ("optimizers", "add", "match"),
    [
        ("adamw", "", "Found none"),
        ("adam", "", "--optimizers .*'adam'"),
        ("lans,lans", "", "--optimizers .*'lans' twice"),
        ("lans,,sgd", "", "--optimizers .*''"),
        ("lans", str(ADDED), "--add"),
        ("lans", "nowhere.py:adamax", "--add .*no such file"),
        ("lans", f"{ADDED}:not_a_function", "not_a_function"),
        ("lans", f"{ADDED}:adamax,{ADDED}:adamax", "--add .*'adamax'"),
        ("lans", f"{ADDED}:adamw", "--add .*'adamw'"),
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
        ("casts", "parameters with"),
        ("freezes", "frozen"),
        ("hooks", "with other hooks"),
        ("no_step", "optimizer no_step .*no step"),
    ],
)
def test_added_optimizers_that_do_not_work_are_found_before_the_study(name, match):
    with pytest.raises(InputError, match=match):
        tried(make_trainer(), name, entries("adamw", f"{ADDED}:{name}")[name])


@pytest.mark.parametrize(
    ("own", "slower"),
    # Of AdamW, SGD and an added one: 3 in the mean, rounded to a quarter power of two. A plan is
    # not made longer for those that are faster.
    [(1.0, 2 ** (6 / 4)), (9.0, 1.0)],
)
def test_the_mean_time_of_a_step_slows_the_plan_down(monkeypatch, own, slower):
    clock, trainer = {"now": 0.0}, make_trainer()

    def stepping(model, lr, seconds):
        """Backward takes no time here, and a step so many seconds."""

        class Stepping(torch.optim.SGD):
            def step(self, closure=None):
                clock["now"] += seconds

        return Stepping(model.parameters(), lr=lr)

    timed = {
        name: replace(entry, make=partial(stepping, seconds=seconds))
        for (name, entry), seconds in zip(
            entries("sgd", f"{ADDED}:grouped").items(), (1.0, 2.0, 6.0), strict=True
        )
    }
    trainer.optimizer = stepping(trainer.model, 0.1, own)
    monkeypatch.setattr("steadygrad.studies.compare.trials._clock", lambda trainer: clock["now"])
    assert slowdown(trainer, timed) == slower
