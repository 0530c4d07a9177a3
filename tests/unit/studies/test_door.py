"""What a study refuses before any training, and what it lets in: factories and losses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Noise
from steadygrad.studies.folder import read_run
from steadygrad.studies.summary import DEPENDENT
from tests.unit.studies.framework import PLAN, begin, go_on, lines, make_trainer
from tests.unit.studies.tiny_task import losses, make_model, make_task, mean


def enter(*, dtype="float32", **changes):
    trainer = make_trainer(make_task(**changes), dtype=dtype)
    trainer.check_task()
    return trainer


# Models


def body(*, frozen=False, norm=False):
    parts = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if norm else [])]
    return nn.Sequential(*parts).requires_grad_(not frozen)


def around(part):
    """A maker of models that share a part."""
    return lambda: nn.Sequential(part, nn.Tanh(), nn.Linear(16, 1))


def copies():
    """Each a copy of the one before, as training left that."""
    made = [make_model()]

    def make():
        made.append(copy.deepcopy(made[-1]))
        return made[-1]

    return make


def reset():
    """One object, whose weights are drawn anew."""
    model = make_model()

    def make():
        for module in model:
            getattr(module, "reset_parameters", bool)()
        return model

    return make


def pretrained(*, head):
    state = make_model().state_dict()

    def make():
        torch.manual_seed(3)
        model = make_model()
        model.load_state_dict(state)
        if head:
            model[3] = nn.Linear(16, 1)
        return model

    return make


def forked():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make_model()


def generated():
    model, generator = make_model(), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


# Optimizers


def again():
    made = []

    def make(parameters, lr):
        made.append(SGD(parameters, lr=lr, momentum=0.9))
        return made[0]

    return make


def with_another(parameter):
    return lambda parameters, lr: SGD([*parameters, parameter], lr=lr)


def two_rates(parameters, lr):
    return SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:]}], lr)


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


class Unsavable(SGD):
    """Its state holds what only a pickle can keep."""

    def state_dict(self):
        return {**super().state_dict(), "odd": make_task}


EXTRA = nn.Parameter(torch.ones(8))
OTHER = make_model()


def thousandfold(model, batch):
    return 1e3 * losses(model, batch)


def with_extra(model, batch):
    return losses(model, (batch[0] * EXTRA, batch[1]))


REFUSED = {
    # Models that carry weights on, or share a seed.
    "make_model": [
        {"make_model": copies()},
        {"make_model": around(body())},
        {"make_model": around(body(frozen=True, norm=True))},
        {"make_model": forked},
        {"make_model": generated},
        {"make_model": pretrained(head=True)},
        {"make_model": lambda: nn.Sequential(nn.LazyLinear(1))},
        # Where an ordinary first step would not move the weights.
        {"make_model": copies(), "warmup_samples": 64},
        {"make_model": copies(), "dtype": "float16", "per_sample_loss": thousandfold},
    ],
    # Optimizers that are not new, or not as asked.
    "make_optimizer": [
        {"make_optimizer": again()},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=0.5)},
        # As Adafactor with steps of its own choice.
        {"make_optimizer": lambda ps, lr: SGD([{"params": ps, "lr": None}])},
        {"make_optimizer": with_another(EXTRA), "per_sample_loss": with_extra},
        {"make_optimizer": turns, "optimizer_takes": "model"},
        {"make_optimizer": zeroes, "optimizer_takes": "model"},
        {"make_optimizer": exchanges, "optimizer_takes": "model"},
    ],
    "optimizer_takes": [
        {"make_optimizer": lambda model, lr: SGD(model.parameters(), lr)},
        {"make_optimizer": lambda ps, lr: SGD([*ps], lr), "optimizer_takes": "model"},
    ],
    "optimizer's state": [{"make_optimizer": lambda ps, lr: Unsavable(ps, lr=lr)}],
    "per_sample_loss": [{"per_sample_loss": lambda model, batch: losses(OTHER, batch)}],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, changes) for name in REFUSED for changes in REFUSED[name]]
)
def test_what_is_refused(name, changes):
    with pytest.raises(InputError, match=f"{name}.*Remedy"):
        enter(**changes)


def borrows(model, samples):
    """An evaluation with other weights, which are put back."""
    own = copy.deepcopy(model.state_dict())
    nn.init.zeros_(model[0].weight)
    loss = mean(model, samples)
    model.load_state_dict(own)
    return loss


@pytest.mark.parametrize(
    "changes",
    [
        # Models that are new or meant to be alike.
        {"make_model": reset()},
        {"make_model": around(body(frozen=True))},
        {"make_model": pretrained(head=False)},
        # A part that no optimizer has may be shared.
        {"make_model": around(body()), "make_optimizer": lambda ps, lr: SGD(ps[2:], lr=lr)},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=0.001)},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=0.1 * lr)},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=torch.tensor(lr))},
        {"make_optimizer": two_rates},
        {"make_optimizer": with_another(nn.Parameter(torch.zeros(1)))},
        {"warmup_samples": 64, "lr_decay": "cosine"},
        {"evaluate": borrows},
    ],
)
def test_what_is_let_in(changes):
    enter(**changes)


# Losses whose samples depend on one another


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


def drifting():
    """Losses that change from call to call tell nothing."""
    calls = []

    def per_sample_loss(model, batch):
        calls.append(1)
        return losses(model, batch) * len(calls)

    return {"per_sample_loss": per_sample_loss}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("changes", "dependent"),
    [
        ({"per_sample_loss": by_statistics}, True),
        ({"per_sample_loss": of_a_mean}, True),
        ({"make_model": with_norm, "batch_size": 2}, True),
        ({"make_model": Statistics}, True),
        ({"per_sample_loss": lambda model, batch: noisy(model, batch, by_statistics)}, True),
        ({}, False),
        (texts(noise=False), False),
        (texts(noise=True), False),
        ({"make_model": lambda: nn.Sequential(nn.Linear(8, 4), Frozen(4))}, False),
        ({"per_sample_loss": noisy}, False),
        ({"batch_size": 1}, False),
        (drifting(), False),
    ],
)
def test_losses_alone_and_in_company(changes, dependent, dtype):
    assert enter(**{"batch_size": 8, **changes}, dtype=dtype).dependent is dependent


def test_dependent_batches_are_not_cut():
    """Neither where the task says so nor where they do not fit."""

    def hungry(model, batch):
        if len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return by_statistics(model, batch)

    with pytest.raises(InputError, match="micro_batch_size = 4"):
        enter(per_sample_loss=by_statistics, batch_size=8, micro_batch_size=4)
    trainer = enter(per_sample_loss=hungry, batch_size=8)
    trainer.fit_micro_batch(16)
    with pytest.raises(InputError, match="micro_batch_size = 16"):
        trainer.fit_micro_batch(32)


def test_a_study_of_dependent_losses_measures_no_noise_scale_and_says_so(tmp_path):
    """Its record knows it, so that a resumed study goes on alike."""
    whole, _ = begin(tmp_path / "whole", "dependent", at=None)
    run = read_run(tmp_path / "whole")
    assert run.header.task.dependent
    assert not run.select(Noise)
    assert whole.summary.remarks[-1] == DEPENDENT
    assert len(whole.summary.remarks) <= 3
    assert [point.noise for point in whole.summary.points] == [None] * len(PLAN.points)
    begin(tmp_path / "cut", "dependent", at=1500)
    go_on(tmp_path / "cut")
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
