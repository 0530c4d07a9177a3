"""What a study refuses before any training, and what it lets in: factories and losses."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Noise
from steadygrad.studies.folder import read_run
from tests.unit.studies.framework import PLAN, begin, go_on, lines, make_trainer
from tests.unit.studies.tiny_task import losses, make_model, make_task, mean


def enter(**changes):
    trainer = make_trainer(make_task(**changes))
    trainer.check_task()
    return trainer


def body(*, frozen=False, norm=False):
    parts = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if norm else [])]
    return nn.Sequential(*parts).requires_grad_(not frozen)


def around(part):
    """A maker of models that share a part."""
    return lambda: nn.Sequential(part, nn.Tanh(), nn.Linear(16, 1))


def same():
    model = make_model()
    return lambda: model


def copies():
    """Each a copy of the one before, as training left that."""
    made = [make_model()]

    def make():
        made.append(copy.deepcopy(made[-1]))
        return made[-1]

    return make


def reset():
    model = make_model()

    def make():
        for module in model:
            getattr(module, "reset_parameters", bool)()
        return model

    return make


def parameter_of(tensor):
    def make():
        model = make_model()
        model[0].weight = nn.Parameter(tensor)
        return model

    return make


def pretrained(seed=None, head=False):
    state = make_model().state_dict()

    def make():
        if seed is not None:
            torch.manual_seed(seed)
        model = make_model()
        model.load_state_dict(state)
        if head:
            model[3] = nn.Linear(16, 1)
        return model

    return make


def constant():
    model = nn.Linear(8, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def seeded(how):
    state = torch.get_rng_state()

    def make():
        if how == "forked":
            with torch.random.fork_rng():
                torch.manual_seed(3)
                return make_model()
        if how == "state":
            torch.set_rng_state(state)
        if how == "global":
            torch.manual_seed(3)
        if how == "derived":
            torch.manual_seed(torch.initial_seed() + 1)
        model = make_model()
        if how == "generator":
            generator = torch.Generator().manual_seed(3)
            for parameter in model.parameters():
                nn.init.normal_(parameter, generator=generator)
        return model

    return make


@pytest.mark.parametrize(
    "make",
    [
        same(),
        copies(),
        around(body()),
        around(body(frozen=True, norm=True)),
        parameter_of(torch.randn(16, 8)),
        *map(seeded, ("global", "forked", "generator", "state")),
        pretrained(seed=3, head=True),
    ],
)
def test_models_that_carry_weights_on_or_share_a_seed(make):
    with pytest.raises(InputError, match=r"Task.make_model.*Remedy"):
        enter(make_model=make)


@pytest.mark.parametrize(
    "make",
    [
        reset(),
        around(body(frozen=True)),
        pretrained(),
        pretrained(seed=3),
        pretrained(head=True),
        constant,
        seeded("derived"),
        lambda: torch.compile(make_model(), backend="eager"),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1)),
    ],
)
def test_models_that_are_new_or_meant_to_be_alike(make):
    enter(make_model=make)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"warmup_samples": 64}, "float32"),
        ({"per_sample_loss": lambda model, batch: 1e3 * losses(model, batch)}, "float16"),
    ],
)
def test_weights_that_an_ordinary_first_step_would_not_move(changes, dtype):
    trainer = make_trainer(make_task(make_model=same(), **changes), dtype=dtype)
    with pytest.raises(InputError, match=r"Task.make_model.*Remedy"):
        trainer.check_task()


def test_a_shared_part_that_no_optimizer_has_may_be_shared():
    make = around(body())
    enter(make_model=make, make_optimizer=lambda parameters, lr: SGD(parameters[2:], lr=lr))


def again():
    made = []

    def make(parameters, lr):
        made.append(SGD(parameters, lr=lr, momentum=0.9))
        return made[0]

    return make


def scheduled(factor):
    def make(parameters, lr):
        optimizer = SGD(parameters, lr=lr)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor)
        return optimizer

    return make


def rated(rate):
    """As Adafactor with steps of its own choice."""

    def make(parameters, lr):
        optimizer = SGD([{"params": p} for p in parameters], lr=lr)
        optimizer.param_groups[0]["lr"] = rate
        return optimizer

    return make


def with_another(parameter):
    return lambda parameters, lr: SGD([*parameters, parameter], lr=lr)


EXTRA = nn.Parameter(torch.ones(8))


def with_extra(model, batch):
    return losses(model, (batch[0] * EXTRA, batch[1]))


def turns(model, lr):
    """Two calls would undo each other."""
    with torch.no_grad():
        model[0].weight.neg_()
    return SGD(model.parameters(), lr=lr)


def zeroes(model, lr):
    """The first call alone changes anything."""
    nn.init.zeros_(model[-1].weight)
    return SGD(model.parameters(), lr=lr)


def exchanges(model, lr):
    model[0] = nn.Linear(8, 16)
    return SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"make_optimizer": again()}, "returned before"),
        ({"make_optimizer": lambda p, lr: SGD(p, lr=0.5)}, "0.5 for 0.001"),
        ({"make_optimizer": rated(None)}, r"Found \w+Error"),
        ({"make_optimizer": rated(torch.ones(2))}, r"Found \w+Error"),
        ({"make_optimizer": scheduled(0.0)}, "Found 0 for 0.001"),
        ({"make_optimizer": with_another(EXTRA), "per_sample_loss": with_extra}, "1 others"),
        ({"make_optimizer": turns, "optimizer_takes": "model"}, "with other values, exchanged"),
        ({"make_optimizer": zeroes, "optimizer_takes": "model"}, "with other values, exchanged"),
        ({"make_optimizer": exchanges, "optimizer_takes": "model"}, "with other values, exchanged"),
        (
            {"make_optimizer": lambda model, lr: SGD(model.parameters(), lr=lr)},
            "optimizer_takes='parameters'",
        ),
        (
            {"make_optimizer": lambda named, lr: SGD([p for _, p in named], lr=lr)},
            "optimizer_takes='parameters'",
        ),
        (
            {"make_optimizer": lambda p, lr: SGD([*p], lr=lr), "optimizer_takes": "model"},
            "optimizer_takes='model'",
        ),
    ],
)
def test_optimizers_that_are_not_new_or_not_as_asked(changes, found):
    with pytest.raises(InputError, match=rf"Task.make_optimizer.*{found}") as error:
        enter(**changes)
    assert "Remedy: " in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"make_optimizer": lambda p, lr: SGD(p, lr=0.001)},
        {"make_optimizer": lambda p, lr: SGD(p, lr=min(lr, 0.001))},
        {"make_optimizer": lambda p, lr: SGD(p, lr=0.1 * lr)},
        {"make_optimizer": lambda p, lr: SGD(p, lr=torch.tensor(lr))},
        {
            "make_optimizer": lambda p, lr: SGD(
                [{"params": p[:1], "lr": 1.0}, {"params": p[1:]}], lr
            )
        },
        {"make_optimizer": scheduled(0.1)},
        {"make_optimizer": with_another(nn.Parameter(torch.zeros(1)))},
        {"warmup_samples": 64, "lr_decay": "cosine"},
    ],
)
def test_optimizers_as_asked(changes):
    enter(**changes)


def test_an_evaluation_may_borrow_the_weights():
    def evaluate(model, samples):
        own = copy.deepcopy(model.state_dict())
        nn.init.zeros_(model[0].weight)
        loss = mean(model, samples)
        model.load_state_dict(own)
        return loss

    enter(evaluate=evaluate)


def test_a_loss_of_another_model():
    other = make_model()
    with pytest.raises(InputError, match=r"Task.per_sample_loss.*no gradient.*Remedy"):
        enter(per_sample_loss=lambda model, batch: losses(other, batch))


# Losses whose samples depend on one another


def contrastive(model, batch):
    features = F.normalize(model(batch[0]) * batch[1], dim=0).tanh()
    return F.cross_entropy(features @ features.T, torch.arange(len(features)), reduction="none")


def triplet(model, batch):
    features, sign = model(batch[0]), batch[1] > 0
    distances, alike = torch.cdist(features, features), sign == sign.T
    return ((distances * alike).amax(1) - (distances + 9.0 * alike).amin(1) + 1).relu()


def by_statistics(model, batch):
    predicted = model(batch[0])
    return (predicted - predicted.mean(0) - batch[1]).square().mean(1)


def of_a_mean(model, batch):
    return losses(model, batch) / len(batch[0])


def with_norm():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))


def noisy(model, batch, losses=losses):
    return losses(model, (F.dropout(batch[0] + torch.randn_like(batch[0]), 0.5), batch[1]))


class Statistics(nn.Module):
    """A BatchNorm of a task's own, with dropout in one module."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        x = self.body(F.dropout(x, 0.1, self.training))
        if self.training:
            self.mean = x.detach().mean(0)
        return x - (x.mean(0) if self.training else self.mean)


class Frozen(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class Texts:
    """Rows of other lengths, padded to the longest of a batch."""

    def __len__(self):
        return 64

    def batch(self, indices):
        rows = [torch.full((1 + i % 7 * (i > 32),), 1.0 + i) for i in indices.tolist()]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Text(nn.Module):
    """Each token alone, with dropout, or with noise that evaluation mode does not turn off."""

    def __init__(self, noise):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.noise = noise

    def forward(self, x):
        return (self.head(F.dropout(x, 0.5, self.noise)[..., None])[..., 0] * (x > 0)).sum(1)


def texts(noise):
    return {
        "make_model": lambda: Text(noise),
        "train": Texts(),
        "valid": Texts(),
        "per_sample_loss": lambda model, batch: model(batch).square(),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("changes", "dependent"),
    [
        ({"per_sample_loss": contrastive}, True),
        ({"per_sample_loss": triplet}, True),
        ({"per_sample_loss": by_statistics}, True),
        ({"per_sample_loss": of_a_mean}, True),
        ({"make_model": with_norm}, True),
        ({"make_model": with_norm, "batch_size": 2}, True),
        ({"make_model": Statistics}, True),
        ({"per_sample_loss": lambda model, batch: noisy(model, batch, triplet)}, True),
        ({}, False),
        (texts(noise=False), False),
        (texts(noise=True), False),
        ({"make_model": lambda: nn.Sequential(nn.Linear(8, 4), Frozen(4))}, False),
        ({"per_sample_loss": noisy}, False),
        ({"make_model": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))}, False),
        ({"batch_size": 1}, False),
    ],
)
def test_losses_alone_and_in_company(changes, dependent, dtype):
    trainer = make_trainer(make_task(**{"batch_size": 8, **changes}), dtype=dtype)
    trainer.check_task()
    assert trainer.dependent is dependent


def test_losses_that_change_from_call_to_call_tell_nothing():
    calls = []

    def drifting(model, batch):
        calls.append(1)
        return losses(model, batch) * len(calls)

    assert not enter(per_sample_loss=drifting, batch_size=8).dependent


def test_dependent_batches_are_not_cut():
    task = make_task(per_sample_loss=by_statistics, batch_size=8, micro_batch_size=4)
    with pytest.raises(InputError, match=r"micro_batch_size = 4.*Remedy"):
        make_trainer(task).check_task()
    trainer = make_trainer(replace(task, micro_batch_size=8))
    trainer.check_task()
    with pytest.raises(InputError, match=r"Batches of 16.*micro_batch_size = 8.*Remedy"):
        trainer.fit_micro_batch(16)


def test_dependent_batches_that_do_not_fit_are_not_cut():
    def hungry(model, batch):
        if len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return by_statistics(model, batch)

    trainer = make_trainer(make_task(per_sample_loss=hungry, batch_size=8))
    trainer.check_task()
    trainer.fit_micro_batch(16)
    with pytest.raises(InputError, match=r"Batches of 32 samples.*micro_batch_size = 16.*Remedy"):
        trainer.fit_micro_batch(32)


def test_a_study_of_dependent_losses_measures_no_noise_scale_and_says_so(tmp_path):
    """Its record knows it, so that a resumed study goes on alike."""
    whole, _ = begin(tmp_path / "whole", "dependent", at=None)
    run = read_run(tmp_path / "whole")
    assert run.header.task.dependent
    assert not list(run.select(Noise))
    assert "batch size is part of what is trained" in whole.summary.remarks[-1]
    assert len(whole.summary.remarks) <= 3
    assert [point.noise for point in whole.summary.points] == [None] * len(PLAN.points)
    begin(tmp_path / "cut", "dependent", at=1500)
    go_on(tmp_path / "cut")
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
