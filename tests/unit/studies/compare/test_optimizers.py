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

KNOWN = entries_of(Settings(optimizers=",".join(ALL)), make_task())


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


def filled(model, seed=0):
    """The model with gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def names_of(model, params):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in params}


def test_muon_has_the_matrices_and_adamw_all_else():
    model = Tied()
    muon, adamw = KNOWN["muon"].make(model, 0.01).parts
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    held = [names_of(model, part.param_groups[0]["params"]) for part in (muon, adamw)]
    assert held == [
        {"hidden.weight"},
        {"tokens.weight", "convolution.weight", "convolution.bias", "hidden.bias"},
    ]


def test_joined_optimizers_step_as_they_do_alone():
    torch.manual_seed(0)
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
        filled(model, step)
        filled(twin, step)
        # A rate that is set on the groups acts.
        for group in [g for part in (joined, *alone) for g in part.param_groups]:
            group["lr"] = 0.01 / (step + 1)
        joined.step()
        for part in alone:
            part.step()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)
    assert set(joined.state) == set(model.parameters())
    joined.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_muon_without_a_matrix_says_so():
    with pytest.raises(InputError, match=r"Muon and its like need a matrix .* Found none"):
        KNOWN["muon"].make(nn.Linear(8, 1), 0.01)


@pytest.mark.parametrize("name", ALL)
def test_frozen_parameters_are_left_out(name):
    model = make_model()
    first = next(iter(model.parameters())).requires_grad_(False)
    before = first.clone()
    torch.nn.init.normal_(model[3].weight)
    if name == "muon":
        model.insert(2, nn.Linear(16, 16))
    optimizer = KNOWN[name].make(filled(model), 0.01)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(list(model.parameters())) - 1
    optimizer.step()
    assert torch.equal(first, before)


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
    group = entry.make(make_model(), 0.01, **found[0]).param_groups[0]
    shown = {**group, "beta2": group.get("betas", (0, 0))[1]}
    assert {knob: shown[knob] for knob in found[0]} == found[0]


def test_all_have_one_schedule():
    task = replace(make_task(), lr_rule="linear", warmup_samples=7, lr_decay="cosine")
    for entry in entries_of(Settings(optimizers=",".join((*ALL, "task"))), task).values():
        own = entry.task(task, 0.02, 0, 1000)
        assert own.lr_factor(50, 1000) == pytest.approx(0.5)
        assert own.lr_factor(100, 1000) == 1
        assert own.lr_factor(550, 1000) == pytest.approx(0.5)
        assert own.lr_factor(1000, 1000) == 0
        model = make_model()
        assert own.optimizer(model, own.lr).param_groups[0]["lr"] == 0.02


def entries(optimizers="lans", add="", task=None):
    return entries_of(Settings(optimizers=optimizers, add=add), task or make_task())


def test_names():
    assert list(entries("LANS, adamw ,task")) == ["adamw", "lans", "task"]
    assert list(entries("adamw", f"{ADDED}:adamax, {ADDED}:grouped")) == [
        "adamw", "adamax", "grouped",
    ]  # fmt: skip
    # A rate of its own for the task's optimizer and for added ones: the task's.
    found = entries("task", f"{ADDED}:adamax", make_task(lr=0.25))
    assert [entry.lr for entry in found.values()] == [1e-3, 0.25, 0.25]


@pytest.mark.parametrize(
    ("optimizers", "add", "message"),
    {
        "alone": ("adamw", "", "Expected an optimizer to compare with AdamW. Found none."),
        "unknown": ("adam", "", "--optimizers should be different ones of adamw, .* Found 'adam'"),
        "twice": ("lans,lans", "", "Found 'lans' twice"),
        "nothing": (",", "", "--optimizers should be different ones of .* Found ''"),
        "a hole": ("lans,,sgd", "", "Found ''"),
        "no function": ("lans", str(ADDED), "--add should name a function in a file.*Found"),
        "no file": ("lans", "nowhere.py:adamax", "Found 'nowhere.py:adamax': no such file"),
        "not there": (
            "lans",
            f"{ADDED}:adamix",
            "should define 'adamix', a function. Found None",
        ),
        "no callable": ("lans", f"{ADDED}:not_a_function", "should define 'not_a_function'"),
        "added twice": ("lans", f"{ADDED}:adamax,{ADDED}:adamax", "Found 'adamax' for two"),
        "the baseline": ("lans", f"{ADDED}:adamw", "Found 'adamw' for two optimizers"),
    }.values(),
)
def test_optimizers_that_cannot_be_compared(optimizers, add, message):
    with pytest.raises(InputError, match=message) as error:
        entries(optimizers, add)
    assert "Remedy: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "raises": "The optimizer raises should run without an error. Found RuntimeError: it broke.",
        "of_others": "should train the parameters of the model .* Found no gradient",
        "deaf": "at the learning rate that it is handed.* Found 0.001 for 0.001 and for",
        "casts": "casts should .* and leave the model as it is. Found parameters with",
        "freezes": "freezes should .* and leave the model as it is. Found .* frozen",
        "hooks": "hooks should .* and leave the model as it is. Found .* with other hooks",
        "no_step": "A step of the optimizer no_step should run without an error. Found Runtime.*no",
    }.items(),
)
def test_added_optimizers_that_do_not_work_are_found_before_the_study(name, message):
    trainer = make_trainer()
    with pytest.raises(InputError, match=message) as error:
        tried(trainer, name, entries("adamw", f"{ADDED}:{name}")[name])
    assert "Remedy: " in str(error.value)
    assert "\n" not in str(error.value)


def test_the_mean_time_of_a_step_slows_the_plan_down(monkeypatch):
    clock, trainer = {"now": 0.0}, make_trainer()
    chosen = entries("sgd", f"{ADDED}:grouped")

    def stepping(kind, seconds):
        def step(self, closure=None):
            clock["now"] += seconds

        return type(kind.__name__, (kind,), {"step": step})

    # Backward takes no time here; the task's AdamW a second, the others 1, 2 and 6: 3 in the mean.
    timed = {
        name: replace(entry, make=partial(lambda kind, m, lr: kind(m.parameters(), lr=lr), kind))
        for (name, entry), kind in zip(
            chosen.items(), [stepping(torch.optim.SGD, s) for s in (1.0, 2.0, 6.0)], strict=True
        )
    }
    trainer.optimizer = stepping(torch.optim.SGD, 1.0)(trainer.model.parameters(), lr=0.1)
    monkeypatch.setattr("steadygrad.studies.compare.trials._clock", lambda trainer: clock["now"])
    # Rounded to a quarter power of two.
    assert slowdown(trainer, timed) == 2 ** (6 / 4)


def test_optimizers_that_are_faster_do_not_speed_the_plan_up(monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(
        "steadygrad.studies.compare.trials._seconds",
        lambda trainer, optimizers, turns: {"": 1.0, "adamw": 0.5, "sgd": 0.25},
    )
    assert slowdown(trainer, entries("sgd")) == 1.0
